"""Blocks of rows in another order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.comm.blocks import BlockMove, gathers, transposed

CPU = torch.device("cpu")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[np.ndarray, list[int]]:
    """Draw sizes of blocks, some of them empty, and a permutation of their dimensions."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    number = int(np.prod(shape))
    sizes = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=number, max_size=number))
    return np.array(sizes, dtype=np.int64).reshape(shape), [*draw(st.permutations(range(len(shape))))]


def by_definition(sizes: np.ndarray, dimensions: list[int]) -> torch.Tensor:
    """Return the row at each place, block by block."""
    first = sizes.cumsum().reshape(sizes.shape) - sizes
    blocks = zip(first.transpose(dimensions).flat, sizes.transpose(dimensions).flat, strict=True)
    return torch.tensor([row for begin, size in blocks for row in range(begin, begin + size)], dtype=torch.int32)


@given(st.lists(layouts(), max_size=4))
def test_moves_are_those_of_the_definition(cases: list[tuple[np.ndarray, list[int]]]) -> None:
    found = gathers([BlockMove.transposed(*case) for case in cases], CPU)
    for case, gather in zip(cases, found, strict=True):
        expected = by_definition(*case)
        rows = torch.arange(len(expected))
        assert torch.equal(gather(rows), expected) and torch.equal(
            transposed(rows, torch.from_numpy(case[0]), case[1]), expected
        )
        (back,) = gathers([BlockMove.transposed(*case).back], CPU)
        assert torch.equal(back(gather(rows)), rows) and torch.equal(gather.back(gather(rows)), rows)
        if torch.equal(rows, expected):
            assert gather.index_R is back.index_R is gather.back.index_R is None
        else:
            assert torch.equal(gather.index_R, expected) and torch.equal(gather.back.index_R, back.index_R)
            assert gather.back.index_R.dtype == torch.int32


def test_a_device_gets_all_moves_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is `meta`, which every machine has; its tensors have no data."""
    copied = []
    pinned = torch.Tensor.pin_memory

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copied.append(tensor)
        return tensor if not torch.cuda.is_available() else pinned(tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    sizes = np.array([[2, 0, 1], [1, 3, 0]])
    moves = [
        BlockMove.transposed(sizes, (1, 0)),
        BlockMove.transposed(sizes, (0, 1)),
        BlockMove.transposed(sizes.T, (1, 0)),
    ]
    one, same, other = gathers(moves, torch.device("meta"))
    assert len(copied) == 1 and same.index_R is None
    rows = torch.empty(7, 4, device="meta")
    assert one(rows).shape == other(rows).shape == rows.shape and one.index_R.device == rows.device
