"""Measures how long common mistakes take to be told: each one is made in a process of its own.

    python tools/bench/mistakes.py

The table's times are from the start of Python to its end. For comparison, the first line is the start of a process that
only imports the program.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def main() -> None:
    # After the path is set
    from tests import mistakes

    start = time.perf_counter()
    subprocess.run([sys.executable, str(mistakes.ENTRY_POINT), "--help"], stdout=subprocess.DEVNULL, check=True)
    print("| mistake | flags | message | seconds |\n|---|---|---|---|")
    print(f"| none: `--help` | | | {time.perf_counter() - start:.1f} |")
    failed = False
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        mistakes.write_files(directory)
        for mistake in mistakes.MISTAKES:
            start = time.perf_counter()
            ended = mistakes.run(mistake, directory)
            seconds = time.perf_counter() - start
            told = mistakes.message(ended.stderr).partition(": error: ")[2].strip()
            # As Markdown, in which <...> would be HTML
            told = told.replace(str(directory), "DIR").replace("|", "\\|").replace("<", "&lt;")
            variables = [f"{variable}={value}" for variable, value in mistake.environment.items()]
            words = [*variables, *(f"without {flag}" for flag in mistake.without.split()), mistake.flags]
            flags = " ".join(word for word in words if word)
            print(f"| {mistake.name} | {f'`{flags}`' if flags else ''} | {told} | {seconds:.1f} |", flush=True)
            for problem in mistakes.problems(mistake, ended.stderr):
                failed = True
                print(f"{mistake.name}: {problem}", file=sys.stderr)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
