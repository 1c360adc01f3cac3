"""Record the operations that this rank enters in each process group, for the hang guard's report and for tests.

Every operation of torch.distributed calls a method of ProcessGroup. While a recorder is installed, these methods record
the operation before they start it. Recording takes a few microseconds on the host and reads no tensor data.
"""

import contextlib
import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron_balance.job.collective_order import BARRIER, Channel, RecordedOperation, Recording

KEPT = 64
"""Number of operations of each channel that a training run keeps."""

BUCKETED = ("start_param_sync", "start_grad_sync")
"""Functions of megatron-core's bucket groups. Buckets often have equal sizes, so their numbers are recorded, too."""

_PLUMBING = (str(Path(dist.__file__).parent), contextlib.__file__, __file__)
_PACKAGE = str(Path(__file__).parents[1])

_RENAMED = hasattr(dist.ProcessGroup, "all_to_all_single")
"""Whether torch has the method names of 2.13, which differ from the names in 2.11 and 2.12."""

ALL_GATHER = "all_gather_single" if _RENAMED else "_allgather_base"
ALL_GATHERS = "all_gather_single_coalesced" if _RENAMED else "allgather_into_tensor_coalesced"
ALL_TO_ALL = "all_to_all_single" if _RENAMED else "alltoall_base"
REDUCE_SCATTER = "reduce_scatter_single" if _RENAMED else "_reduce_scatter_base"
REDUCE_SCATTERS = "reduce_scatter_single_coalesced" if _RENAMED else "reduce_scatter_tensor_coalesced"

_GATHER_OPTIONS = dist.distributed_c10d.AllgatherOptions()  # pyright: ignore[reportPrivateImportUsage]
_GATHER_OPTIONS.asyncOp = True


