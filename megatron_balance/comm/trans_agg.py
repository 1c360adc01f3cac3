"""Trans and Agg: weights from an expert's owner to its guests, and gradients from the guests to the owner."""

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import ExpertPiece, TransPlan

AHEAD = 2
"""Number of rounds whose receives are posted early on gloo, where a sender waits until the receiver is ready."""

SENDS_AT_ONCE = 3
"""Number of simultaneous sends on gloo: one is on the link, one is ready when the link becomes free, and one fills the
gap while a receiver is busy."""

PARTS = 2
"""Maximum number of parts of a plan that are executed one after another, for each of Trans and Agg."""

ALIGNMENT = 16
"""Pieces begin at multiples of this number of elements, so that kernels can read and write 16 bytes at once."""


class Slots(Protocol):
    """The experts of one layer on this rank."""

    def ready(self) -> None:
        """Wait for this layer's weights to be up to date; called before each Trans, on the model's thread."""
        ...

    def own(self, home_experts: Sequence[int]) -> None:
        """Set the expert whose parameters each home slot holds."""
        ...

    def weights_of(self, slot: int) -> Sequence[torch.Tensor]:
        """Return contiguous views of all weights in a slot, in the same order on every rank; their memory stays."""
        ...

    def gradients_of(self, slot: int) -> Sequence[torch.Tensor]:
        """Return contiguous views of the gradients that a slot has accumulated; their memory stays."""
        ...


class _Step(NamedTuple):
    """This rank's part of one round, ready to post."""

    receives: list[dist.P2POp]
    sends: list[dist.P2POp]
    needs: int
    """Number of this rank's steps whose receives must be complete before it sends."""
    adds: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    """Tensors to add others to. The tensors of one entry do not overlap; entries are added one after another."""


class _Prepared(NamedTuple):
    """A Trans or an Agg of this rank: a function of a plan and a placement, so it is used as long as these last."""

    plan: TransPlan
    placement: Placement
    steps: list[_Step]
    sent: list[torch.Tensor]
    """Gradients that are zero in the end; empty for Trans."""


