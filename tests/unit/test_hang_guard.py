"""job/hang_guard.py: when a wait counts as a stall, on a simulated clock."""

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_balance.job import hang_guard
from megatron_balance.job.collectives import Collectives
from megatron_balance.job.hang_guard import HangGuard
from megatron_balance.job.stall import Position

LIMIT, RUN = 10.0, 150.0
"""Seconds."""


def guard_of(**settings) -> HangGuard:
    """Return a guard of a rank; default: of the only one."""
    usual = {"rank": 0, "world_size": 1, "limit": LIMIT, "store_rank": None, "collectives": Collectives()}
    return HangGuard(dist.HashStore(), **usual | settings)


@pytest.fixture
def alarm_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., float | None]:
    """Return the time until the watchdog's alarm if the main thread waits in `place(seconds)`; None: no alarm."""

    def of(
        place: Callable[[float], str | None],
        steps: Callable[[float], int] = lambda _: 0,
        entered: Callable[[float], int] = lambda _: 0,
        device_hangs: bool = False,
        phase: str = "start",
    ) -> float | None:
        collectives = Collectives()
        position = Position(2, phase)
        guard = guard_of(collectives=collectives)
        guard.follow(position)
        guard._first_iteration = 1
        clock = SimpleNamespace(now=0.0, alarm=None)

        def wait(period: float) -> bool:
            clock.now += period
            position.steps, collectives.entered = steps(clock.now), entered(clock.now)
            guard._ended = guard._ended or clock.now > RUN
            return guard._ended

        def alarm() -> None:
            # Once ended, the watchdog does not end this process
            clock.alarm = clock.now
            guard._ended = True

        monkeypatch.setattr(guard, "_wake", SimpleNamespace(wait=wait, set=alarm))
        monkeypatch.setattr(hang_guard, "time", SimpleNamespace(monotonic=lambda: clock.now))
        monkeypatch.setattr(guard, "_device_is_busy", lambda: device_hangs)
        monkeypatch.setattr(hang_guard, "_frame", lambda: place(clock.now))
        monkeypatch.setattr(hang_guard, "stack_of", lambda found: found)
        monkeypatch.setattr(hang_guard, "waits_in", lambda found: found)
        monkeypatch.setattr(hang_guard, "code_place", lambda found: "elsewhere")
        guard._watchdog()
        return clock.alarm

    return of


def moving(now: float) -> int:
    return int(now // 5)


WAITS: dict[str, tuple[dict[str, object], float | None]] = {
    "in one place": ({"place": lambda _: "all_reduce"}, 0),
    "from wait to wait": ({"place": lambda now: f"wait {now // 5}"}, None),
    "from wait to wait, then in one place": ({"place": lambda now: f"wait {min(now, 30) // 5}"}, 30),
    # The next layer's wait has the same place
    "in one place of different layers": ({"place": lambda _: "all_reduce", "entered": moving}, None),
    "with steps": ({"place": lambda _: "all_reduce", "steps": moving}, None),
    "with work of its own": ({"place": lambda now: None if now % 9 < 1 else "all_reduce"}, None),
    "none": ({"place": lambda _: None}, None),
    "none, but without steps": ({"place": lambda _: None, "phase": "forward-backward"}, 9 * LIMIT),
    # An operation may block because the launch queue is full, or because it copies to the host implicitly
    "for a device that hangs": ({"place": lambda _: None, "device_hangs": True}, 0),
    "for a device, with steps": ({"place": lambda _: None, "device_hangs": True, "steps": moving}, None),
}
"""How the main thread waits, and the second from which on it is in one wait."""


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_in_one_place_is_a_stall(alarm_after, name: str) -> None:
    waiting, since = WAITS[name]
    expected = None if since is None else pytest.approx(since + LIMIT, abs=2 * hang_guard.MAX_PERIOD)
    assert alarm_after(**waiting) == expected


def idle_after(position: Position, periods: int, steps: bool = False, seconds: float = 0.5) -> float:
    """Return the idle time that a guard counts in `periods` periods at a position of the second iteration."""
    guard = guard_of()
    guard.follow(Position(1, "forward-backward"))
    guard._count_idle(True, 0.5)
    guard.follow(position)
    for _ in range(periods):
        guard._count_idle(steps, seconds)
    return guard._idle


def test_idle_is_who_makes_no_step_where_there_should_be_one() -> None:
    assert idle_after(Position(2, "forward-backward"), 6) == 3.0
    assert idle_after(Position(2, "evaluation"), 6) == 3.0
    assert idle_after(Position(2, "forward-backward"), 6, steps=True) == 0
    # The process was stopped for an hour, then continued
    assert idle_after(Position(2, "forward-backward"), 1, seconds=3600.0) == LIMIT / 2
    for allowed in (Position(0, "start"), Position(1, "forward-backward"), Position(2, "checkpoint")):
        assert idle_after(allowed, 1000) == 0


class Stream:
    """The stream of an idle, hanging or broken device."""

    def __init__(self, state: str) -> None:
        self.state, self.end = state, threading.Event()

    def query(self) -> bool:
        raise AssertionError("would block every thread with the device")

    def synchronize(self) -> None:
        if self.state == "broken":
            raise RuntimeError("CUDA error")
        if self.state == "hangs":
            self.end.wait()


@pytest.mark.parametrize(
    ("state", "activity"), [("idle", "was busy in"), ("hangs", "waited in"), ("broken", "waited in")]
)
def test_the_device_says_whether_code_that_stands_still_waits(state: str, activity: str, monkeypatch) -> None:
    guard = guard_of(limit=1.0)
    stream = Stream(state)
    monkeypatch.setattr(guard, "_device", 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    found, place = guard._activity()
    stream.end.set()
    assert found == activity and " < test_the_device_says_whether_code_that_stands_still_waits (" in place


@pytest.mark.gpu
def test_a_device_is_busy_while_it_computes() -> None:
    guard = guard_of(limit=1.0)
    assert not guard._device_is_busy()
    torch.cuda._sleep(2 * 10**9)
    assert guard._device_is_busy()
    torch.cuda.synchronize()
    assert not guard._device_is_busy()
