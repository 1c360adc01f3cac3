"""Schedules from compute orders: the expected schedules are in tests/golden, and all schedules are valid."""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from megatron_balance.timeline import lower
from megatron_balance.timeline.actions import Operation, Schedule, grid
from megatron_balance.timeline.lower import Overlapping, Pass, one_forward_one_backward
from tests.unit.schedule_rules import validate, validate_ring

GOLDEN = Path(__file__).parents[1] / "golden"


class Stage(NamedTuple):
    """One pipeline stage."""

    blocks: list[list[int]]
    """MoE layers of its chunks."""
    microbatches: int = 1
    stage: int = 0
    stages: int = 1
    paired: bool = False

    def passes(self) -> list[Pass]:
        if len(self.blocks) == 1:
            table = [(0, microbatch) for microbatch in range(self.microbatches)]
            return one_forward_one_backward(table, 1, self.stages - self.stage - 1, self.paired)
        chunks = len(self.blocks)
        table = [(chunk, microbatch) for microbatch, chunk in get_schedule_table(self.microbatches, chunks, 2)]
        ahead = 2 * (self.stages - self.stage - 1) + 2 * (chunks - 1)
        return one_forward_one_backward(table, chunks, ahead, self.paired)

    def lowered(self, overlap: Overlapping = "blockwise", **more: int) -> Schedule:
        return lower.lower(self.passes(), self.blocks, overlap, **more)


BLOCKWISE = {
    "1_block": Stage([[1]]),
    "2_blocks": Stage([[1, 2]]),
    "4_blocks": Stage([[1, 2, 3, 4]]),
    "2_blocks_3_microbatches": Stage([[1, 2]], microbatches=3),
    "stage_0_of_2": Stage([[1, 2]], 3, 0, 2),
    "stage_1_of_2": Stage([[3, 4]], 3, 1, 2),
    "interleaved_stage_0_of_2": Stage([[1], [3]], 2, 0, 2),
    "interleaved_stage_1_of_2": Stage([[2], [4]], 2, 1, 2),
    "neighboring_chunks": Stage([[1, 2], [3], []], 2, 0, 2),
}

EXPECTED = {name: stage.lowered() for name, stage in BLOCKWISE.items()} | {
    "2_blocks_reduced_early": Stage([[1, 2]]).lowered(reduce_early=True),
    "2_blocks_late": Stage([[1, 2]]).lowered(late=True),
    "2_blocks_blocking": Stage([[1, 2]]).lowered("none"),
    "2_blocks_paired": Stage([[1, 2]], microbatches=2, paired=True).lowered(),
    "2_blocks_paired_on_device": Stage([[1, 2]], microbatches=2, paired=True).lowered(on_device=True),
    "2_blocks_paired_exact": Stage([[1, 2]], 2, paired=True).lowered(ring=2, apart=True, ahead=False),
    "2_blocks_blocking_exact": Stage([[1, 2]]).lowered("none", ring=2, ahead=False),
    "3_blocks_exact": Stage([[1, 2, 3]], 2, 0, 2).lowered(ring=2, ahead=False),
    "3_blocks_exact_reduced_early": Stage([[1, 2, 3]]).lowered(ring=2, ahead=False, reduce_early=True),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_golden(name: str) -> None:
    expected = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert grid(EXPECTED[name]) == expected


def instructions(stage: Stage, overlap: Overlapping) -> int:
    """Return how many of Python's instructions `lower` executes."""
    number = 0

    def count(frame: FrameType, event: str, _: object) -> Callable:
        nonlocal number
        frame.f_trace_opcodes = True
        number += event == "opcode"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        stage.lowered(overlap)
    finally:
        sys.settrace(before)
    return number


@pytest.mark.parametrize("overlap", ["none", "blockwise"])
def test_twice_the_layers_take_twice_as_long(overlap: Overlapping) -> None:
    few, many = (instructions(Stage([[*range(1, 1 + layers)]], 12), overlap) for layers in (8, 16))
    assert many < 2.5 * few


def test_nothing_else_is_golden() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(EXPECTED)


@st.composite
def stages(draw: st.DrawFn, paired: bool = False) -> Stage:
    """Return a stage with MoE layers; some of its chunks may have none."""
    chunks = draw(st.integers(1, 4))
    numbers = sorted(draw(st.sets(st.integers(1, 40), min_size=1, max_size=8)))
    cuts = draw(st.lists(st.integers(0, len(numbers)), min_size=chunks - 1, max_size=chunks - 1))
    edges = [0, *sorted(cuts), len(numbers)]
    blocks = [numbers[start:end] for start, end in pairwise(edges)]
    count = draw(st.integers(1, 6)) if chunks == 1 else 2 * draw(st.integers(1, 3))
    stage = draw(st.integers(0, 1))
    return Stage(blocks, count, stage, 2, paired)


@given(st.booleans().flatmap(stages), st.booleans(), st.booleans(), st.booleans())
def test_every_schedule_is_valid(stage: Stage, flag: bool, late: bool, blockwise: bool) -> None:
    """Each computation overlaps with at most one Trans or one Agg."""
    schedule = stage.lowered(reduce_early=flag, late=late) if blockwise else stage.lowered("none")
    validate(schedule)
    assert len({step.computation for step in schedule}) == len(schedule)
    layers = {number for chunk in stage.blocks for number in chunk}
    sent = [action for step in schedule for action in step.communication]
    for operation in (Operation.TRANS, Operation.AGG):
        assert {action.block for action in sent if action.operation is operation} == layers
    # Overlapped operations do not change the order of computations and exchanges
    plain = stage.lowered("none")
    assert [step.computation for step in schedule] == [step.computation for step in plain]
    for step in schedule if blockwise else ():
        assert len(step.communication) <= 1
        may_overlap = {Operation.FEC, Operation.FNEC, Operation.BNEC, Operation.BEC}
        assert not step.communication or step.computation.operation in may_overlap


@given(
    st.booleans().flatmap(stages),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["none", "blockwise"]),
)
def test_layers_share_guest_slots(stage: Stage, ring: int, early: bool, on_device: bool, overlap: Overlapping) -> None:
    common = {"reduce_early": early, "on_device": on_device}
    exact = {"ring": ring, "apart": stage.paired, **common}
    schedule = stage.lowered(overlap, ahead=False, **exact)
    validate_ring(schedule, ring, stage.paired)
    assert [step.computation for step in schedule] == [step.computation for step in stage.lowered("none", **common)]
    # Plans for the next iteration add their own actions: Trans before those of a microbatch, Agg after them
    both = stage.lowered(overlap, **exact)
    for step, one, other in zip(both, schedule, stage.lowered(overlap, **common), strict=True):
        aggs = tuple(action for action in other.communication if action.operation is Operation.AGG)
        trans = tuple(action for action in other.communication if action.operation is Operation.TRANS)
        assert step.communication == trans + one.communication + aggs
        assert step.planning == other.planning + one.planning
        assert {*step.waits} == {*one.waits, *other.waits}