class ExpertTransfer:
    """Executes TransPlans, or parts of them, over an expert-parallel group.

    Every rank of the group calls every method, with the same plans in the same order. Both methods return when this
    rank's part is complete, or, with NCCL, queued on the current stream: one batch of messages per round, over a
    communicator that the caller has connected. They call no modules, so any single thread and stream may run them.

    What to post is prepared at the first call with a plan and a placement, and kept for later calls with the same
    objects.

    On gloo consecutive rounds overlap. This cannot deadlock: a rank waits only for messages of rounds before the one
    that it posts, or for its sends of that round after it has posted its receives. So the messages of the earliest
    round in progress are always posted at both ends in the end.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._is_queued = dist.get_backend(group) == "nccl"
        """Whether messages wait for each other on a stream, and not on the host."""
        self._staging = _Staging(1 if self._is_queued else AHEAD + 1)
        self._prepared: weakref.WeakKeyDictionary[Slots, dict[bool, deque[_Prepared]]] = weakref.WeakKeyDictionary()

    @torch.no_grad()
    def trans(self, plan: TransPlan, placement: Placement, slots: Slots) -> None:
        """Fill every guest slot with its owner's weights (Pro-Prophet section IV-A, primitive Trans)."""
        self._run(self._ready(plan, placement, slots, adds=False))

    @torch.no_grad()
    def agg(self, plan: TransPlan, placement: Placement, slots: Slots) -> None:
        """Add every guest's gradients to its owner's, and zero the guests' (Pro-Prophet section IV-A, primitive Agg).

        The plan runs backward: a rank that relayed weights adds up the gradients it receives before it sends them on.
        Within a round, a rank adds what it receives in the order of the plan, so the order of summation is the same in
        every run.
        """
        prepared = self._ready(plan, placement, slots, adds=True)
        self._run(prepared)
        if prepared.sent:
            torch._foreach_zero_(prepared.sent)  # pyright: ignore[reportPrivateImportUsage]

    def _ready(self, plan: TransPlan, placement: Placement, slots: Slots, adds: bool) -> _Prepared:
        kept = self._prepared.setdefault(slots, {}).setdefault(adds, deque(maxlen=PARTS))
        for prepared in kept:
            if prepared.plan is plan and prepared.placement is placement:
                return prepared
        prepared = self._prepare(plan, placement, slots, adds)
        # New staging leaves earlier operations without memory of their own
        self._prepared.setdefault(slots, {}).setdefault(adds, deque(maxlen=PARTS)).append(prepared)
        return prepared

    def _prepare(self, plan: TransPlan, placement: Placement, slots: Slots, adds: bool) -> _Prepared:
        steps = _steps(plan, placement, self.group.rank(), slots.gradients_of if adds else slots.weights_of)
        if not adds:
            arriving = [[piece.tensors for piece in step.received] for step in steps]
            return _Prepared(plan, placement, [*self._posted(steps, arriving)], [])
        steps = [_RoundPart(sent=step.received, received=step.sent) for step in reversed(steps)]
        if self._staging.grows([[piece.tensors for piece in step.received] for step in steps]):
            self._prepared.clear()
        rooms = [
            self._staging.rooms(index, [piece.tensors for piece in step.received]) for index, step in enumerate(steps)
        ]
        posted = [
            step._replace(adds=_waves(part.received, room))
            for step, part, room in zip(self._posted(steps, rooms), steps, rooms, strict=True)
        ]
        sent = [tensor for step in steps for piece in step.sent for tensor in piece.tensors]
        return _Prepared(plan, placement, posted, sent)

    def _posted(
        self, steps: "Sequence[_RoundPart]", rooms: Sequence[Sequence[Sequence[torch.Tensor]]]
    ) -> Iterator[_Step]:
        """Yield steps, with the tensors in `rooms` to receive each round's pieces in."""
        complete: dict[tuple[int, int], int] = {}
        """Number of steps after which a piece is complete."""
        for number, (step, room) in enumerate(zip(steps, rooms, strict=True)):
            needs = max((complete.get(piece.name, 0) for piece in step.sent), default=0)
            complete |= {piece.name: number + 1 for piece in step.received}
            receives = [
                operation
                for piece, tensors in zip(step.received, room, strict=True)
                for operation in self._operations(dist.irecv, piece.peer, tensors)
            ]
            sends = [
                operation
                for piece in step.sent
                for operation in self._operations(dist.isend, piece.peer, piece.tensors)
            ]
            yield _Step(receives, sends, needs, [])

    def _operations(self, verb: Callable, peer: int, tensors: Sequence[torch.Tensor]) -> Iterator[dist.P2POp]:
        # Tags distinguish a piece's tensors on gloo, where messages with one tag match in order; NCCL uses only order
        for tag, tensor in enumerate(tensors):
            yield dist.P2POp(verb, tensor, group=self.group, group_peer=peer, tag=tag)

    def _run(self, prepared: _Prepared) -> None:
        if not self._is_queued:
            _run_overlapped(prepared.steps)
            return
        for step in prepared.steps:
            for work in _post(step.receives + step.sends):
                work.wait()
            _add(step)


def _run_overlapped(steps: Sequence[_Step]) -> None:
    """Send and receive with waits on the host: receives are posted AHEAD of the steps that wait for them."""
    arriving: deque[tuple[_Step, list[dist.Work]]] = deque()
    leaving: deque[dist.Work] = deque()
    complete = 0

    def finish(number: int) -> None:
        nonlocal complete
        while complete < number:
            step, works = arriving.popleft()
            for work in works:
                work.wait()
            _add(step)
            complete += 1

    def receive(number: int) -> None:
        # Staging is used again after AHEAD more steps
        finish(number - AHEAD)
        if number < len(steps):
            arriving.append((steps[number], _post(steps[number].receives)))

    for number in range(AHEAD):
        receive(number)
    for number, step in enumerate(steps):
        receive(number + AHEAD)
        finish(step.needs)
        for operation in step.sends:
            if len(leaving) == SENDS_AT_ONCE:
                leaving.popleft().wait()
            leaving += _post([operation])
    finish(len(steps))
    for work in leaving:
        work.wait()


