"""Trans and Agg: weights from an expert's owner to its guests, and gradients from the guests to the owner."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import Message, TransferPlan

AHEAD = 2
"""Number of rounds whose receives are posted early on gloo, where a sender waits until the receiver is ready."""

SENDS_AT_ONCE = 3
"""Number of simultaneous sends on gloo: one is on the link, one is ready when the link becomes free, and one fills the
gap while a receiver is busy."""


class Slots(Protocol):
    """The experts of one layer on this rank."""

    def ready(self) -> None:
        """Wait for this layer's weights to be up to date; called before each Trans, on the model's thread."""
        ...

    def own(self, home_experts: Sequence[int]) -> None:
        """Set the expert whose parameters each home slot holds."""
        ...

    def weights_of(self, slot: int) -> Sequence[torch.Tensor]:
        """Return contiguous views of all weights in a slot, in the same order on every rank."""
        ...

    def gradients_of(self, slot: int) -> Sequence[torch.Tensor]:
        """Return contiguous views of the gradients that a slot has accumulated."""
        ...


class _Piece(NamedTuple):
    """A message, as seen by its source or by its target."""

    expert: int
    chunk: int
    peer: int
    tensors: Sequence[torch.Tensor]
    """Flat parts of the expert's tensors, without empty ones; the same at both ends."""

    @property
    def name(self) -> tuple[int, int]:
        return self.expert, self.chunk

    def operations(self, verb: Callable, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[dist.P2POp]:
        # Tags distinguish a piece's tensors on gloo, where messages with one tag match in order; NCCL uses only order
        return [
            dist.P2POp(verb, tensor, group=group, group_peer=self.peer, tag=tag) for tag, tensor in enumerate(tensors)
        ]


class _RoundPart(NamedTuple):
    """This rank's part of one round."""

    sent: _Piece | None
    received: _Piece | None


class ExpertTransfer:
    """Executes TransferPlans, or parts of them, over an expert-parallel group.

    Every rank of the group calls every method, with the same plans in the same order. Both methods return when this
    rank's part is complete, or, with NCCL, queued on the current stream: one batch of messages per round, over a
    communicator that the caller has connected. They call no modules, so any single thread and stream may run them.

    On gloo consecutive rounds overlap. This cannot deadlock: a rank waits only for messages of rounds before the one
    that it posts, so the messages of the earliest round in progress have always been posted at both ends.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._staging: list[list[torch.Tensor]] = [[] for _ in range(AHEAD + 1)]
        """Buffers for received gradients, reused because pieces of all layers' experts have similar sizes."""

    @torch.no_grad()
    def trans(self, plan: TransferPlan, placement: Placement, slots: Slots) -> None:
        """Fill every guest slot with its owner's weights (Pro-Prophet section IV-A, primitive Trans)."""
        self._run(_steps(plan, placement, self.group.rank(), slots.weights_of), adds=False)

    @torch.no_grad()
    def agg(self, plan: TransferPlan, placement: Placement, slots: Slots) -> None:
        """Add every guest's gradients to its owner's, and zero the guests' (Pro-Prophet section IV-A, primitive Agg).

        The plan runs backward: a rank that relayed weights adds up the gradients it receives before it sends them on,
        so the order of summation is the same in every run.
        """
        steps = _steps(plan, placement, self.group.rank(), slots.gradients_of)
        self._run([_RoundPart(sent=step.received, received=step.sent) for step in reversed(steps)], adds=True)

    def _run(self, steps: Sequence[_RoundPart], adds: bool) -> None:
        """Send and receive; with `adds`, add received tensors to the local ones and zero tensors after sending them."""
        traffic = _Traffic(self.group, self._staging, adds)
        if dist.get_backend(self.group) == "nccl":
            for step in steps:
                traffic.run_batch(step)
            return
        coming = iter([step.received for step in steps])
        for received in islice(coming, AHEAD):
            traffic.receive(received)
        for step in steps:
            traffic.receive(next(coming, None))
            traffic.send(step.sent)
        traffic.finish()


class _Traffic:
    """The messages of one rank in one Trans or Agg."""

    def __init__(self, group: dist.ProcessGroup, staging: Sequence[list[torch.Tensor]], adds: bool) -> None:
        self.group, self.adds, self.staging = group, adds, staging
        self.num_received = 0
        self.arriving: deque[tuple[_Piece, Sequence[torch.Tensor], list[dist.Work]]] = deque()
        self.leaving: deque[tuple[_Piece, list[dist.Work]]] = deque()

    def run_batch(self, step: _RoundPart) -> None:
        """Post both messages of a round at the same time, and wait for them."""
        operations, room = [], ()
        if step.received is not None:
            room = self._buffers_for(step.received)
            operations += step.received.operations(dist.irecv, room, self.group)
        if step.sent is not None:
            operations += step.sent.operations(dist.isend, step.sent.tensors, self.group)
        for work in _post(operations):
            work.wait()
        if step.received is not None:
            self._add_received(step.received, room)
        if step.sent is not None:
            self._zero_sent(step.sent)

    def receive(self, piece: _Piece | None) -> None:
        """Post a receive; if all staging is in use, first wait for the oldest receive."""
        if piece is None:
            return
        if len(self.arriving) == len(self.staging):
            self._finish_receive()
        room = self._buffers_for(piece)
        self.arriving.append((piece, room, _post(piece.operations(dist.irecv, room, self.group))))

    def send(self, piece: _Piece | None) -> None:
        """Post a send; if it relays a piece, first wait until the piece has arrived."""
        if piece is None:
            return
        while any(other.name == piece.name for other, *_ in self.arriving):
            self._finish_receive()
        if len(self.leaving) == SENDS_AT_ONCE:
            self._finish_send()
        self.leaving.append((piece, _post(piece.operations(dist.isend, piece.tensors, self.group))))

    def finish(self) -> None:
        while self.arriving:
            self._finish_receive()
        while self.leaving:
            self._finish_send()

    def _finish_receive(self) -> None:
        piece, room, works = self.arriving.popleft()
        for work in works:
            work.wait()
        self._add_received(piece, room)

    def _finish_send(self) -> None:
        piece, works = self.leaving.popleft()
        for work in works:
            work.wait()
        self._zero_sent(piece)

    def _buffers_for(self, piece: _Piece) -> Sequence[torch.Tensor]:
        """Return where a piece is received: in place, or in staging if it has to be added to the local tensors."""
        if not self.adds:
            return piece.tensors
        index = self.num_received % len(self.staging)
        self.num_received += 1
        kept = self.staging[index]
        fits = len(kept) == len(piece.tensors) and all(map(_fits, kept, piece.tensors))
        if not fits:
            kept[:] = [torch.empty_like(tensor) for tensor in piece.tensors]
        return [room[: len(tensor)] for room, tensor in zip(kept, piece.tensors, strict=True)]

    def _add_received(self, piece: _Piece, room: Sequence[torch.Tensor]) -> None:
        if self.adds:
            for tensor, received in zip(piece.tensors, room, strict=True):
                tensor.add_(received)

    def _zero_sent(self, piece: _Piece) -> None:
        if self.adds:
            for tensor in piece.tensors:
                tensor.zero_()


def _fits(room: torch.Tensor, tensor: torch.Tensor) -> bool:
    return len(room) >= len(tensor) and room.dtype == tensor.dtype


def _post(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []


def _steps(
    plan: TransferPlan, placement: Placement, rank: int, tensors_of: Callable[[int], Sequence[torch.Tensor]]
) -> list[_RoundPart]:
    """Return this rank's part of every round that it takes part in, in the order of Trans."""

    @cache
    def pieces_of(expert: int) -> list[list[torch.Tensor]]:
        flat = [tensor.view(-1) for tensor in tensors_of(placement.slot(rank, expert))]
        by_chunk = zip(*(tensor.tensor_split(plan.chunks) for tensor in flat), strict=True)
        return [[part for part in parts if part.numel()] for parts in by_chunk]

    def piece(message: Message, peer: int) -> _Piece:
        return _Piece(message.expert, message.chunk, peer, pieces_of(message.expert)[message.chunk])

    steps = []
    for messages in plan.rounds:
        sent = [piece(message, message.target) for message in messages if message.source == rank]
        received = [piece(message, message.source) for message in messages if message.target == rank]
        if sent or received:
            steps.append(_RoundPart(*sent or [None], *received or [None]))
    return steps
