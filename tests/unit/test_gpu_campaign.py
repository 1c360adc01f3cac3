"""tests/gpu: a campaign goes on after steps that fail or hang; its references are those of its cases."""

import json
import sys
import tarfile
from pathlib import Path

import pytest

from tests.gpu import campaign, curves
from tests.gpu.campaign import Campaign, Step
from tests.gpu.cases import CASES, MISTAKEN
from tests.gpu.curves import Comparison, Outcome


def said(text: str) -> list[str]:
    return [sys.executable, "-c", text]


STEPS = (
    Step("fails", 60, said("print('before'); raise SystemExit(3)")),
    Step("hangs", 1, ["sh", "-c", "echo asleep; exec sleep 600"]),
    Step("missing", 60, ["no-such-program"]),
    Step("figures", 60, [*said("import sys; open(sys.argv[1], 'w').write('1')"), "{logs}/figures.json"]),
    Step("alone", 60, said("raise SystemExit(4)"), None),
)


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    ran = Campaign(tmp_path, cpu=True, only=[], seconds=600)
    assert [ran.run(step) for step in STEPS] == [False, False, False, True, True]
    ran.close()
    rows = [line.split()[:3] for line in (tmp_path / "summary.txt").read_text().splitlines()]
    assert rows == [
        ["fails", "exit", "3"],
        ["hangs", "exit", "124"],
        ["missing", "exit", "127"],
        ["figures", "exit", "0"],
        ["alone", "needs", "a"],
    ]
    assert ran.failed == 3
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        assert {"results/fails.txt", "results/hangs.txt", "results/figures.json"} <= {*archive.getnames()}
        log = archive.extractfile("results/hangs.txt")
        assert log is not None and log.read() == b"asleep\n"


def test_no_step_starts_without_time(tmp_path: Path) -> None:
    ran = Campaign(tmp_path, cpu=False, only=[], seconds=5)
    assert not ran.run(STEPS[0]) and "no time left" in (tmp_path / "summary.txt").read_text()
    assert not (ran.logs / "fails.txt").exists()
    ran.close()


def test_commands_name_files_that_exist() -> None:
    steps = [*campaign.FIRST, *(step for lane in campaign.LANES for step in lane), *campaign.ALONE]
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        for word in step.command:
            if word.endswith(".py") or word.startswith("tests/"):
                assert (campaign.ROOT / word).exists(), word
            if word.startswith("tests."):
                assert (campaign.ROOT / f"{word.replace('.', '/')}.py").exists(), word


def test_references_are_those_of_the_cases() -> None:
    known = json.loads(curves.REFERENCES.read_text())
    assert known.keys() == CASES.keys() and MISTAKEN in CASES
    for name, case in CASES.items():
        assert known[name]["flags"] == case.flags and len(known[name]["curve"]) == case.iterations


RIGHT = Outcome([(2.0, 1.0), (1.5, 1.0)], 3.0, 1.0)
ALMOST = Outcome([(2.0, 1.0), (1.5000001, 1.0)], 3.0, 1.0)
WRONG = Outcome([(2.0, 1.0), (1.6, 1.0)], 3.0, 1.0)


@pytest.mark.parametrize(
    ("runs", "faults"),
    [
        ({"first": RIGHT, "late": RIGHT, "no wait": WRONG}, []),
        ({"first": ALMOST}, []),
        ({"first": WRONG}, ["6.7e-02 from the CPU's curve (at most 1e-05)"]),
        ({"first": RIGHT, "late": ALMOST}, ["late: other bits than the first run"]),
        ({"first": RIGHT, "no wait": RIGHT}, ["no wait: not noticed"]),
        ({"first": "died"}, ["first: died"]),
        ({"first": RIGHT, "wrong event": "ranks differ"}, []),
    ],
)
def test_faults_are_named(runs: dict, faults: list[str]) -> None:
    case = CASES["float32"]
    assert Comparison(case, [[2.0, 1.0], [1.5, 1.0]], runs).faults() == faults
