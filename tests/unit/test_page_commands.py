"""The commands of the pages: each is classified and parses; behind --slow, they run in a fresh clone."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.page_commands import PAGES, ROOT, blocks, classified, commands, needs_environment, run_all

PROGRAMS = {"python", "torchrun", "pip", "source", "docker", "sbatch", "kubectl", "sky", "patch", "nice", "sed"}


def test_every_block_parses() -> None:
    script = "\n".join(command.text for page in PAGES for command in commands(page))
    parsed = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert parsed.returncode == 0 and parsed.stderr == ""
    unmarked = [page.name for page in PAGES if re.search(r"^```(sh|shell|console)\b", page.read_text(), re.MULTILINE)]
    assert unmarked == []


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_exist_and_have_their_environment(page: Path) -> None:
    activated = False
    for command in commands(page):
        words = [word for word in shlex.split(command.text, comments=True) if not re.match(r"[A-Z_]+=", word)]
        assert words[0] in PROGRAMS or (ROOT / words[0]).is_file(), command
        scripts = re.findall(r"(?<![\w/.$])(?:scripts|tools|tests)/[\w/]+\.(?:py|sh|sbatch)", command.text)
        assert all((ROOT / script).is_file() for script in scripts), command
        activated |= command.text == "source .venv/bin/activate"
        runs = command.kind in ("short", "long")
        assert activated or not (runs and needs_environment(command.text)), f"{command}: activates no environment"
        assert command.reason if command.kind == "skipped" else not command.reason


def test_the_classes(tmp_path: Path) -> None:
    assert classified("README.md", "torchrun x.py ... --save") == ("skipped", "is abridged")
    assert classified("README.md", "python tools/a.py --load DIR/x") == ("skipped", "has the placeholder DIR")
    assert classified("README.md", "docker build .") == ("skipped", "needs Docker")
    assert classified("README.md", "NNODES=2 python tools/a.py --workloads W0 # SOME REMARK") == ("short", "")
    assert classified("docs/measurements/overlap.md", "python tools/a.py") == ("long", "")
    assert classified("README.md", "source .venv/bin/activate") == ("state", "")
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```bash\n# remark\none \\\n    --two\n\nthree\n```\n\n```\nno command\n```\n")
    assert [first for first, _ in blocks(page.read_text())] == [4]
    assert [(command.line, command.text) for command in commands(page, tmp_path)] == [(5, "one --two"), (8, "three")]


def test_a_page_is_run_in_new_shells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    clone = tmp_path / "clone"
    (clone / ".venv").mkdir(parents=True)
    page = ROOT / "docs" / "page_of_a_test.md"
    lines = [
        "export A=1",
        "x=2",
        """sh -c 'test $A = 1 -a -z "$VIRTUAL_ENV$x"'""",
        "echo why && false",
        "echo why && false  # again",
    ]
    text = "\n".join(["```bash", *lines, "```", ""])
    monkeypatch.setattr(Path, "read_text", lambda path, **_: text if path == page else path.read_bytes().decode())
    (failure,) = run_all([page], ["short"], clone)
    assert failure == "docs/page_of_a_test.md:5: echo why && false: exit status 1\nwhy"


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_the_short_commands_run_in_a_fresh_clone(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout")
    assert run_all(PAGES, ["short"], tmp_path / "clone") == []
