"""What this rank entered in each process group, in order: for the hang guard's report, and for tests.

Every operation of torch.distributed passes a method of ProcessGroup. While a recorder is installed, those methods note
the operation before they begin it. A note costs a few microseconds of the host and touches no tensor's data.
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
"""Operations that a recorder for users keeps of each channel."""

BUCKETED = ("start_param_sync", "start_grad_sync")
"""Functions of megatron-core's bucket groups: buckets are often equally large, so that sizes do not tell them apart."""

_PLUMBING = (str(Path(dist.__file__).parent), contextlib.__file__, __file__)
_PACKAGE = str(Path(__file__).parents[1])


class _Shape(NamedTuple):
    """What of an operation's arguments its members have to agree about."""

    tensor: torch.Tensor | None
    sizes: tuple[int, ...] = ()
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


def _first_argument(group: dist.ProcessGroup, tensors: Any, *_: Any) -> _Shape:
    """`tensors`, one or several, perhaps in lists, are as large on all ranks."""
    found = list(_flattened(tensors))
    return _Shape(found[0] if found else None, tuple(tensor.numel() for tensor in found))


def _two_arguments(group: dist.ProcessGroup, outputs: Any, inputs: Any, *_: Any) -> _Shape:
    return _first_argument(group, [outputs, inputs])


def _second_argument(group: dist.ProcessGroup, outputs: Any, inputs: Any, *_: Any) -> _Shape:
    """Of the first one, each member has its part, or the root alone has any."""
    return _first_argument(group, inputs)


def _split_exchange(
    group: dist.ProcessGroup,
    output: torch.Tensor,
    input: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    *_: Any,
) -> _Shape:
    # No sizes: equal ones
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


COLLECTIVES: dict[str, tuple[str, Callable[..., _Shape]]] = {
    "allreduce": ("all-reduces", _first_argument),
    "allreduce_coalesced": ("all-reduces", _first_argument),
    "broadcast": ("broadcasts", _first_argument),
    "reduce": ("reduces", _first_argument),
    "allgather": ("all-gathers", _list_gather),
    "all_gather_single": ("all-gathers", _two_arguments),
    "all_gather_single_coalesced": ("all-gathers", _two_arguments),
    "reduce_scatter": ("reduce-scatters", _second_argument),
    "reduce_scatter_single": ("reduce-scatters", _two_arguments),
    "reduce_scatter_single_coalesced": ("reduce-scatters", _two_arguments),
    "all_to_all_single": ("exchanges", _split_exchange),
    "alltoall": ("exchanges", _list_exchange),
    "gather": ("gathers", _second_argument),
    "scatter": ("scatters", _first_argument),
    "barrier": ("waits for all", _nothing),
}
"""Methods of ProcessGroup that all members enter: the verb for people, and what members have to agree about."""

MESSAGES = {"send": "sends", "recv": "receives"}
"""Methods of ProcessGroup between two members."""


class _Note(NamedTuple):
    """An operation before it is put into words: that happens only where somebody wants to read it."""

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
    """One channel while it is recorded."""

    def __init__(self, name: str, ranks: tuple[int, ...], is_message: bool, kept: int | None) -> None:
        self.name, self.ranks, self.is_message = name, ranks, is_message
        self.numbers = itertools.count(1)
        self.notes: deque[tuple[int, _Note]] = deque(maxlen=kept)


class Collectives:
    """The operations that this process entered while the recorder was installed, by channel; see `recorded`."""

    def __init__(self, kept: int | None = KEPT) -> None:
        """`kept`: how many operations of each channel, and no waits; None: all, with the order between channels."""
        self.kept = kept
        self.entered = 0
        """Operations so far, those that are no longer kept too; threads that enter at once may count as one."""
        self.events: list[Event] = []
        self._tracks: dict[str, _Track] = {}
        self._works: weakref.WeakKeyDictionary[dist.Work, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._plumbing: dict[CodeType, bool] = {}

    def record(self) -> Record:
        """What was entered until now; any thread may ask."""
        record = {}
        for key, track in list(self._tracks.items()):
            notes = list(track.notes)
            first = notes[0][0] if notes else 1
            operations = [note.operation() for _, note in notes]
            record[key] = Channel(track.name, track.ranks, track.is_message, first, operations)
        return record

    @contextlib.contextmanager
    def recorded(self) -> Iterator["Collectives"]:
        """Record what this process enters in the `with` block; one recorder at a time."""
        # As they stand in the classes: what getattr returns would not bind once it was put back
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
            tensor, *sizes = shape_of(group, *args)
            place = self._note(group.group_name, group, None, verb, tensor, *sizes, detail="")
            return self._began(place, method(group, *args, **kwargs))

        return noted

    def _message(self, method: Callable, verb: str, sends: bool) -> Callable:
        def noted(group: dist.ProcessGroup, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Any:
            ends = (group.rank(), peer) if sends else (peer, group.rank())
            key, sizes = f"{group.group_name}:{ends[0]}->{ends[1]}", (tensors[0].numel(),)
            if tag and dist.get_backend(group) == "gloo":
                # NCCL goes by order alone; here threads may send in turn what tags keep apart
                key += f" tag {tag}"
            place = self._note(key, group, ends, verb, tensors[0], sizes, (), (), detail=f"tag {tag}")
            return self._began(place, method(group, tensors, peer, tag))

        return noted

    def _wait(self, method: Callable) -> Callable:
        def noted(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            result = method(work, *args, **kwargs)
            operation = self._works.get(work)
            if operation is not None:
                self.events.append(Event(threading.current_thread().name, *operation, is_wait=True))
            return result

        return noted

    def _began(self, place: tuple[str, int], work: Any) -> Any:
        if self.kept is None and isinstance(work, dist.Work):
            self._works[work] = place
        return work

    def _note(
        self,
        key: str,
        group: dist.ProcessGroup,
        ends: tuple[int, int] | None,
        verb: str,
        tensor: torch.Tensor | None,
        sizes: tuple[int, ...],
        sent: tuple[int, ...],
        received: tuple[int, ...],
        detail: str,
    ) -> tuple[str, int]:
        track = self._tracks.get(key) or self._tracks.setdefault(key, self._new_track(group, ends))
        caller, ours = self._callers(sys._getframe(2))
        if caller is not None and caller.f_code.co_name in BUCKETED:
            detail = _buckets(caller)
        dtype = None if tensor is None else tensor.dtype
        code = None if caller is None else caller.f_code
        line = None if ours is None else (ours.f_code, ours.f_lineno)
        number = next(track.numbers)
        self.entered += 1
        track.notes.append((number, _Note(verb, sizes, dtype, detail, code, line, sent, received, time.time())))
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
        """The innermost frame that is no part of torch.distributed, and the innermost one of this package."""
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
    """Which of DDP's buckets a method of a bucket group works on."""
    group = frame.f_locals.get("self")
    numbers = [str(bucket.bucket_id) for bucket in getattr(group, "buckets", ())]
    return f"bucket {' and '.join(numbers)}"
