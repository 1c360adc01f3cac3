"""Functions of `torch.cuda` for the device in host memory."""

import contextlib
import ctypes
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.job.collectives import COLLECTIVES, MESSAGES
from tests.hostcuda.checker import Checker
from tests.hostcuda.host_clock import HostClock

CHECKER: Checker | HostClock = Checker()
"""What this process, which has one device, reports to."""

_Numbers = ctypes.POINTER(ctypes.c_int64)
_TWO = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


class _Callbacks(ctypes.Structure):
    """`Callbacks` of device.cpp."""

    _fields_ = (
        ("kernel", ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, *[_Numbers] * 4)),
        ("synchronized", ctypes.CFUNCTYPE(None, ctypes.c_char_p)),
        ("allocated", _TWO),
        ("freed", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
        ("recorded", _TWO),
        ("waited", _TWO),
        ("kept", _TWO),
        ("named", ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_char_p)),
        ("launched", ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64)),
    )


def _kernel(op: bytes, stream: int, count: int, *columns: Any) -> None:
    if CHECKER.on:
        rows = zip(*(column[:count] for column in columns), strict=True)
        CHECKER.kernel(op.decode(), stream, [(base, begin, end, bool(writes)) for base, begin, end, writes in rows])


def report_to(observer: Checker | HostClock) -> None:
    """Let the device report to another observer, which the library calls only for what it cares about."""
    global CHECKER
    CHECKER = observer
    loaded = _LIBRARY[0]
    callbacks = _host_clock_callbacks(observer) if isinstance(observer, HostClock) else _callbacks()
    _LIBRARY[1:] = [callbacks]
    loaded.hostcuda_report_to(ctypes.byref(callbacks))


def answer_gather(others: bytes, own: int) -> None:
    """Set what the other ranks of a fake group contribute to an all-gather, in which this one has `own` bytes."""
    _LIBRARY[0].hostcuda_answer(others, len(others), len(others) + own)


def _host_clock_callbacks(clock: HostClock) -> _Callbacks:
    clock.outside = _LIBRARY[0].hostcuda_outside
    clock.queued = _LIBRARY[0].hostcuda_queued
    kinds = dict(_Callbacks._fields_)
    return _Callbacks(
        synchronized=kinds["synchronized"](lambda op: clock.synchronized(op.decode())),
        launched=kinds["launched"](lambda op, size: clock.launched(op.decode(), size)),
    )


def _callbacks() -> _Callbacks:
    functions: dict[str, Callable] = {
        "kernel": _kernel,
        "synchronized": lambda op: CHECKER.synchronized(op.decode(), stream=_LIBRARY[0].hostcuda_stream()),
        "allocated": CHECKER.allocated,
        "freed": CHECKER.freed,
        "recorded": CHECKER.recorded,
        "waited": CHECKER.waited,
        "kept": CHECKER.kept,
        "named": lambda stream, name: CHECKER.named(stream, name.decode()),
    }
    kinds = dict(_Callbacks._fields_)
    return _Callbacks(**{name: kinds[name](function) for name, function in functions.items()})


_LIBRARY: list[Any] = []
"""The library and its callbacks, which must live as long as the library."""


class Event:
    """`torch.cuda.Event`; its time is the host's clock at the record."""

    _ids = itertools.count(1)

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.id = next(Event._ids)
        self.enable_timing = enable_timing
        self.seconds: float | None = None

    def record(self, stream: "Stream | None" = None) -> None:
        self.seconds = time.perf_counter()
        CHECKER.recorded(self.id, (stream or current_stream()).id)

    def wait(self, stream: "Stream | None" = None) -> None:
        # An event that was never recorded has nothing to wait for
        if self.seconds is not None:
            CHECKER.waited(self.id, (stream or current_stream()).id)

    def synchronize(self) -> None:
        if self.seconds is not None:
            CHECKER.synchronized("Event.synchronize", event=self.id)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        assert self.enable_timing and end.enable_timing, (
            "Both events must be created with argument 'enable_timing=True'"
        )
        assert self.seconds is not None and end.seconds is not None, "Both events must be recorded"
        return 1e3 * (end.seconds - self.seconds)


class Stream:
    """`torch.cuda.Stream`."""

    _ids = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, *, id: int | None = None) -> None:
        self.id = next(Stream._ids) if id is None else id
        self.cuda_stream = self.stream_id = self.id
        self.device = torch.device("cuda", 0)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        CHECKER.synchronized("Stream.synchronize", stream=self.id)

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