def start_gather(group: dist.ProcessGroup, part: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start gathering one tensor of equal shape from each rank of `group`; return the function that waits for all of
    them: [ranks, ...]. On CUDA, the current stream waits, not the host."""
    whole = part.new_empty((group.size(), *part.shape))
    # Call the group's method directly, as in FlatAllToAll.start: the device waits for the host here
    work = getattr(group, ALL_GATHER)(whole.view(-1), part.view(-1), _GATHER_OPTIONS)

    def gathered() -> torch.Tensor:
        work.wait()
        return whole

    return gathered


COLLECTIVES: dict[str, tuple[str, tuple[int, ...]]] = {
    "allreduce": ("all-reduces", (0,)),
    "allreduce_coalesced": ("all-reduces", (0,)),
    "broadcast": ("broadcasts", (0,)),
    "reduce": ("reduces", (0,)),
    "allgather": ("all-gathers", ()),
    ALL_GATHER: ("all-gathers", (0, 1)),
    ALL_GATHERS: ("all-gathers", (0, 1)),
    "reduce_scatter": ("reduce-scatters", (1,)),
    REDUCE_SCATTER: ("reduce-scatters", (0, 1)),
    REDUCE_SCATTERS: ("reduce-scatters", (0, 1)),
    ALL_TO_ALL: ("exchanges", ()),
    "alltoall": ("exchanges", ()),
    "gather": ("gathers", (1,)),
    "scatter": ("scatters", (0,)),
    "barrier": (BARRIER, ()),
}
"""Methods of ProcessGroup that all members enter -> a verb for people, and the positions of arguments that have the
same size on all ranks (tensors or nested lists of them). Other arguments may differ or exist only on the root."""

MESSAGES = {"send": "sends", "recv": "receives"}


def _flattened(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for one in tensors:
            yield from _flattened(one)


def _sizes(tensors: Any) -> tuple[int, ...]:
    return tuple(tensor.numel() for tensor in _flattened(tensors))


def _split_rows(members: int, output: torch.Tensor, input: torch.Tensor, *splits: Sequence[int]) -> Iterable[Any]:
    # An empty list of sizes means equal sizes
    received, sent = splits[:2]
    yield tuple(sent) or (len(input) // members,) * members
    yield tuple(received) or (len(output) // members,) * members


UNEVEN: dict[str, Callable[..., Iterable[tuple[int, ...]]]] = {
    "allgather": lambda members, outputs, inputs, *_: (_sizes(inputs) * members, _sizes(outputs)),
    "alltoall": lambda members, outputs, inputs, *_: (_sizes(inputs), _sizes(outputs)),
    ALL_TO_ALL: _split_rows,
}
"""Collectives whose sizes differ by member -> a function of the number of members and the arguments. It returns the
elements or rows that this rank sends to each member, and those that it receives from each."""


class Collectives:
    """Recorder of the operations that this process enters inside `recorded`, by channel.

    It keeps the last `kept` operations of each channel; None: all of them.
    """

    def __init__(self, kept: int | None = KEPT, now: Callable[[], float] = time.time) -> None:
        """`now` returns the Unix time in seconds, by a clock that all ranks share."""
        self.kept = kept
        self.now = now
        self.entered = 0
        """Number of operations so far, including dropped ones; concurrent operations may count as one."""
        self._channels: dict[str, Channel] = {}
        self._plumbing: dict[CodeType, bool] = {}

    def record(self) -> Recording:
        """Return the operations entered so far; any thread may call this."""
        channels = list(self._channels.items())
        return {key: channel._replace(operations=list(channel.operations)) for key, channel in channels}

    @contextlib.contextmanager
    def recorded(self) -> Iterator["Collectives"]:
        """Record the operations that this process enters inside the block."""
        # Keep the class's raw attributes: a result of getattr would not bind to instances after it is put back
        originals = {name: vars(dist.ProcessGroup)[name] for name in (*COLLECTIVES, *MESSAGES)}
        for name in COLLECTIVES:
            setattr(dist.ProcessGroup, name, self._collective(name))
        for name in MESSAGES:
            setattr(dist.ProcessGroup, name, self._message(name))
        try:
            yield self
        finally:
            for name, original in originals.items():
                setattr(dist.ProcessGroup, name, original)

    def on_start(self, key: str, number: int, work: Any) -> None:
        """Called after operation `number` of a channel has started; tests override it."""

    def _collective(self, name: str) -> Callable:
        method = getattr(dist.ProcessGroup, name)
        verb, equal = COLLECTIVES[name]
        uneven = UNEVEN.get(name)

        def noted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            tensors = list(_flattened([args[position] for position in equal]))
            sent, received = ((), ()) if uneven is None else uneven(group.size(), *args)
            first = next(_flattened(tensors if uneven is None else args[:2]), None)
            operation = RecordedOperation(verb, _sizes(tensors), _dtype(first), sent=sent, received=received)
            number = self._note(group.group_name, group, operation)
            work = method(group, *args, **kwargs)
            self.on_start(group.group_name, number, work)
            return work

        return noted

    def _message(self, name: str) -> Callable:
        method = getattr(dist.ProcessGroup, name)

        def noted(group: dist.ProcessGroup, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Any:
            ends = (group.rank(), peer) if name == "send" else (peer, group.rank())
            key = f"{group.group_name}:{ends[0]}->{ends[1]}"
            if tag and dist.get_backend(group) == "gloo":
                # NCCL matches messages by order alone. With gloo, threads may send messages that only tags tell apart
                key += f" tag {tag}"
            operation = RecordedOperation(MESSAGES[name], _sizes(tensors), _dtype(tensors[0]), f"tag {tag}")
            number = self._note(key, group, operation, ends)
            work = method(group, tensors, peer, tag)
            self.on_start(key, number, work)
            return work

        return noted

    def _note(
        self, key: str, group: dist.ProcessGroup, operation: RecordedOperation, ends: tuple[int, int] | None = None
    ) -> int:
        """Record an operation with its callers and return its number in its channel."""
        channel = self._channels.get(key) or self._channels.setdefault(key, self._new_channel(group, ends))
        caller, ours = self._callers(sys._getframe(2))
        detail = operation.detail
        if caller is not None and caller.f_code.co_name in BUCKETED:
            detail = _buckets(caller)
        number = channel.last + 1
        self.entered += 1
        channel.operations.append(
            operation._replace(
                detail=detail,
                caller="" if caller is None else _function(caller.f_code),
                ours="" if ours is None else _function(ours.f_code, ours.f_lineno),
                time=self.now(),
                number=number,
            )
        )
        return number

    def _new_channel(self, group: dist.ProcessGroup, ends: tuple[int, int] | None) -> Channel:
        ranks = tuple(dist.get_process_group_ranks(group))
        name = group.group_desc.replace("_GROUP", "").replace("_", "-").lower()
        if name in ("", "undefined"):
            name = f"of ranks {', '.join(map(str, ranks))}"
        kept = deque(maxlen=self.kept)
        if ends is None:
            return Channel(name, ranks, kept)
        source, target = (ranks[end] for end in ends)
        return Channel(f"{name}, {source} -> {target}", (source, target), kept, is_message=True)

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


@functools.cache
def _function(code: CodeType, line: int | None = None) -> str:
    file = Path(code.co_filename).name
    return f"{code.co_name} ({file})" if line is None else f"{code.co_name} ({file}:{line})"


def _dtype(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _buckets(frame: FrameType) -> str:
    group = frame.f_locals.get("self")
    numbers = [str(bucket.bucket_id) for bucket in getattr(group, "buckets", ())]
    return f"bucket {' and '.join(numbers)}"
