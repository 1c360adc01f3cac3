"""The commands in README.md and docs/: which of them run as they stand, and their execution in a fresh clone.

    python -m tests.page_commands                             # list all commands with what becomes of them
    python -m tests.page_commands --run short                 # clone the repository, then run the short ones
    python -m tests.page_commands --run long --page docs/simulator.md

Every command runs in a login shell of its own, in the root of the clone and without an active environment. Only lines
of the same page that change the shell itself, such as `source .venv/bin/activate`, precede it. In a clone without an
environment, the quick start runs first. The exit status is 1 if a command failed.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

LIMITS = {"short": 1200, "long": 4 * 3600}
"""Seconds that a command may take, by class."""

ELSEWHERE = {
    r"sbatch": "needs SLURM",
    r"docker": "needs Docker",
    r"kubectl": "needs Kubernetes",
    r"sky": "needs SkyPilot",
    r"patch|pretrain_gpt\.py|\$MEGATRON_BALANCE.*": "needs a checkout of Megatron-LM",
    r"--no-build-isolation|pybind11": "needs nvcc",
    r"tests/gpu_campaign\.sh|tools/bench/(gpu_rates|measured_cluster)\.py": "needs a GPU",
}
"""Words of commands that run only in other places, and why."""

YOURS = ("my.yaml", "my_layout.args", "Mixtral-8x7B-v0.1", "loop.py", "bridge.py")
"""Files of the reader."""

LONG = re.compile(r"tools/bench/|tools/reproduce\.py|scripts/test|--train-iters 200")
STATE = re.compile(r"(source|export|cd) ")


class Command(NamedTuple):
    """A command of a page, on one line.

    `kind` is `short`, `long`, `state` (changes the shell for the commands after it) or `skipped`, with the `reason`.
    """

    page: str
    line: int
    text: str
    kind: str
    reason: str = ""


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield the first line number and the text of every bash block."""
    for match in re.finditer(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield text[: match.start(1)].count("\n") + 1, match[1]


def commands(page: Path, root: Path = ROOT) -> list[Command]:
    """Return the commands of a page in order."""
    name = page.relative_to(root).as_posix()
    found = []
    for first, block in blocks(page.read_text(encoding="utf-8")):
        for match in re.finditer(r"^(?![ \t]*#)[ \t]*\S(?:.*\\\n)*.*$", block, re.MULTILINE):
            text = " ".join(line.removesuffix("\\").strip() for line in match[0].strip().splitlines())
            number = first + block[: match.start()].count("\n")
            found.append(Command(name, number, text, *classified(name, text)))
    return found


def classified(page: str, text: str) -> tuple[str, str]:
    """Return the class of a command, and the reason if it is skipped."""
    words = shlex.split(text, comments=True)
    if STATE.match(text):
        return "state", ""
    if any(word == "..." or word.startswith("[") for word in words):
        return "skipped", "is abridged"
    for pattern, reason in ELSEWHERE.items():
        if any(re.fullmatch(pattern, word) for word in words):
            return "skipped", reason
    for word in words:
        if re.fullmatch(r"[A-Z]{2}[A-Z_]+(/.*)?", word):
            return "skipped", f"has the placeholder {word.partition('/')[0]}"
        if word.startswith(YOURS):
            return "skipped", f"needs the reader's {word}"
    if os.geteuid() and ("testbed.py" in text or text.startswith("nice -n -")):
        return "skipped", "needs root"
    return ("long" if page.startswith("docs/measurements/") or LONG.search(text) else "short"), ""


def needs_environment(text: str) -> bool:
    """Return whether a command takes Python, torchrun or pip from an active environment."""
    return bool(re.match(r"(\w+=\S+ |nice -n \S+ )*(python|torchrun|pip|scripts/pretrain)\b", text))


def new_shell() -> dict[str, str]:
    """Return the environment of a shell in which nobody has activated or set anything for this project."""
    ours = ("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "PYTHONPATH", "PYTHON", "TORCHRUN", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    here = str(Path(sys.executable).parent)
    return kept | {"PATH": os.pathsep.join(part for part in kept["PATH"].split(os.pathsep) if part != here)}


def run(command: Command, state: Iterable[str], clone: Path, output: Path) -> str:
    """Run a command, write what it prints to a file, and return what went wrong; an empty string if nothing did."""
    script = "\n".join(["set -e", *state, command.text])
    with output.open("w") as log:
        process = subprocess.Popen(
            ["bash", "-l", "-c", script],
            cwd=clone,
            env=new_shell(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(LIMITS[command.kind])
        except subprocess.TimeoutExpired:
            return f"did not end within {LIMITS[command.kind]} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return f"exit status {status}" if status else ""


def run_all(pages: Iterable[Path], kinds: Iterable[str], clone: Path) -> list[str]:
    """Run the commands of the given classes; print each with its result, and return the failures.

    A command that several pages have runs once.
    """
    if not clone.exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    logs = clone.with_name(f"{clone.name}.logs")
    logs.mkdir(exist_ok=True)
    failures = []
    done = set()
    if not (clone / ".venv").exists() and ROOT / "README.md" not in pages:
        # As a reader of README.md does first: it installs, and makes data that other pages' commands read
        setup = Command("README.md", 1, "scripts/quickstart.sh", "short")
        failures += [problem] if (problem := run(setup, [], clone, logs / "setup.txt")) else []
    for page in pages:
        state: list[str] = []
        for command in commands(page):
            if command.kind == "state":
                state.append(command.text)
            # Without the comment, which differs from page to page
            key = (*state, *shlex.split(command.text, comments=True))
            if command.kind not in kinds or key in done:
                continue
            done.add(key)
            begin = time.monotonic()
            output = logs / f"{command.page.replace('/', '_')}_{command.line}.txt"
            problem = run(command, state, clone, output)
            print(f"{problem or 'ok'} in {time.monotonic() - begin:.0f} s: {_place(command)}", flush=True)
            if problem:
                tail = "\n".join(output.read_text(errors="replace").splitlines()[-15:])
                failures.append(f"{_place(command)}: {problem}\n{tail}")
    return failures


def _place(command: Command) -> str:
    return f"{command.page}:{command.line}: {command.text}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--run", choices=LIMITS, nargs="+", default=[], help="classes of commands to run")
    parser.add_argument("--page", type=Path, nargs="+", default=PAGES, help="pages to take; default: all")
    arguments = parser.parse_args()
    pages = [page.resolve() for page in arguments.page]
    if not arguments.run:
        for page in pages:
            for command in commands(page):
                print(f"{command.kind}{' (' + command.reason + ')' if command.reason else ''}: {_place(command)}")
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        failures = run_all(pages, arguments.run, Path(temporary, "clone"))
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
