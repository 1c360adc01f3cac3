"""observe/load_log.py: loads are read back in order, and errors name the damaged file."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.observe.load_log import LoadLog, read_loads
from megatron_balance.placement.placement import Placement
from tests.unit.placements import loads, placements

PLAIN = Placement.identity(4, 2, 1)
LENT = PLAIN.rehost([[1], [0], [1], [1]])


def load_of(iteration: int) -> np.ndarray:
    return np.arange(8).reshape(2, 4) * (iteration + 1)


def write(directory: Path, iterations: range, every: int = 100, rank: int = 0, first_iteration: int = 0) -> None:
    """Write the loads of iterations, with a flush after every `every` of them."""
    log = LoadLog(directory, rank, first_iteration)
    for iteration in iterations:
        log.add(iteration, {2: (load_of(iteration), PLAIN), 10: (load_of(iteration) + rank, LENT)})
        if (iteration + 1) % every == 0:
            log.flush()
    log.flush()


@settings(max_examples=30)
@given(st.data(), placements())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, placement: Placement) -> None:
    directory = tmp_path_factory.mktemp("loads")
    counts = [data.draw(loads(placement)) for _ in range(3)]
    log = LoadLog(directory, 7)
    for iteration, counts_DE in zip((2, 3, 9), counts, strict=True):
        log.add(iteration, {1: (counts_DE, placement)})
    log.flush()
    assert [path.name for path in directory.iterdir()] == ["loads_rank00007_iter0000002.npz"]
    read = read_loads(directory)[7]
    assert read.iterations.tolist() == [2, 3, 9]
    assert read.counts[1].tolist() == [counts_DE.tolist() for counts_DE in counts]
    assert read.counts[1].dtype == np.int64
    assert [Placement.parse(text) for text in read.placements[1]] == [placement] * 3


def test_files_and_ranks_in_order(tmp_path: Path) -> None:
    for rank in (8, 100000):
        write(tmp_path, range(25), every=10, rank=rank)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("loads_rank00008_iter0000000.npz", "loads_rank00008_iter0000010.npz", "loads_rank00008_iter0000020.npz"),
        *("loads_rank100000_iter0000000.npz", "loads_rank100000_iter0000010.npz"),
        "loads_rank100000_iter0000020.npz",
    ]
    read = read_loads(tmp_path)
    assert list(read) == [8, 100000]
    for rank, own in read.items():
        assert own.iterations.tolist() == list(range(25))
        assert own.counts.keys() == own.placements.keys() == {2, 10}
        assert (own.counts[10] == np.stack([load_of(iteration) + rank for iteration in range(25)])).all()
        assert set(own.placements[10].tolist()) == {str(LENT)}


def test_iterations_that_happen_again_count_once(tmp_path: Path) -> None:
    write(tmp_path, range(40), every=10, rank=0)
    write(tmp_path, range(40), every=10, rank=1)
    write(tmp_path, range(15, 18), first_iteration=15)
    read = read_loads(tmp_path)
    assert read[0].iterations.tolist() == list(range(18))
    assert (read[0].counts[2] == np.stack([load_of(iteration) for iteration in range(18)])).all()
    assert read[1].iterations.tolist() == list(range(40))


def test_nothing_to_write(tmp_path: Path) -> None:
    LoadLog(tmp_path / "empty", 0).flush()
    assert list((tmp_path / "empty").iterdir()) == []
    for directory in (tmp_path / "empty", tmp_path / "none"):
        with pytest.raises(ValueError, match=f"{directory}: has no loads_rank"):
            read_loads(directory)


def test_counts_may_change_after_they_were_added(tmp_path: Path) -> None:
    log = LoadLog(tmp_path, 0)
    counts_DE = np.ones((2, 4), dtype=np.int64)
    log.add(0, {1: (counts_DE, PLAIN)})
    counts_DE[:] = 5
    log.flush()
    assert (read_loads(tmp_path)[0].counts[1] == 1).all()


def good_arrays() -> dict[str, np.ndarray]:
    return {
        "iterations": np.array([3, 4]),
        "layer_1": np.ones((2, 2, 4), dtype=np.int64),
        "placement_1": np.array([str(PLAIN)] * 2),
    }


MISTAKES = {
    "no iterations": {"iterations": None},
    "no placement": {"placement_1": None},
    "a layer under another name": {"layer_1": None, "mayer_1": np.ones((2, 2, 4), dtype=np.int64)},
    "objects": {"layer_1": np.array([[{}]], dtype=object)},
}


@pytest.mark.parametrize("change", MISTAKES.values(), ids=MISTAKES)
def test_arrays_that_are_not_ours(tmp_path: Path, change: dict[str, np.ndarray | None]) -> None:
    path = tmp_path / "loads_rank00000_iter0000003.npz"
    np.savez(path, **good_arrays())
    assert read_loads(tmp_path)[0].iterations.tolist() == [3, 4]
    np.savez(path, **{name: value for name, value in (good_arrays() | change).items() if value is not None})
    with pytest.raises(ValueError, match=str(path)):
        read_loads(tmp_path)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    path = tmp_path / "loads_rank00000_iter0000003.npz"
    np.savez(path, **good_arrays())
    with pytest.raises(ValueError, match=f"{path}: has other layers"):
        read_loads(tmp_path)


@pytest.mark.parametrize("seed", range(20))
def test_damage_is_told_by_the_path_or_harmless(tmp_path: Path, seed: int) -> None:
    write(tmp_path, range(5))
    (path,) = tmp_path.iterdir()
    whole = bytearray(path.read_bytes())
    generator = np.random.default_rng(seed)
    expected = read_loads(tmp_path)[0]
    for _ in range(25):
        damaged = bytearray(whole)
        damaged[generator.integers(len(damaged))] ^= 1 << int(generator.integers(8))
        path.write_bytes(damaged[: generator.integers(len(damaged))] if seed % 2 else damaged)
        try:
            read = read_loads(tmp_path)[0]
        except ValueError as error:
            assert str(path) in str(error)
        else:
            assert read.counts.keys() == expected.counts.keys()
            for layer, counts_BDE in read.counts.items():
                assert (counts_BDE == expected.counts[layer]).all()
                assert (read.placements[layer] == expected.placements[layer]).all()