def _post(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


def _add(step: _Step) -> None:
    for tensors, received in step.adds:
        torch._foreach_add_(tensors, received)  # pyright: ignore[reportPrivateImportUsage]


class _Staging:
    """Memory for gradients that are received, reused because pieces of all layers' experts have similar sizes."""

    def __init__(self, steps: int) -> None:
        """
        Args:
            steps: number of consecutive steps that have memory of their own.
        """
        self._buffers: list[dict[torch.dtype, torch.Tensor]] = [{} for _ in range(steps)]

    def grows(self, pieces: Sequence[Sequence[Sequence[torch.Tensor]]]) -> bool:
        """Provide room for all pieces of each step; return whether this replaced memory in use."""
        replaced = False
        for index, step in enumerate(pieces):
            buffers = self._buffers[index % len(self._buffers)]
            sizes = Counter[torch.dtype]()
            tensors = [tensor for piece in step for tensor in piece]
            for tensor in tensors:
                sizes[tensor.dtype] += _aligned(len(tensor))
            for tensor in tensors:
                dtype = tensor.dtype
                if dtype not in buffers or len(buffers[dtype]) < sizes[dtype]:
                    replaced |= dtype in buffers
                    buffers[dtype] = tensor.new_empty(sizes[dtype])
        return replaced

    def rooms(self, index: int, pieces: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Return memory for the pieces of the step with this index."""
        buffers = self._buffers[index % len(self._buffers)]
        used = Counter[torch.dtype]()

        def room(tensor: torch.Tensor) -> torch.Tensor:
            first = used[tensor.dtype]
            used[tensor.dtype] += _aligned(len(tensor))
            return buffers[tensor.dtype][first : first + len(tensor)]

        return [[room(tensor) for tensor in piece] for piece in pieces]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Piece(NamedTuple):
    """A message, as seen by its source or by its target."""

    expert: int
    chunk: int
    peer: int
    tensors: Sequence[torch.Tensor]
    """The same at both ends."""

    @property
    def name(self) -> tuple[int, int]:
        return self.expert, self.chunk


class _RoundPart(NamedTuple):
    """This rank's part of one round."""

    sent: list[_Piece]
    received: list[_Piece]


def _waves(
    received: Sequence[_Piece], rooms: Sequence[Sequence[torch.Tensor]]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return what to add to a rank's gradients: the first message of every piece, then every second one, and so on."""
    waves: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    seen: Counter[tuple[int, int]] = Counter()
    for piece, room in zip(received, rooms, strict=True):
        # A small expert may have fewer elements than pieces
        if not room:
            continue
        wave = seen[piece.name]
        seen[piece.name] += 1
        if wave == len(waves):
            waves.append(([], []))
        waves[wave][0].extend(piece.tensors)
        waves[wave][1].extend(room)
    return waves


def cut(tensors: Sequence[torch.Tensor], chunk: int, chunks: int) -> list[torch.Tensor]:
    """Return piece `chunk` of `chunks` of an expert: flat parts of its tensors, without empty ones.

    An expert's tensors follow one another, and a piece is a range of their elements. So most pieces are a single
    message, however many tensors an expert has.
    """
    total = sum(tensor.numel() for tensor in tensors)
    begin, end = (
        total if index == chunks else total * index // chunks // ALIGNMENT * ALIGNMENT for index in (chunk, chunk + 1)
    )
    parts = []
    first = 0
    for tensor in tensors:
        low = max(begin - first, 0)
        high = min(end - first, tensor.numel())
        if low < high:
            parts.append(tensor.view(-1)[low:high])
        first += tensor.numel()
    return parts


def _steps(
    plan: TransPlan, placement: Placement, rank: int, tensors_of: Callable[[int], Sequence[torch.Tensor]]
) -> list[_RoundPart]:
    """Return this rank's part of every round that it takes part in, in the order of Trans."""

    @cache
    def expert_of(expert: int) -> Sequence[torch.Tensor]:
        return tensors_of(placement.slot(rank, expert))

    @cache
    def tensors_in(expert: int, chunk: int, chunks: int) -> list[torch.Tensor]:
        return cut(expert_of(expert), chunk, chunks)

    def piece(message: ExpertPiece, peer: int) -> _Piece:
        tensors = tensors_in(message.expert, message.piece, message.pieces)
        return _Piece(message.expert, message.piece, peer, tensors)

    (own_M,) = ((plan.source_M == rank) | (plan.target_M == rank)).nonzero()
    steps: defaultdict[int, _RoundPart] = defaultdict(lambda: _RoundPart([], []))
    for *fields, number in np.stack([column_M[own_M] for column_M in plan.columns], axis=1).tolist():
        message = ExpertPiece(*fields)
        if message.source == rank:
            steps[number].sent.append(piece(message, message.target))
        else:
            steps[number].received.append(piece(message, message.source))
    return [*steps.values()]
