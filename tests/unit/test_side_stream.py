"""A side stream executes tasks one after another while the thread that started them continues."""

import gc
import threading
import time

import pytest

from megatron_balance.device.side_stream import SideStream


def test_work_runs_in_order_while_the_caller_goes_on() -> None:
    stream = SideStream("test")
    done = []
    gate = threading.Event()

    def work(number: int) -> None:
        gate.wait(60)
        done.append((number, threading.current_thread() is threading.main_thread()))

    prepared: list[bool] = []
    works = [
        stream.start(lambda number=number: work(number), lambda: prepared.append(threading.current_thread().daemon))
        for number in range(3)
    ]
    # Preparation runs immediately in this thread, the work later in the other
    assert prepared == [False] * 3 and done == []
    gate.set()
    spans = [one.wait() for one in reversed(works)][::-1]
    assert done == [(number, False) for number in range(3)]
    marks = [mark for span in spans for mark in span]
    assert marks == sorted(marks)
    assert all(one.issued <= start for one, (start, _) in zip(works, spans, strict=True))


def test_whoever_waits_gets_the_error_and_the_stream_goes_on() -> None:
    stream = SideStream("test")

    def fail() -> None:
        raise ConnectionError("gone")

    failed = stream.start(fail)
    after = stream.start(lambda: time.sleep(0.01))
    start, end = after.wait()
    assert end - start >= 0.01
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            failed.wait()


def test_the_thread_ends_with_its_side_stream_and_keeps_nothing() -> None:
    class Tensors:
        ended = threading.Event()

        def __del__(self) -> None:
            self.ended.set()

    name = "a side stream that ends"
    stream = SideStream(name)
    tensors = Tensors()
    stream.start(lambda tensors=tensors: None).wait()
    del tensors
    assert Tensors.ended.wait(60), "the thread still refers to its last task"
    (thread,) = (thread for thread in threading.enumerate() if thread.name == name)
    del stream
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
