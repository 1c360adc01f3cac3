"""Output may be lost, but a broken output stream does not end the program."""

import subprocess
import sys
from pathlib import Path

import pytest

LINES = 20000
"""More lines than fit into a pipe."""

PROGRAM = f"""
LINES = {LINES}
import sys
from megatron_balance.job.endings import unbreakable_output
@unbreakable_output()
def main():
    for number in range(LINES):
        print("line", number, flush=number % 3 == 0)
        sys.stderr.write(sys.argv[1])
    open(sys.argv[2], "w").write("done")
main()
"""


def end(tmp_path: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run PROGRAM, with the redirection or pipe in `command`."""
    program = f"{sys.executable} -c '{PROGRAM}' x {tmp_path}/done"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {program} {command}"], capture_output=True, text=True, timeout=300
    )
    assert (tmp_path / "done").read_text() == "done"
    return done


def test_a_reader_that_goes_is_told_of_on_the_other_stream(tmp_path: Path) -> None:
    done = end(tmp_path, "| head -1")
    assert (done.returncode, done.stdout) == (0, "line 0\n")
    assert done.stderr.replace("x", "") == "standard output: [Errno 32] Broken pipe; the program continues without it\n"


@pytest.mark.parametrize("where", ["> /dev/full", "> /dev/full 2>&1", "2> /dev/full"])
def test_a_full_disk_ends_nothing(tmp_path: Path, where: str) -> None:
    done = end(tmp_path, where)
    assert done.returncode == 0
    if where == "> /dev/full":
        said = "standard output: [Errno 28] No space left on device; the program continues without it\n"
        assert done.stderr.replace("x", "") == said
    elif where == "2> /dev/full":
        said = "standard error: [Errno 28] No space left on device; the program continues without it\n"
        assert done.stdout.replace(said, "") == "".join(f"line {number}\n" for number in range(LINES))


def test_output_that_works_is_as_ever(tmp_path: Path) -> None:
    done = end(tmp_path, "")
    assert done.stdout == "".join(f"line {number}\n" for number in range(LINES)) and set(done.stderr) == {"x"}
