"""Trans and Agg in which every rank sends and receives a piece in every round, for stopwatch.py to time."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_balance.comm.trans_agg import ExpertTransfer
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import Message, TransferPlan

ROUNDS = 8
"""Number of rounds. Consecutive rounds overlap on gloo, so that the first and the last one count less among many."""


@dataclass(frozen=True, eq=False)
class _Expert:
    """The slots of a rank with one expert and one guest: lists of tensors, which are weights and gradients at once."""

    slots: Sequence[Sequence[torch.Tensor]]

    def ready(self) -> None:
        """There is nothing to wait for."""

    def own(self, home_experts: Sequence[int]) -> None:
        """The expert stays."""

    def weights_of(self, slot: int) -> Sequence[torch.Tensor]:
        return self.slots[slot]

    def gradients_of(self, slot: int) -> Sequence[torch.Tensor]:
        return self.slots[slot]


def ring(num_ranks: int, step: int) -> tuple[TransferPlan, Placement]:
    """Return a plan in which every rank sends its only expert to the rank `step` after it, a piece in each round."""
    pairs = [(rank, (rank + step) % num_ranks) for rank in range(num_ranks)]
    rounds = tuple(
        tuple(Message(source, source, target, chunk, ROUNDS) for source, target in pairs) for chunk in range(ROUNDS)
    )
    return TransferPlan(rounds), Placement.identity(num_ranks, num_ranks, 1).with_hosts(pairs)


def trans_rounds(group: dist.ProcessGroup, step: int, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a Trans of experts with these tensors along a `ring`."""
    return functools.partial(ExpertTransfer(group).trans, *ring(group.size(), step), _slots(tensors))


def agg_rounds(group: dist.ProcessGroup, step: int, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return the Agg of experts whose gradients are such tensors; every piece is added up and set to zero."""
    return functools.partial(ExpertTransfer(group).agg, *ring(group.size(), step), _slots(tensors))


def _slots(tensors: Sequence[torch.Tensor]) -> _Expert:
    return _Expert([tensors, [torch.zeros_like(tensor) for tensor in tensors]])
