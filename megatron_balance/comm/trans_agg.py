"""Trans and Agg: weights from an expert's owner to its guests, and gradients from the guests to the owner."""

import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import MESSAGES_AT_ONCE, post_operations, wait_for
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import TransPlan

AHEAD = 2
"""Number of rounds whose receives are posted ahead on gloo, where a sender waits until the receiver is ready."""

PARTS = 2
"""Maximum number of parts into which a plan is split, for each of Trans and Agg."""

ALIGNMENT = 16
"""Alignment of pieces in elements, and of staged tensors in bytes: kernels read 16 bytes at once."""


TensorsOf = Callable[[int], Sequence[torch.Tensor]]
"""Slot -> its expert's tensors."""


class WeightSlots(Protocol):
    """Weights of the experts of one layer on this rank; every rank returns contiguous views in the same order."""

    def ready(self) -> None: ...

    def weights_of(self, slot: int) -> Sequence[torch.Tensor]: ...


class Slots(WeightSlots, Protocol):
    """The experts of one layer on this rank, with gradients in the order of their weights."""

    repeats: bool
    """Whether the current forward pass is part of a backward pass, with whose guest slots it computes."""

    @property
    def forward_slots(self) -> WeightSlots: ...

    def own(self, home_experts: Sequence[int]) -> None: ...

    def gradients_of(self, slot: int) -> Sequence[torch.Tensor]: ...


class _Slice(NamedTuple):
    """A message: a contiguous part of one tensor of an expert; `peer` is the rank at the other end."""

    expert: int
    piece: int
    """Index of the piece of the expert."""
    tag: int
    """Index of the tensor within the piece. gloo matches messages of one tag in order; NCCL matches by order alone."""
    peer: int
    tensor: torch.Tensor

    @property
    def name(self) -> tuple[int, int, int]:
        """Identifies the elements: equal for all messages that carry them."""
        return self.expert, self.piece, self.tag


_OwnRound = tuple[list[_Slice], list[_Slice]]
"""Messages that this rank sends and receives in one round."""


class _PostedRound(NamedTuple):
    receives: list[dist.P2POp]
    sends: list[dist.P2POp]
    needs: int
    """Number of this rank's rounds that must have been received before it sends."""
    adds: list[tuple[list[torch.Tensor], list[torch.Tensor]]]
    """(totals, received) to add. The tensors of one entry do not overlap; entries are added one after another."""


class _Prepared(NamedTuple):
    """A Trans or an Agg of this rank, reused while its plan and placement last."""

    plan: TransPlan
    placement: Placement
    rounds: list[_PostedRound]
    sent: list[torch.Tensor]
    """Gradients to zero at the end; empty for Trans."""


