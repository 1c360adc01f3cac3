"""Record the operations that this rank enters in each process group, for the hang guard's report and for tests.

Every operation of torch.distributed calls a method of ProcessGroup. While a recorder is installed, these methods record
the operation before they start it. Recording takes a few microseconds on the host and reads no tensor data.
"""

import contextlib
import functools
import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_balance.job.collective_order import Channel, Event, Operation, Record

KEPT = 64
"""Number of operations of each channel that a training run's recorder keeps."""

BUCKETED = ("start_param_sync", "start_grad_sync")
"""Functions of megatron-core's bucket groups. Buckets often have equal sizes, so their numbers are recorded as well."""

_PLUMBING = (str(Path(dist.__file__).parent), contextlib.__file__, __file__)
_PACKAGE = str(Path(__file__).parents[1])


class _Shape(NamedTuple):
    """The sizes in an operation's arguments, on which its members must agree."""

    tensor: torch.Tensor | None
    sizes: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


def _first_argument(group: dist.ProcessGroup, tensors: Any, *_: Any) -> _Shape:
    """Return the shape of an operation whose `tensors`, possibly nested lists, have the same sizes on all ranks."""
    found = list(_flattened(tensors))
    return _Shape(found[0] if found else None, tuple(tensor.numel() for tensor in found))


def _two_arguments(group: dist.ProcessGroup, outputs: Any, inputs: Any, *_: Any) -> _Shape:
    return _first_argument(group, [outputs, inputs])


def _second_argument(group: dist.ProcessGroup, outputs: Any, inputs: Any, *_: Any) -> _Shape:
    """Return the shape of an operation whose first argument is a part on each rank, or exists only on the root."""
    return _first_argument(group, inputs)


def _split_exchange(
    group: dist.ProcessGroup,
    output: torch.Tensor,
    input: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    *_: Any,
) -> _Shape:
    # An empty list of sizes stands for equal sizes
    return _Shape(output, (), _rows(input, sent, group.size()), _rows(output, received, group.size()))


