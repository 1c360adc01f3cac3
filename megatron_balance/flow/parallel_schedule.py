"""Step orders of an MoE layer under tensor-parallel attention (MP), expert parallelism (EP) and sharded experts (ESP).

`ParallelDispatch` executes an order's steps on a layer's tokens, except for the steps from `Dump` or the first
all-to-all to the last all-to-all: flow/chunks/pipeline.py executes those, with the order's `Sharding`.

    megatron   the order of megatron-core's dispatcher
    baseline   the order of DeepSpeed-MoE (Parm, Fig. 3a)
    s1, s2     PauseMP: no two ranks compute the same row (Parm, Fig. 3b and 3c)

A backward pass takes the same steps in reverse: for example, the gradient of a split is an all-gather.
"""

import functools
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)

from megatron_balance.comm.pipelined import Simultaneous
from megatron_balance.comm.sharded import AllGather, AllReduce, DirectAllToAll, Sharding, Unsharded
from megatron_balance.flow.chunks.order import split_evenly
from megatron_balance.flow.plan import Choices


class TokenStep(StrEnum):
    """A step on a layer's tokens or their rows; a token has one row for each chosen expert."""

    MP_SPLIT = "MP-Split"
    GATE = "Gate"
    DUMP = "Dump"
    ESP_ALL_GATHER = "ESP-AllGather"
    EP_ALL_TO_ALL = "EP-AlltoAll"
    EP_ESP_ALL_TO_ALL = "EP&ESP-AlltoAll"
    EXPERTS = "Experts"
    ESP_REDUCE_SCATTER = "ESP-ReduceScatter"
    ESP_ALL_REDUCE = "ESP-AllReduce"
    ESP_SPLIT = "ESP-Split"
    LOCAL_COMBINE = "Combine"
    MP_ALL_GATHER = "MP-AllGather"


SCHEDULES: dict[str, tuple[TokenStep, ...]] = {
    name: tuple(map(TokenStep, steps.split()))
    for name, steps in {
        "megatron": "Gate EP-AlltoAll ESP-AllGather Experts ESP-ReduceScatter EP-AlltoAll",
        "baseline": "Gate ESP-AllGather EP-AlltoAll Experts ESP-AllReduce EP-AlltoAll ESP-Split",
        "s1": "MP-Split Gate Dump EP&ESP-AlltoAll Experts EP&ESP-AlltoAll Combine MP-AllGather",
        "s2": "Gate MP-Split Dump EP&ESP-AlltoAll Experts EP&ESP-AlltoAll MP-AllGather Combine",
    }.items()
}
"""Steps by the value of `--moe-parallel-schedule`."""


class Shape(NamedTuple):
    """The sizes of a layer (Parm, Table I)."""

    tokens: int
    """B * L: tokens of a rank's input."""
    hidden: int
    """M: hidden size."""
    rows: int
    """E * T: rows that experts compute for `tokens` tokens."""
    mp: int
    """N_MP: tensor-parallel ranks with the same tokens; 1 with sequence parallelism."""
    esp: int
    """N_ESP: shards of an expert."""


def volumes(schedule: str, shape: Shape) -> list[tuple[TokenStep, int]]:
    """Return the elements per rank of each collective of a forward pass: of its input or output, whichever is larger.
    Elements that stay on the rank count too; collectives of one rank are omitted. The sizes are those of Parm's Eq. 1
    (baseline), Eq. 11 (s1), Eq. 7 (s2) and, without tensor parallelism, Eq. 2."""
    tokens = shape.tokens * shape.hidden
    rows = shape.rows * shape.hidden
    each = {
        TokenStep.EP_ALL_TO_ALL: rows * (shape.esp if schedule == "baseline" else 1),
        TokenStep.EP_ESP_ALL_TO_ALL: rows * shape.esp // shape.mp,
    }
    if shape.mp > 1:
        each[TokenStep.MP_ALL_GATHER] = tokens if schedule == "s1" else rows
    if shape.esp > 1:
        each |= {
            TokenStep.ESP_ALL_GATHER: (tokens if schedule == "baseline" else rows) * shape.esp,
            TokenStep.ESP_REDUCE_SCATTER: rows * shape.esp,
            TokenStep.ESP_ALL_REDUCE: rows * shape.esp,
        }
    return [(step, each[step]) for step in SCHEDULES[schedule] if step in each]