class TransAgg:
    """Executes the rounds of Trans and Agg over an expert-parallel group.

    Every rank of the group calls every method, with the same plans in the same order. A method returns when this rank's
    part is complete. With NCCL, it returns when its part is queued on the current stream, and the caller must have
    connected the communicator. Modules are not called, so any single thread and stream may run the methods.

    On gloo, consecutive rounds overlap. This cannot deadlock: before it posts a round, a rank waits only for messages
    of earlier rounds; it waits for the round's sends only after it has posted the round's receives.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._is_queued = dist.get_backend(group) == "nccl"
        """Whether messages are ordered by a stream, without host waits."""
        self._staging = [torch.empty(0, dtype=torch.uint8)] * (1 if self._is_queued else AHEAD + 1)
        """Staging buffers for received gradients of consecutive rounds, shared by all layers."""
        self._prepared: weakref.WeakKeyDictionary[WeightSlots, dict[bool, deque[_Prepared]]] = (
            weakref.WeakKeyDictionary()
        )

    @torch.no_grad()
    def trans(self, plan: TransPlan, placement: Placement, slots: WeightSlots) -> None:
        """Fill every guest slot with its owner's weights (primitive Trans, Pro-Prophet section IV-A)."""
        self._run(self._ready(plan, placement, slots, slots.weights_of, adds=False).rounds)

    @torch.no_grad()
    def agg(self, plan: TransPlan, placement: Placement, slots: Slots) -> None:
        """Add every guest's gradients to its owner's, and zero the guests' (primitive Agg, Pro-Prophet section IV-A).
        The plan runs backward: a rank that passed on weights adds up the gradients it receives before it sends them on.
        The order of summation is the same in every run."""
        prepared = self._ready(plan, placement, slots, slots.gradients_of, adds=True)
        self._run(prepared.rounds)
        if prepared.sent:
            torch._foreach_zero_(prepared.sent)  # pyright: ignore[reportPrivateImportUsage]

    def _ready(
        self, plan: TransPlan, placement: Placement, slots: WeightSlots, tensors_of: TensorsOf, adds: bool
    ) -> _Prepared:
        for prepared in self._prepared.get(slots, {}).get(adds, ()):
            if prepared.plan is plan and prepared.placement is placement:
                return prepared
        prepared = self._prepare(plan, placement, tensors_of, adds)
        self._prepared.setdefault(slots, {}).setdefault(adds, deque(maxlen=PARTS)).append(prepared)
        return prepared

    def _prepare(self, plan: TransPlan, placement: Placement, tensors_of: TensorsOf, adds: bool) -> _Prepared:
        rounds = _own_rounds(plan, placement, self.group.rank(), tensors_of)
        if adds:
            rounds = [(received, sent) for sent, received in reversed(rounds)]
        arriving = [[piece.tensor for piece in received] for _, received in rounds]
        if adds:
            arriving = self._staged(arriving)
        posted = []
        complete: dict[tuple[int, int, int], int] = {}
        """Number of rounds after which a slice is complete, by its name."""
        for number, ((sent, received), rooms) in enumerate(zip(rounds, arriving, strict=True), 1):
            needs = max((complete.get(piece.name, 0) for piece in sent), default=0)
            complete |= {piece.name: number for piece in received}
            receives = [self._message(dist.irecv, *pair) for pair in zip(received, rooms, strict=True)]
            sends = [self._message(dist.isend, piece, piece.tensor) for piece in sent]
            posted.append(_PostedRound(receives, sends, needs, _waves(received, rooms) if adds else []))
        sent = [piece.tensor for pieces, _ in rounds for piece in pieces] if adds else []
        return _Prepared(plan, placement, posted, sent)

    def _message(self, verb: Callable, piece: _Slice, tensor: torch.Tensor) -> dist.P2POp:
        return dist.P2POp(verb, tensor, group=self.group, group_peer=piece.peer, tag=piece.tag)

    def _staged(self, rounds: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Return staging buffers for these tensors; rounds that may overlap do not share memory."""
        for index, tensors in enumerate(rounds):
            size = sum(_aligned(tensor.nbytes) for tensor in tensors)
            old = self._staging[index % len(self._staging)]
            if size > len(old):
                if len(old):
                    # Prepared operations would keep the replaced buffer alive
                    self._prepared.clear()
                self._staging[index % len(self._staging)] = tensors[0].new_empty(size, dtype=torch.uint8)
        return [_split(self._staging[index % len(self._staging)], tensors) for index, tensors in enumerate(rounds)]

    def _run(self, rounds: Sequence[_PostedRound]) -> None:
        if not self._is_queued:
            _run_overlapped(rounds)
            return
        for part in rounds:
            wait_for(post_operations(part.receives + part.sends))
            _add(part)


def _run_overlapped(rounds: Sequence[_PostedRound]) -> None:
    """Execute rounds with host waits; receives are posted AHEAD rounds early."""
    arriving: deque[tuple[_PostedRound, list[dist.Work]]] = deque()
    leaving: deque[dist.Work] = deque()
    complete = 0

    def finish(number: int) -> None:
        nonlocal complete
        while complete < number:
            part, works = arriving.popleft()
            wait_for(works)
            _add(part)
            complete += 1

    def receive(number: int) -> None:
        # Staging buffers are reused after AHEAD more rounds
        finish(number - AHEAD)
        if number < len(rounds):
            arriving.append((rounds[number], post_operations(rounds[number].receives)))

    for number in range(AHEAD):
        receive(number)
    for number, part in enumerate(rounds):
        receive(number + AHEAD)
        finish(part.needs)
        for operation in part.sends:
            if len(leaving) == MESSAGES_AT_ONCE:
                leaving.popleft().wait()
            leaving += post_operations([operation])
    finish(len(rounds))
    for work in leaving:
        work.wait()


def _add(part: _PostedRound) -> None:
    for tensors, received in part.adds:
        torch._foreach_add_(tensors, received)  # pyright: ignore[reportPrivateImportUsage]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _split(buffer: torch.Tensor, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    parts = []
    first = 0
    for tensor in tensors:
        parts.append(buffer[first : first + tensor.nbytes].view(tensor.dtype))
        first += _aligned(tensor.nbytes)
    return parts


def _waves(
    received: Sequence[_Slice], rooms: Sequence[torch.Tensor]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return additions to a rank's gradients: the first message of every slice, then the second ones, and so on."""
    waves: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    seen: Counter[tuple[int, int, int]] = Counter()
    for piece, room in zip(received, rooms, strict=True):
        wave = seen[piece.name]
        seen[piece.name] += 1
        if wave == len(waves):
            waves.append(([], []))
        waves[wave][0].append(piece.tensor)
        waves[wave][1].append(room)
    return waves


def cut(tensors: Sequence[torch.Tensor], piece: int, pieces: int) -> list[torch.Tensor]:
    """Return piece `piece` of `pieces` of an expert: a range of its elements, as flat, non-empty parts of tensors."""
    total = sum(tensor.numel() for tensor in tensors)
    begin, end = (
        total if index == pieces else total * index // pieces // ALIGNMENT * ALIGNMENT for index in (piece, piece + 1)
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


def _own_rounds(plan: TransPlan, placement: Placement, rank: int, tensors_of: TensorsOf) -> list[_OwnRound]:
    """Return this rank's messages of each of its rounds, in the order of Trans."""

    @cache
    def expert_of(expert: int) -> Sequence[torch.Tensor]:
        return tensors_of(placement.slot(rank, expert))

    @cache
    def piece_of(expert: int, piece: int, pieces: int) -> list[torch.Tensor]:
        return cut(expert_of(expert), piece, pieces)

    (own_M,) = ((plan.source_M == rank) | (plan.target_M == rank)).nonzero()
    rounds: defaultdict[int, _OwnRound] = defaultdict(lambda: ([], []))
    for expert, source, target, piece, pieces, number in np.stack(
        [each[own_M] for each in plan.columns], axis=1
    ).tolist():
        sent, received = rounds[number]
        slices = sent if source == rank else received
        peer = target if source == rank else source
        for tag, tensor in enumerate(piece_of(expert, piece, pieces)):
            slices.append(_Slice(expert, piece, tag, peer, tensor))
    return [*rounds.values()]
