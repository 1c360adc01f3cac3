"""The fault campaign; without --slow, only its quickest cells and a check of the table."""

import ctypes
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import campaign
from tests.faults.cells import CELLS, LAYOUTS, Cell, End
from tests.faults.faults import FAULTS, MOMENTS

QUICK = ("has --seed 7", "raises at building")


@pytest.fixture(scope="module", autouse=True)
def orphans() -> Iterator[None]:
    """Make this process the parent of all orphans, so that it finds them."""
    set_subreaper(1)
    yield
    set_subreaper(0)


def set_subreaper(on: int) -> None:
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, on)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def expected(shared: Path) -> Callable[[str], campaign.Losses]:
    """`expected(layout)`: losses of the layout without a fault; each layout is trained once."""
    known: dict[str, campaign.Losses] = {}

    def of(layout: str) -> campaign.Losses:
        if layout not in known:
            known[layout] = campaign.undisturbed(layout, shared)
        return known[layout]

    return of


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 24 MB if the cell needs one; the test is skipped without permission to mount."""
    path = tmp_path / "disk"
    path.mkdir()
    if "disk" not in request.getfixturevalue("cell").fault:
        yield path
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def is_quick(cell: Cell) -> bool:
    return cell.layout == "EP2" and any(words in str(cell) for words in QUICK)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=str(cell), marks=[] if is_quick(cell) else pytest.mark.slow) for cell in CELLS]
)
def test_a_fault_ends_as_it_should(
    cell: Cell, disk: Path, tmp_path: Path, shared: Path, expected, record_property
) -> None:
    outcome = campaign.run(cell, disk, tmp_path, shared, expected(cell.layout))
    record_property("outcome", str(outcome))
    print(outcome)


def test_the_table_is_wide() -> None:
    assert len({str(cell) for cell in CELLS}) == len(CELLS) >= 60
    assert {cell.layout for cell in CELLS} == LAYOUTS.keys()
    assert {cell.moment for cell in CELLS} == MOMENTS.keys()
    assert {cell.fault for cell in CELLS if not cell.fault.startswith("has --")} == FAULTS.keys()
    assert all(count >= 6 for count in Counter(cell.end for cell in CELLS).values())
    assert {cell.end for cell in CELLS if is_quick(cell)} == {End.REFUSED, End.RESUMES}
