"""Which rank holds up a job: the verdict, and what counts as waiting."""

import _thread
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import custom_backward

from megatron_balance.job.collectives import Collectives
from megatron_balance.job.stacks import deciding_frame, error_place, is_communication_error, stack_of, waits_in
from megatron_balance.job.stall import MAX_NAMED, Position, Report, verdict
from tests.issue_order import OrderedCollectives

STRANGERS = sys._current_frames().keys() - {threading.get_ident()}
"""Threads of the test runner, which may look like autograd's."""

NOW = 1000.0
LIMIT = 600.0
PULSES = [(Position(7, "forward-backward"), NOW - 12)] * 3


def report(activity: str = "waited in", place: str = "all_reduce", iteration: int = 7, idle: float = 601.0, time=NOW):
    return Report(Position(iteration, "forward-backward"), activity, place, idle, time)


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        (
            [report(), None, report()],
            "rank 1 stalled or died: no sign of life for 12 s (last seen in iteration 7, forward-backward)",
        ),
        (
            [report(), report(), report("was busy in", "read (data.py:3)", idle=602)],
            "rank 2 stalled: no progress for 602 s, not in a collective but in read (data.py:3) "
            "(iteration 7, forward-backward)",
        ),
        (
            [report(iteration=8), report(iteration=8), report()],
            "rank 2 stalled: it waited in all_reduce (iteration 7, forward-backward) while others are in iteration 8",
        ),
        (
            [
                report("failed with", "KeyError: 1", time=NOW),
                report(),
                report("failed with", "ValueError: no", time=NOW - 1),
            ],
            "rank 2 failed with ValueError: no (iteration 7, forward-backward)",
        ),
        (
            [report(place="broadcast"), report(), report("was busy in", "compute (layer.py:3)", idle=1)],
            "rank 0 waited in broadcast (iteration 7, forward-backward); "
            "rank 1 waited in all_reduce (iteration 7, forward-backward); "
            "rank 2 was busy in compute (layer.py:3) (iteration 7, forward-backward)",
        ),
    ],
    ids=["silent before all", "busy with something else", "behind", "the first failure", "cannot tell"],
)
def test_the_verdict_names_who_holds_up_the_job(reports: list[Report | None], expected: str) -> None:
    assert verdict(reports, PULSES, NOW, LIMIT) == expected


def test_a_rank_that_fails_does_not_hide_one_that_is_silent() -> None:
    sentence = verdict([report("failed with", "RuntimeError: cuda"), None, report()], PULSES, NOW, LIMIT)
    assert sentence.startswith("rank 0 failed with RuntimeError: cuda")
    assert "; rank 1 stalled or died: " in sentence


def test_a_verdict_on_many_ranks_stays_readable() -> None:
    sentence = verdict([report(), *[None] * 100], [None] * 101, NOW, LIMIT)
    assert sentence.count("no sign of life since the start") == MAX_NAMED
    assert sentence.endswith(f"; and {100 - MAX_NAMED} more ranks")


class Handle:
    """Blocks in `wait`, below Python like a backend's waits."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.wait = self.lock.acquire

    def done(self) -> None:
        self.lock.release()


@pytest.fixture
def handle() -> Iterator[Handle]:
    waited_for = Handle()
    yield waited_for
    waited_for.done()


def finish(handle: Handle) -> None:
    handle.wait()


def place_of(target, *args) -> str | None:
    """Return where a thread in `target` waits, once it does."""
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return waits_in(blocked(thread.ident))


def blocked(thread: int) -> FrameType:
    """Return the frame of a thread once it waits for a handle, or in Python's own classes."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        frame = sys._current_frames().get(thread)
        if frame is not None and (waits_in(frame) is not None or frame.f_code.co_name == "wait"):
            return frame
        time.sleep(0.01)
    raise AssertionError("the thread does not wait")


def test_a_thread_that_waits_for_a_handle_waits(handle: Handle) -> None:
    place = place_of(finish, handle)
    assert place is not None
    assert place.startswith("finish (test_stall.py:")