EXHAUSTIVE = [
    *(Stage([[1, 2, 3]], 3, stage, 2) for stage in (0, 1)),
    *(Stage(blocks, 2, stage, 2) for blocks in ([[1], [2, 3]], [[1, 2], [3]], [[1], [3], [5]]) for stage in (0, 1)),
    *(Stage([[1, 2], [3]], 4, stage, 2) for stage in (0, 1)),
    Stage([[1, 2, 3]], 3, paired=True), Stage([[1, 2], [3]], 4, 1, 2, paired=True),
]  # fmt: skip


@pytest.mark.parametrize("overlap", ["none", "blockwise"])
@pytest.mark.parametrize("ring", [1, 2, 3])
def test_what_is_wrong_with_shared_guest_slots_is_found(ring: int, overlap: Overlapping) -> None:
    """Each schedule is valid, but not without one of its actions, nor if experts do not wait for their weights."""
    for stage in EXHAUSTIVE:
        schedule = stage.lowered(overlap, ring=ring, apart=stage.paired, ahead=False)
        validate_ring(schedule, ring, stage.paired)
        for number, step in enumerate(schedule):
            for column in ("communication", "planning", "waits"):
                for action in getattr(step, column):
                    without = step._replace(**{column: tuple(one for one in getattr(step, column) if one != action)})
                    with pytest.raises(AssertionError):
                        validate_ring((*schedule[:number], without, *schedule[number + 1 :]), ring, stage.paired)
            if step.computation.operation in (Operation.FEC, Operation.BEC) and step.waits:
                after = schedule[number + 1]
                late = step._replace(waits=()), after._replace(waits=(*after.waits, *step.waits))
                with pytest.raises(AssertionError):
                    validate_ring((*schedule[:number], *late, *schedule[number + 2 :]), ring, stage.paired)


@given(stages(), st.data())
def test_what_is_wrong_is_found(stage: Stage, data: st.DataObject) -> None:
    schedule = stage.lowered()
    busy = [number for number, step in enumerate(schedule) if step.waits or step.communication or step.planning]
    number = data.draw(st.sampled_from(busy))
    step = schedule[number]
    column = data.draw(
        st.sampled_from([name for name in ("communication", "planning", "waits") if getattr(step, name)])
    )
    dropped = step._replace(**{column: getattr(step, column)[1:]})
    with pytest.raises(AssertionError):
        validate((*schedule[:number], dropped, *schedule[number + 1 :]))
    doubled = step._replace(**{column: getattr(step, column) * 2})
    with pytest.raises(AssertionError, match=r"again"):
        validate((*schedule[:number], doubled, *schedule[number + 1 :]))


def test_one_forward_one_backward() -> None:
    table = [(0, microbatch) for microbatch in range(3)]
    found = ["".join(f"{'BF'[one.forward]}{one.microbatch}" for one in one_forward_one_backward(table, 1, ahead))
             for ahead in (0, 1, 5)]  # fmt: skip
    assert found == ["F0B0F1B1F2B2", "F0F1B0F2B1B2", "F0F1F2B0B1B2"]


def test_paired_passes_are_independent() -> None:
    """One more forward pass comes first, and only passes of the turns after it are paired."""
    table = [(0, microbatch) for microbatch in range(3)]
    found = [
        "".join(f"{'BF'[one.forward]}{one.microbatch}{'p' * one.paired}" for one in order)
        for order in (one_forward_one_backward(table, 1, ahead, paired=True) for ahead in (0, 1, 5))
    ]
    assert found == ["F0F1pB0pF2pB1pB2", "F0F1F2pB0pB1B2", "F0F1F2B0B1B2"]


@given(stages(paired=True), st.booleans())
def test_paired_passes_compute_what_passes_compute_alone(stage: Stage, on_device: bool) -> None:
    """The order of each microbatch's computations in a direction stays."""
    order = [step.computation for step in stage.lowered("none", on_device=on_device)]
    alone = [one._replace(paired=False) for one in stage.passes()]
    expected = [step.computation for step in lower.compute_order(alone, stage.blocks)]
    for microbatch in range(stage.microbatches):
        for is_forward in (True, False):
            passes = (
                [one for one in found if (one.microbatch, one.is_forward) == (microbatch, is_forward)]
                for found in (order, expected)
            )
            assert next(passes) == next(passes)