def current_stream(device: Any = None) -> Stream:
    return Stream(id=_LIBRARY[0].hostcuda_stream())


def set_stream(stream: Stream) -> None:
    _LIBRARY[0].hostcuda_set_stream(stream.id)


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    before = current_stream()
    if stream is not None:
        set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    assert tensor.is_cuda, "record_stream: a tensor in host memory"
    CHECKER.kept(tensor.untyped_storage().data_ptr(), stream.id)


def _synchronize(device: Any = None) -> None:
    CHECKER.synchronized("torch.cuda.synchronize")


def _to_device(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False) -> torch.Tensor:
    return tensor.to("cuda:0", non_blocking=non_blocking)


def _not_compiled(function: Callable | None = None, **_: Any) -> Callable:
    return (lambda function: function) if function is None else function


def _does_nothing() -> Callable:
    """Return a new function every time: torch's compiler keeps a table of functions and refuses two names for one."""
    return lambda *_, **__: None


def _rng_state(device: Any = None, **_: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = None, **_: Any) -> None:
    torch.set_rng_state(state)


ANSWERS: dict[str, Any] = {
    "Event": Event,
    "Stream": Stream,
    "_lazy_init": _does_nothing(),
    "_sleep": _does_nothing(),
    "current_device": lambda: 0,
    "current_stream": current_stream,
    "default_stream": lambda device=None: Stream(id=0),
    # Each process of the node gets its own number; all numbers mean this one device
    "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    "empty_cache": _does_nothing(),
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: "host memory",
    "get_rng_state": _rng_state,
    "is_available": lambda: True,
    "is_current_stream_capturing": lambda: False,
    "is_initialized": lambda: True,
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "max_memory_allocated": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "set_device": _does_nothing(),
    "set_rng_state": _set_rng_state,
    "set_stream": set_stream,
    "stream": on_stream,
    "synchronize": _synchronize,
}


def install(library: Path) -> None:
    """Install the device's `torch.cuda` in this process, for the rest of its life.

    The process must have loaded `library` before torch, and must not have imported megatron.core yet.
    """
    assert not _LIBRARY, "once is enough"
    loaded = ctypes.CDLL(str(library))
    loaded.hostcuda_stream.restype = ctypes.c_int64
    loaded.hostcuda_set_stream.argtypes = [ctypes.c_int64]
    loaded.hostcuda_outside.restype = loaded.hostcuda_queued.restype = ctypes.c_int64
    loaded.hostcuda_answer.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
    _LIBRARY.append(loaded)
    report_to(CHECKER)
    for name, answer in ANSWERS.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.random.get_rng_state = _rng_state
    torch.cuda.random.set_rng_state = _set_rng_state
    torch.cuda.nccl.version = lambda: (2, 27, 5)
    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = _does_nothing(), _does_nothing()
    torch.Tensor.record_stream = _record_stream
    torch.Tensor.cuda = _to_device
    torch.compile = _not_compiled
    _answer_for_nccl()
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = _rng_state
    random._set_cuda_rng_state = _set_rng_state


def _answer_for_nccl() -> None:
    """Make groups look like NCCL's: in name, and in refusing host memory. (device.cpp handles their streams.)"""
    core = dist.distributed_c10d
    backend_of = dist.get_backend
    init_process_group = dist.init_process_group

    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        found = backend_of(group)
        return "nccl" if found in ("gloo", "fake") else found

    def start(backend: str, **options: Any) -> None:
        init_process_group("gloo" if backend == "nccl" else backend, **options)

    dist.get_backend = core.get_backend = get_backend
    dist.init_process_group = start
    core._get_object_coll_device = lambda group=None: "cuda:0"
    batch = dist.batch_isend_irecv

    def batched(operations: list[dist.P2POp]) -> list[dist.Work]:
        CHECKER.launched_batch()
        return batch(operations)

    dist.batch_isend_irecv = core.batch_isend_irecv = batched
    for name in (*COLLECTIVES, *MESSAGES):
        if name != "barrier":
            setattr(dist.ProcessGroup, name, _device_only(getattr(dist.ProcessGroup, name)))


def _device_only(method: Callable) -> Callable:
    def checked(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
        for tensor in _tensors(arguments):
            if not tensor.is_cuda:
                raise RuntimeError("No backend type associated with device type cpu")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        return method(group, *arguments, **options)

    return checked


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)) and value and not isinstance(value[0], int):
        for one in value:
            yield from _tensors(one)