def test_a_collective_that_is_recorded_waits(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends may wait inside the method of ProcessGroup, below the recorder's frame."""
    seen: list[str | None] = []

    def blocked(group: dist.ProcessGroup, *_: object) -> None:
        seen.append(waits_in(sys._getframe(1)))

    monkeypatch.setattr(dist.ProcessGroup, "allreduce", blocked)
    with Collectives().recorded() as collectives:
        dist.all_reduce(torch.zeros(5))
    assert seen[0] is not None and seen[0].startswith("all_reduce < test_a_collective_that_is_recorded_waits (")
    (channel,) = collectives.record().values()
    assert channel.at(1).verb == "all-reduces" and channel.at(1).sizes == (5,)


@pytest.mark.parametrize("recorder", [Collectives(kept=2), OrderedCollectives()])
def test_collectives_work_on_after_they_were_recorded(alone: None, recorder: Collectives) -> None:
    methods = {**vars(dist.ProcessGroup)}, {**vars(dist.Work)}
    with recorder.recorded() as collectives:
        for _ in range(3):
            dist.all_reduce(torch.zeros(5))
    assert methods == ({**vars(dist.ProcessGroup)}, {**vars(dist.Work)})
    dist.all_reduce(torch.zeros(5))
    dist.barrier()
    (channel,) = collectives.record().values()
    assert (channel.first, channel.last) == ((2, 3) if recorder.kept else (1, 3))
    assert collectives.entered == 3


def test_a_thread_in_a_queue_or_lock_does_not_wait_for_other_ranks() -> None:
    event = threading.Event()
    place = place_of(event.wait)
    event.set()
    assert place is None


def device_thread(target: Callable[..., object], *args: object) -> None:
    """Run `target` in a thread that `threading` does not know, like autograd's device threads."""
    blocked(_thread.start_new_thread(target, args))


ENGINES: dict[str, Callable[[torch.Tensor], object]] = {
    "_engine_run_backward": torch.autograd.backward,
    "custom_backward": lambda output: custom_backward(output, None),
}
"""Callers of autograd's engine (torch's functions and megatron-core's schedules), by their innermost function."""


def in_the_engine(ask: Callable[[FrameType], object], caller: str = "_engine_run_backward") -> object:
    """Return `ask(deciding frame)` while this thread is in autograd's engine, with no frame above the engine's."""
    main = threading.get_ident()
    leave = queue.SimpleQueue[None]()
    answer = queue.SimpleQueue[object]()

    def look() -> None:
        while sys._current_frames()[main].f_code.co_name != caller:
            time.sleep(0.01)
        # By now, the hook has released the interpreter's lock
        time.sleep(0.1)
        frames = {thread: frame for thread, frame in sys._current_frames().items() if thread not in STRANGERS}
        answer.put(ask(deciding_frame(frames, main)))
        leave.put(None)

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    # The hook is written in C, so there is no frame above the engine's
    y.register_hook(leave.get)
    threading.Thread(target=look, daemon=True).start()
    ENGINES[caller](y)
    return answer.get()


@pytest.mark.parametrize("caller", ENGINES)
def test_the_main_thread_in_the_engine_is_where_the_thread_of_the_device_is(handle: Handle, caller: str) -> None:
    assert in_the_engine(waits_in, caller) is None
    device_thread(finish, handle)
    place = in_the_engine(waits_in, caller)
    assert isinstance(place, str) and place.startswith("finish (test_stall.py:")


@pytest.mark.gpu
def test_autograd_runs_hooks_of_a_device_in_a_thread_of_its_own(handle: Handle) -> None:
    main = threading.get_ident()
    places = []

    def look() -> None:
        deadline = time.monotonic() + 10
        place = None
        while place is None and time.monotonic() < deadline:
            place = waits_in(deciding_frame(sys._current_frames(), main))
        places.append(place)
        handle.done()

    def hook(gradient: torch.Tensor) -> None:
        places.append(threading.get_ident() != main)
        finish(handle)

    x = torch.ones(1, device="cuda", requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    threading.Thread(target=look, daemon=True).start()
    y.backward()
    assert places[0] is True and places[1].startswith("finish (test_stall.py:")


def test_a_device_that_works_in_the_engine_does_not_wait(handle: Handle) -> None:
    """The device's own thread sleeps; only the thread of a side stream waits."""
    assert place_of(finish, handle) is not None
    assert in_the_engine(lambda frame: frame.f_code.co_name) == "_engine_run_backward"
    held = threading.Event()
    device_thread(lambda: held.wait())
    assert in_the_engine(lambda frame: (waits_in(frame), frame.f_code.co_name)) == (None, "wait")
    held.set()


def test_outside_of_the_engine_the_main_thread_alone_counts(handle: Handle) -> None:
    device_thread(finish, handle)
    frame = sys._getframe()
    assert deciding_frame({**sys._current_frames(), threading.get_ident(): frame}, threading.get_ident()) is frame


def test_a_stack_is_the_same_while_its_thread_stays() -> None:
    def here() -> tuple:
        return stack_of(sys._getframe())

    once, again = (here() for _ in range(2))
    assert once == again != here()


def caught(function, *args) -> BaseException:
    try:
        function(*args)
    except Exception as error:
        return error
    raise AssertionError("no exception")


def lose_connection() -> None:
    raise RuntimeError("[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:1")


def test_errors_of_other_ranks_are_told_from_own_ones() -> None:
    assert is_communication_error(caught(lose_connection))
    assert is_communication_error(dist.DistNetworkError("reset"))
    assert not is_communication_error(caught(torch.ones(2).reshape, 3))
    assert not is_communication_error(ValueError("gloo"))


def test_an_error_takes_one_line() -> None:
    assert error_place(caught(lose_connection)) == "RuntimeError: Connection closed by peer [10.0.0.1]:1"
    assert error_place(ValueError("a\nb")) == "ValueError: a"
    assert error_place(ValueError("\x1b[31mred\0")) == "ValueError: red?"
    assert len(error_place(ValueError("word " * 100))) <= 120
