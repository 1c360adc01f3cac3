"""Two passes take turns: one runs at a time, in a fixed order, and errors end both."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.device.turns import Turns


def merged(forward: list[str], backward: list[str]) -> list[str]:
    """Return the order in which segments run: in turn, then the rest of the longer pass."""
    longest = max(len(forward), len(backward))
    return [one for number in range(longest) for one in (*forward[number:][:1], *backward[number:][:1])]


def run(turns: Turns, segments: dict[str, int]) -> list[str]:
    """Run two passes with these numbers of segments; return the segments in the order in which they ran."""
    order: list[str] = []
    running = threading.Lock()

    def work(direction: str) -> str:
        for number in range(segments[direction]):
            if number:
                turns.give_way(direction)
            assert running.acquire(blocking=False), "both passes run"
            order.append(f"{direction} {number}")
            running.release()
        return direction

    assert turns.together(lambda: work("forward"), lambda: work("backward")) == ("forward", "backward")
    return order


@given(forward=st.integers(1, 6), backward=st.integers(1, 6))
def test_passes_alternate(forward: int, backward: int) -> None:
    segments = {"forward": forward, "backward": backward}
    turns = Turns()
    expected = merged(*([f"{name} {number}" for number in range(count)] for name, count in segments.items()))
    for _ in range(2):
        assert run(turns, segments) == expected


def test_a_pass_alone_does_not_wait() -> None:
    turns = Turns()
    turns.give_way("forward")
    assert turns.together(lambda: 1, lambda: turns.give_way("backward")) == (1, None)


def test_recomputation_keeps_the_turn() -> None:
    """A forward pass inside the backward pass does not give way."""
    turns = Turns()
    order = []

    def forward() -> None:
        order.append("forward")
        turns.give_way("forward")
        order.append("forward")

    def backward() -> None:
        order.append("backward")
        turns.give_way("forward")
        order.append("recomputation")

    turns.together(forward, backward)
    assert order == ["forward", "backward", "recomputation", "forward"]


@pytest.mark.parametrize("failing", ["forward", "backward"])
@pytest.mark.parametrize("turn", [0, 1, 5])
def test_an_error_ends_both(failing: str, turn: int) -> None:
    turns = Turns()
    steps = {"forward": 0, "backward": 0}

    def work(direction: str) -> None:
        for number in range(5):
            turns.give_way(direction)
            if direction == failing and number == turn:
                raise ValueError(direction)
            steps[direction] += 1
        if direction == failing:
            raise ValueError(direction)

    with pytest.raises(ValueError, match=failing):
        turns.together(lambda: work("forward"), lambda: work("backward"))
    other = "backward" if failing == "forward" else "forward"
    assert steps[other] <= turn + 1
    # The next passes start anew
    assert run(turns, {"forward": 2, "backward": 2})[-1] == "backward 1"


def test_an_interrupt_does_not_wait() -> None:
    turns = Turns()
    blocked = threading.Event()

    def interrupted() -> None:
        turns.give_way("forward")
        raise KeyboardInterrupt

    def backward() -> None:
        turns.give_way("backward")
        blocked.wait(10)

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        turns.together(interrupted, backward)
    blocked.set()
    assert time.monotonic() - start < 5
