"""training/hang_guard.py: when a wait counts as a stall, on a clock of the test's own."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_balance.training import hang_guard
from megatron_balance.training.hang_guard import HangGuard
from megatron_balance.training.stall import Position

LIMIT, RUN = 10.0, 60.0
"""Seconds."""


@pytest.fixture
def alarm_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float | None]:
    """After how long the watch raises the alarm, where the main thread waits in `place(seconds)`; None: never."""

    def of(place: Callable[[float], str | None], steps: Callable[[float], int] = lambda _: 0) -> float | None:
        guard, position = HangGuard(dist.HashStore(), rank=0, world_size=1, limit=LIMIT), Position()
        guard.follow(position)
        clock = SimpleNamespace(now=0.0, alarm=None)

        def wait(period: float) -> bool:
            clock.now += period
            position.steps = steps(clock.now)
            guard._ended = guard._ended or clock.now > RUN
            return guard._ended

        def alarm() -> None:
            # Ended, the watch does not go on to end this process
            clock.alarm, guard._ended = clock.now, True

        monkeypatch.setattr(guard, "_wake", SimpleNamespace(wait=wait, set=alarm))
        monkeypatch.setattr(hang_guard, "time", SimpleNamespace(monotonic=lambda: clock.now))
        monkeypatch.setattr(hang_guard, "_waiting_place", lambda: place(clock.now))
        guard._watch()
        return clock.alarm

    return of


def test_a_wait_in_one_place_is_a_stall(alarm_after) -> None:
    assert alarm_after(lambda _: "all_reduce") == pytest.approx(LIMIT, abs=2 * hang_guard.MAX_PERIOD)


def test_going_from_wait_to_wait_without_a_step_is_none(alarm_after) -> None:
    assert alarm_after(lambda now: f"wait {now // 5}") is None
    stays = alarm_after(lambda now: f"wait {min(now, 30) // 5}")
    assert stays == pytest.approx(30 + LIMIT, abs=2 * hang_guard.MAX_PERIOD)


def test_neither_are_steps_and_work_of_ones_own(alarm_after) -> None:
    assert alarm_after(lambda _: "all_reduce", steps=lambda now: int(now // 5)) is None
    assert alarm_after(lambda now: None if now % 9 < 1 else "all_reduce") is None
    assert alarm_after(lambda _: None) is None
