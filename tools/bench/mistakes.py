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
            told = mistakes.message(ended.stderr, directory)
            flags = f"`{mistakes.cell(mistake.changes)}`" if mistake.changes else ""
            print(f"| {mistake.name} | {flags} | {mistakes.cell(told)} | {seconds:.1f} |", flush=True)
            if not mistakes.is_told(mistake.told, told):
                failed = True
                print(f"{mistake.name}: not as in the table", file=sys.stderr)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