def _rows(tensor: torch.Tensor, split: Sequence[int], members: int) -> tuple[int, ...]:
    return tuple(split) or (len(tensor) // members,) * members


def _list_exchange(group: dist.ProcessGroup, outputs: Any, inputs: Any, *_: Any) -> _Shape:
    sent, received = (tuple(tensor.numel() for tensor in _flattened(tensors)) for tensors in (inputs, outputs))
    return _Shape(next(_flattened(inputs), None), (), sent, received)


def _list_gather(group: dist.ProcessGroup, outputs: Any, inputs: Any, *_: Any) -> _Shape:
    own = [tensor.numel() for tensor in _flattened(inputs)]
    received = tuple(tensor.numel() for tensor in _flattened(outputs))
    return _Shape(next(_flattened(inputs), None), (), tuple(own * group.size()), received)


def _nothing(group: dist.ProcessGroup, *_: Any) -> _Shape:
    return _Shape(None)


def _flattened(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for one in tensors:
            yield from _flattened(one)


_RENAMED = hasattr(dist.ProcessGroup, "all_to_all_single")
"""Whether this torch has the method names of 2.13; those of 2.11 and 2.12 differ."""

ALL_GATHER = "all_gather_single" if _RENAMED else "_allgather_base"
ALL_GATHERS = "all_gather_single_coalesced" if _RENAMED else "allgather_into_tensor_coalesced"
ALL_TO_ALL = "all_to_all_single" if _RENAMED else "alltoall_base"
REDUCE_SCATTER = "reduce_scatter_single" if _RENAMED else "_reduce_scatter_base"
REDUCE_SCATTERS = "reduce_scatter_single_coalesced" if _RENAMED else "reduce_scatter_tensor_coalesced"

COLLECTIVES: dict[str, tuple[str, Callable[..., _Shape]]] = {
    "allreduce": ("all-reduces", _first_argument),
    "allreduce_coalesced": ("all-reduces", _first_argument),
    "broadcast": ("broadcasts", _first_argument),
    "reduce": ("reduces", _first_argument),
    "allgather": ("all-gathers", _list_gather),
    ALL_GATHER: ("all-gathers", _two_arguments),
    ALL_GATHERS: ("all-gathers", _two_arguments),
    "reduce_scatter": ("reduce-scatters", _second_argument),
    REDUCE_SCATTER: ("reduce-scatters", _two_arguments),
    REDUCE_SCATTERS: ("reduce-scatters", _two_arguments),
    ALL_TO_ALL: ("exchanges", _split_exchange),
    "alltoall": ("exchanges", _list_exchange),
    "gather": ("gathers", _second_argument),
    "scatter": ("scatters", _first_argument),
    "barrier": ("waits for all", _nothing),
}
"""Methods of ProcessGroup that all members enter, with a verb for people and the function that finds their shape."""

MESSAGES = {"send": "sends", "recv": "receives"}
"""Methods of ProcessGroup for messages between two members, with a verb for people."""


class _Note(NamedTuple):
    """A recorded operation in cheap form; `operation` formats its names only when a report needs them."""

    verb: str
    sizes: tuple[int, ...]
    dtype: torch.dtype | None
    detail: str
    caller: CodeType | None
    ours: tuple[CodeType, int] | None
    sent: tuple[int, ...]
    received: tuple[int, ...]
    time: float

    def operation(self) -> Operation:
        caller = "" if self.caller is None else _function(self.caller)
        ours = "" if self.ours is None else _function(*self.ours)
        dtype = "" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return Operation(self.verb, self.sizes, dtype, self.detail, caller, ours, self.sent, self.received, self.time)


@functools.cache
def _function(code: CodeType, line: int | None = None) -> str:
    file = Path(code.co_filename).name
    return f"{code.co_name} ({file})" if line is None else f"{code.co_name} ({file}:{line})"


class _Track:
    """The recording of one channel."""

    def __init__(self, name: str, ranks: tuple[int, ...], is_message: bool, kept: int | None) -> None:
        self.name = name
        self.ranks = ranks
        self.is_message = is_message
        self.numbers = itertools.count(1)
        self.notes: deque[tuple[int, _Note]] = deque(maxlen=kept)


class Collectives:
    """Recorder of the operations that this process enters inside `recorded`, by channel."""

    def __init__(self, kept: int | None = KEPT) -> None:
        """
        Args:
            kept: operations to keep of each channel; None keeps all of them, and also the waits and the order between
                channels.
        """
        self.kept = kept
        self.entered = 0
        """Number of operations so far, including those no longer kept; concurrent operations may count as one."""
        self.events: list[Event] = []
        self._tracks: dict[str, _Track] = {}
        self._works: weakref.WeakKeyDictionary[dist.Work, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._plumbing: dict[CodeType, bool] = {}

    def record(self) -> Record:
        """Return the operations entered so far; any thread may call this."""
        record = {}
        for key, track in list(self._tracks.items()):
            notes = list(track.notes)
            first = notes[0][0] if notes else 1
            operations = [note.operation() for _, note in notes]
            record[key] = Channel(
                track.name, track.ranks, is_message=track.is_message, first=first, operations=operations
            )
        return record

    @contextlib.contextmanager
    def recorded(self) -> Iterator["Collectives"]:
        """Record the operations that this process enters inside the block; only one recorder may be installed."""
        # Keep the classes' raw attributes: what getattr returns would no longer bind after being put back
        originals = {name: vars(dist.ProcessGroup)[name] for name in (*COLLECTIVES, *MESSAGES)}
        wait = vars(dist.Work)["wait"]
        for name, (verb, shape_of) in COLLECTIVES.items():
            method = getattr(dist.ProcessGroup, name)
            setattr(dist.ProcessGroup, name, self._collective(method, verb, shape_of))
        for name, verb in MESSAGES.items():
            method = getattr(dist.ProcessGroup, name)
            setattr(dist.ProcessGroup, name, self._message(method, verb, name == "send"))
        if self.kept is None:
            dist.Work.wait = self._wait(dist.Work.wait)
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(dist.ProcessGroup, name, original)
            dist.Work.wait = wait

    def _collective(self, method: Callable, verb: str, shape_of: Callable[..., _Shape]) -> Callable:
        def noted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            position = self._note(group.group_name, group, None, verb=verb, shape=shape_of(group, *args))
            return self._started(position, method(group, *args, **kwargs))

        return noted

    def _message(self, method: Callable, verb: str, sends: bool) -> Callable:
        def noted(group: dist.ProcessGroup, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Any:
            ends = (group.rank(), peer) if sends else (peer, group.rank())
            key = f"{group.group_name}:{ends[0]}->{ends[1]}"
            sizes = (tensors[0].numel(),)
            if tag and dist.get_backend(group) == "gloo":
                # NCCL matches messages by order alone; with gloo, threads may send messages that only tags tell apart
                key += f" tag {tag}"
            position = self._note(key, group, ends, verb=verb, shape=_Shape(tensors[0], sizes), detail=f"tag {tag}")
            return self._started(position, method(group, tensors, peer, tag))

        return noted

    def _wait(self, method: Callable) -> Callable:
        def noted(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            result = method(work, *args, **kwargs)
            operation = self._works.get(work)
            if operation is not None:
                self.events.append(Event(threading.current_thread().name, *operation, is_wait=True))
            return result

        return noted

    def _started(self, position: tuple[str, int], work: Any) -> Any:
        if self.kept is None and isinstance(work, dist.Work):
            self._works[work] = position
        return work

    def _note(
        self,
        key: str,
        group: dist.ProcessGroup,
        ends: tuple[int, int] | None,
        *,
        verb: str,
        shape: _Shape,
        detail: str = "",
    ) -> tuple[str, int]:
        """Record an operation and return its position: the channel's key and the operation's number."""
        track = self._tracks.get(key) or self._tracks.setdefault(key, self._new_track(group, ends))
        caller, ours = self._callers(sys._getframe(2))
        if caller is not None and caller.f_code.co_name in BUCKETED:
            detail = _buckets(caller)
        note = _Note(
            verb=verb,
            sizes=shape.sizes,
            dtype=None if shape.tensor is None else shape.tensor.dtype,
            detail=detail,
            caller=None if caller is None else caller.f_code,
            ours=None if ours is None else (ours.f_code, ours.f_lineno),
            sent=shape.sent,
            received=shape.received,
            time=time.time(),
        )
        number = next(track.numbers)
        self.entered += 1
        track.notes.append((number, note))
        if self.kept is None:
            self.events.append(Event(threading.current_thread().name, key, number))
        return key, number

    def _new_track(self, group: dist.ProcessGroup, ends: tuple[int, int] | None) -> _Track:
        ranks = tuple(dist.get_process_group_ranks(group))
        name = group.group_desc.replace("_GROUP", "").replace("_", "-").lower()
        if name in ("", "undefined"):
            name = f"of ranks {', '.join(map(str, ranks))}"
        if ends is None:
            return _Track(name, ranks, False, self.kept)
        source, target = (ranks[end] for end in ends)
        return _Track(f"{name}, {source} -> {target}", (source, target), True, self.kept)

    def _callers(self, frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
        """Return the innermost frame outside torch.distributed, and the innermost frame of this package."""
        while frame is not None and self._is_plumbing(frame.f_code):
            frame = frame.f_back
        ours = frame
        while ours is not None and not ours.f_code.co_filename.startswith(_PACKAGE):
            ours = ours.f_back
        return frame, ours

    def _is_plumbing(self, code: CodeType) -> bool:
        known = self._plumbing.get(code)
        if known is None:
            known = self._plumbing[code] = code.co_filename.startswith(_PLUMBING) or code.co_name == "wrapper"
        return known


def _buckets(frame: FrameType) -> str:
    """Name the DDP buckets that a method of a bucket group works on."""
    group = frame.f_locals.get("self")
    numbers = [str(bucket.bucket_id) for bucket in getattr(group, "buckets", ())]
    return f"bucket {' and '.join(numbers)}"
