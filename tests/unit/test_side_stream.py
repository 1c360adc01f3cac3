"""A lane does one thing after the other, beside the thread that starts it."""

import threading
import time

import pytest

from megatron_balance.device.side_stream import SideStream


def test_work_runs_in_order_beside_the_caller() -> None:
    lane, done, gate = SideStream("test"), [], threading.Event()

    def work(number: int) -> None:
        gate.wait(10)
        done.append((number, threading.current_thread() is threading.main_thread()))

    prepared: list[bool] = []
    flights = [
        lane.start(lambda number=number: work(number), lambda: prepared.append(threading.current_thread().daemon))
        for number in range(3)
    ]
    # Prepared at once, here; done later, there
    assert prepared == [False] * 3 and done == []
    gate.set()
    spans = [flight.wait() for flight in reversed(flights)][::-1]
    assert done == [(number, False) for number in range(3)]
    marks = [mark for span in spans for mark in span]
    assert marks == sorted(marks)
    assert all(flight.issued <= start for flight, (start, _) in zip(flights, spans, strict=True))


def test_whoever_waits_gets_the_error_and_the_lane_goes_on() -> None:
    lane = SideStream("test")

    def fail() -> None:
        raise ConnectionError("gone")

    failed, after = lane.start(fail), lane.start(lambda: time.sleep(0.01))
    start, end = after.wait()
    assert end - start >= 0.01
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            failed.wait()