class ParallelDispatch:
    """Executes one schedule's steps on this rank's tokens."""

    def __init__(
        self,
        steps: Sequence[TokenStep],
        groups: ProcessGroupCollection,
        sequence_parallel: bool,
        gather_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Args:
        sequence_parallel: whether tensor-parallel ranks have different tokens, rather than the same ones.
        gather_group: a second group of the tensor-parallel ranks, over which s2 forwards rows while it receives
            more (SAA); None: s2 receives all rows, then gathers.
        """
        self.steps = tuple(steps)
        self.groups = groups
        self.copies = 1 if sequence_parallel else groups.tp.size()
        """Number of ranks that hold the same tokens."""
        self.splits_tokens = self.copies > 1 and self._before(TokenStep.MP_SPLIT, TokenStep.GATE)
        """Whether each tensor-parallel rank routes a part of the tokens; its router's gradients are then partial."""
        self.splits_rows = self.copies > 1 and self._before(TokenStep.GATE, TokenStep.MP_SPLIT)
        """Whether each tensor-parallel rank sends a part of the rows of all tokens."""
        self.repeats = 1 if self.splits_tokens or self.splits_rows else self.copies
        """Number of times that experts compute the same row."""
        gathers = self._before(TokenStep.ESP_ALL_GATHER, TokenStep.EP_ALL_TO_ALL)
        self.gathers_tokens = groups.expt_tp.size() > 1 and gathers
        """Whether each shard of a host has the tokens of all its shards, and sends all their rows."""
        self.simultaneous: Simultaneous | None = None
        if gather_group is not None and self.splits_rows:
            self.simultaneous = Simultaneous(groups.expt_tp.size(), gather_group, self.members)

    @functools.cached_property
    def sources(self) -> dist.ProcessGroup:
        """Ranks that have tokens to dispatch, in the row order of the load matrix."""
        return self.groups.ep if self.gathers_tokens else self.groups.tp_ep

    @functools.cached_property
    def source(self) -> int:
        """This rank's row in the load matrix."""
        return self.sources.rank()

    @functools.cached_property
    def members(self) -> list[int]:
        """Sources that share the rows of this rank's tokens: itself, or all ranks with the same tokens, in order."""
        if not self.splits_rows:
            return [self.source]
        sources = dist.get_process_group_ranks(self.sources)
        return [sources.index(rank) for rank in dist.get_process_group_ranks(self.groups.tp)]

    @property
    def exchange_group(self) -> dist.ProcessGroup:
        """The ranks that exchange rows."""
        return self.groups.tp_ep if TokenStep.EP_ESP_ALL_TO_ALL in self.steps else self.groups.ep

    def sharding(self) -> Sharding:
        """Return the exchange between sources and all shards of experts."""
        shards = self.groups.expt_tp
        if shards.size() == 1:
            return Unsharded()
        if TokenStep.DUMP in self.steps:
            return DirectAllToAll(shards.size())
        return AllReduce(shards) if self.gathers_tokens else AllGather(shards)

    def enter(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the part of the layer's input [sequence, ...], and of its mask, that this rank routes."""
        if not self.splits_tokens:
            return hidden_states, padding_mask
        mask = None if padding_mask is None else scatter_to_sequence_parallel_region(padding_mask, group=self.groups.tp)
        return scatter_to_sequence_parallel_region(hidden_states, group=self.groups.tp), mask

    def agree(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the router logits of the first of the ranks that share rows; the gradient goes to each rank's own
        logits. On a GPU, the ranks' hidden states differ by rounding, and their own logits could choose different
        experts."""
        return _FirstMembers.apply(logits, self.groups.tp) if self.splits_rows else logits

    def share(self, own_TH: torch.Tensor, choices: Choices) -> tuple[torch.Tensor, Choices]:
        """Return the tokens [T, H] that this rank dispatches, and their choices, given the routed tokens."""
        tokens_TH, probs_TE = (_scale_gradient(tensor, self.repeats) for tensor in (own_TH, choices.probs_TE))
        return self._gather(tokens_TH), Choices(self._gather(probs_TE), self._gather(choices.map_TE))

    def counts(self, map_TE: torch.Tensor) -> torch.Tensor:
        """Return [E]: the number of rows that this rank sends for each expert, given the choices of `share`."""
        counts_E = map_TE.sum(dim=0)
        if not self.splits_rows:
            return counts_E
        return split_evenly(counts_E.unsqueeze(0), len(self.members))[self.groups.tp.rank(), 0]

    def leave(self, output_TH: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Undo `share` and `enter`: return this rank's output in the shape of the layer's input, given the output for
        the tokens of `share`, and the shape of the tensor that `enter` returned."""
        if self.gathers_tokens:
            output_TH = scatter_to_sequence_parallel_region(output_TH, group=self.groups.expt_tp)
        # Divide the gradients, so that repeated rows count once in the weights' gradients
        output = _scale_gradient(output_TH, 1 / self.repeats).view(shape)
        if self.splits_tokens:
            return gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False, group=self.groups.tp)
        return output

    def router_groups(self) -> ProcessGroupCollection:
        """Return the groups for reducing auxiliary losses: only ranks with different tokens."""
        if self.copies == 1 or self.splits_tokens:
            return self.groups
        chosen = ProcessGroupCollection(**vars(self.groups))
        chosen.tp_cp = self.groups.cp
        chosen.tp_dp_cp = self.groups.dp_cp
        return chosen

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """If tokens are gathered, concatenate the tensors of the host's shards: [T, ...] -> [N * T, ...]."""
        if not self.gathers_tokens:
            return tensor
        shards = self.groups.expt_tp
        return gather_from_sequence_parallel_region(tensor, tensor_parallel_output_grad=False, group=shards)

    def _before(self, one: TokenStep, other: TokenStep) -> bool:
        return {one, other} <= {*self.steps} and self.steps.index(one) < self.steps.index(other)


def _scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    scaled = tensor if factor == 1 else tensor.view_as(tensor)
    if scaled is not tensor and scaled.requires_grad:
        scaled.register_hook(lambda gradient: gradient * factor)
    return scaled


class _FirstMembers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
