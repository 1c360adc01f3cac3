"""Trans and Agg: an expert's weights from its owner to its guests, its gradients from the guests to the owner."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import Message, TransferPlan


class Slots(Protocol):
    """The experts of one layer on this rank."""

    def weights_of(self, slot: int) -> Sequence[torch.Tensor]:
        """Contiguous views of all weights in a slot, in the same order on every rank."""
        ...

    def gradients_of(self, slot: int) -> Sequence[torch.Tensor]:
        """Contiguous views of the gradients that a slot has collected."""
        ...


class ExpertTransfer:
    """Executes TransferPlans over an expert-parallel group; every rank of it calls every method, with the same plan.

    Round by round, a rank sends at most one expert and receives at most one. Both methods return when this rank's part
    is done (with NCCL: is queued on the current stream).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._staging: list[torch.Tensor] = []

    @torch.no_grad()
    def trans(self, plan: TransferPlan, placement: Placement, slots: Slots) -> None:
        """Fill every guest slot with its owner's weights (Pro-Prophet section IV-A, primitive Trans)."""
        rank = self.group.rank()
        for messages in plan.rounds:
            operations = []
            for message in _concerning(rank, messages):
                weights = slots.weights_of(placement.slot(rank, message.expert))
                if message.source == rank:
                    operations += self._operations(dist.isend, weights, message.target)
                else:
                    operations += self._operations(dist.irecv, weights, message.source)
            _run(operations)

    @torch.no_grad()
    def agg(self, plan: TransferPlan, placement: Placement, slots: Slots) -> None:
        """Add every guest's gradients to its owner's, and empty the guests' (Pro-Prophet section IV-A, primitive Agg).

        The plan runs backward: who passed weights on adds up what comes back before it goes on, so that sums are taken
        in the same order in every run.
        """
        rank = self.group.rank()
        for messages in reversed(plan.rounds):
            operations, sums, sent = [], [], []
            for message in _concerning(rank, messages):
                gradients = slots.gradients_of(placement.slot(rank, message.expert))
                if message.source == rank:
                    staged = self._staging_like(gradients)
                    operations += self._operations(dist.irecv, staged, message.target)
                    sums += zip(gradients, staged, strict=True)
                else:
                    operations += self._operations(dist.isend, gradients, message.source)
                    sent += gradients
            _run(operations)
            for gradient, received in sums:
                gradient.add_(received)
            for gradient in sent:
                gradient.zero_()

    def _operations(self, verb, tensors: Sequence[torch.Tensor], peer: int) -> list[dist.P2POp]:
        # Tags tell an expert's tensors apart on gloo; NCCL goes by their order
        return [
            dist.P2POp(verb, tensor, group=self.group, group_peer=peer, tag=tag) for tag, tensor in enumerate(tensors)
        ]

    def _staging_like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Room for one expert's gradients, kept: all layers' experts are alike."""
        if [(one.shape, one.dtype) for one in self._staging] != [(one.shape, one.dtype) for one in tensors]:
            self._staging = [torch.empty_like(tensor) for tensor in tensors]
        return self._staging


def _concerning(rank: int, messages: Iterable[Message]) -> Iterable[Message]:
    return (message for message in messages if rank in (message.source, message.target))


def _run(operations: list[dist.P2POp]) -> None:
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
