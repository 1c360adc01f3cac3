"""Step orders of an MoE layer under tensor-parallel attention (MP), expert parallelism (EP) and sharded experts (ESP).

An order is data: `SCHEDULES`. `ParallelDispatch` says what its steps mean for a layer's tokens. Rows between `dump` or
the first all-to-all and the last all-to-all pass through flow/chunks/pipeline.py, by the `Sharding` that the order asks
for.

    megatron   what megatron-core's dispatcher does
    baseline   what DeepSpeed-MoE does (Parm, Fig. 3a)
    s1, s2     PauseMP: no rank computes what another one does (Parm, Fig. 3b and 3c)

A backward pass takes the same steps the other way round: the gradient of a split is an all-gather, and so on.
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
from megatron_balance.flow.chunks.chunking import in_chunks, split_evenly


class TokenStep(StrEnum):
    """What happens to a layer's tokens, or to their rows: one for each expert that a token chose."""

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


S = TokenStep

SCHEDULES: dict[str, tuple[TokenStep, ...]] = {
    "megatron": (S.GATE, S.EP_ALL_TO_ALL, S.ESP_ALL_GATHER, S.EXPERTS, S.ESP_REDUCE_SCATTER, S.EP_ALL_TO_ALL),
    "baseline": (
        *(S.GATE, S.ESP_ALL_GATHER, S.EP_ALL_TO_ALL, S.EXPERTS, S.ESP_ALL_REDUCE),
        *(S.EP_ALL_TO_ALL, S.ESP_SPLIT),
    ),
    "s1": (
        *(S.MP_SPLIT, S.GATE, S.DUMP, S.EP_ESP_ALL_TO_ALL, S.EXPERTS, S.EP_ESP_ALL_TO_ALL),
        *(S.LOCAL_COMBINE, S.MP_ALL_GATHER),
    ),
    "s2": (
        *(S.GATE, S.MP_SPLIT, S.DUMP, S.EP_ESP_ALL_TO_ALL, S.EXPERTS, S.EP_ESP_ALL_TO_ALL),
        *(S.MP_ALL_GATHER, S.LOCAL_COMBINE),
    ),
}
"""By the value of `--moe-parallel-schedule`."""


class Shape(NamedTuple):
    """Of a layer (Parm, Table I)."""

    tokens: int
    """B * L: of a rank's input."""

    hidden: int
    """M."""

    rows: int
    """E * T: that experts compute, from `tokens` tokens."""

    mp: int
    esp: int


def volumes(schedule: str, shape: Shape) -> list[tuple[TokenStep, int]]:
    """What every collective of a forward pass is given or gives, the larger of the two, in elements per rank.

    The part that stays on the rank is counted. With collectives as functions of these, the sums are Eq. 1 (baseline),
    Eq. 11 (s1), Eq. 7 (s2) and, without tensor parallelism, Eq. 2 of Parm.
    """
    tokens, rows = shape.tokens * shape.hidden, shape.rows * shape.hidden
    each = {
        TokenStep.EP_ALL_TO_ALL: rows * (shape.esp if schedule == "baseline" else 1),
        TokenStep.EP_ESP_ALL_TO_ALL: rows * shape.esp // shape.mp,
        TokenStep.ESP_ALL_GATHER: (tokens if schedule == "baseline" else rows) * shape.esp,
        TokenStep.ESP_REDUCE_SCATTER: rows * shape.esp,
        TokenStep.ESP_ALL_REDUCE: rows * shape.esp,
        TokenStep.MP_ALL_GATHER: tokens if schedule == "s1" else rows,
    }
    alone = {
        TokenStep.MP_ALL_GATHER: shape.mp,
        TokenStep.ESP_ALL_GATHER: shape.esp,
        TokenStep.ESP_REDUCE_SCATTER: shape.esp,
    }
    alone[TokenStep.ESP_ALL_REDUCE] = shape.esp
    return [(step, each[step]) for step in SCHEDULES[schedule] if step in each and alone.get(step, 2) > 1]


class ParallelDispatch:
    """What one schedule's steps are on this rank."""

    def __init__(
        self,
        steps: Sequence[TokenStep],
        groups: ProcessGroupCollection,
        sequence_parallel: bool,
        beside: dist.ProcessGroup | None = None,
    ) -> None:
        """
        Args:
            sequence_parallel: tokens of tensor-parallel ranks differ; otherwise they are the same.
            beside: the tensor-parallel ranks, for those who gather rows while others come (SAA); None: one after the
                other.
        """
        self.steps, self.groups = tuple(steps), groups
        self.copies = 1 if sequence_parallel else groups.tp.size()
        """Ranks that hold the same tokens."""
        self.simultaneous: Simultaneous | None = None
        if beside is not None and self.splits_rows:
            self.simultaneous = Simultaneous(groups.expt_tp.size(), beside, self.members)

    @property
    def splits_tokens(self) -> bool:
        """Whether each tensor-parallel rank routes a part of the tokens: gradients of its router are partial."""
        return self.copies > 1 and self._before(TokenStep.MP_SPLIT, TokenStep.GATE)

    @property
    def splits_rows(self) -> bool:
        """Whether each tensor-parallel rank sends a part of the rows of all tokens."""
        return self.copies > 1 and self._before(TokenStep.GATE, TokenStep.MP_SPLIT)

    @property
    def repeats(self) -> int:
        """How many times experts compute the same row."""
        return 1 if self.splits_tokens or self.splits_rows else self.copies

    @property
    def gathers_tokens(self) -> bool:
        """Whether all shards of a host send the rows of all their tokens."""
        return self.groups.expt_tp.size() > 1 and self._before(TokenStep.ESP_ALL_GATHER, TokenStep.EP_ALL_TO_ALL)

    @property
    def sources(self) -> dist.ProcessGroup:
        """The ranks that have tokens of their own to dispatch, in the order of the load matrix."""
        return self.groups.ep if self.gathers_tokens else self.groups.tp_ep

    @property
    def source(self) -> int:
        """This rank's row in the load matrix."""
        return self.sources.rank()

    @functools.cached_property
    def members(self) -> list[int]:
        """The rows of all ranks with these tokens, in the order in which they share them."""
        sources = dist.get_process_group_ranks(self.sources)
        return [sources.index(rank) for rank in dist.get_process_group_ranks(self.groups.tp)]

    @property
    def wire(self) -> dist.ProcessGroup:
        """The ranks among which rows are exchanged."""
        return self.groups.tp_ep if TokenStep.EP_ESP_ALL_TO_ALL in self.steps else self.groups.ep

    def sharding(self) -> Sharding:
        """How rows get to all shards of their experts, and back."""
        shards = self.groups.expt_tp
        if shards.size() == 1:
            return Unsharded()
        if TokenStep.DUMP in self.steps:
            return DirectAllToAll(shards.size())
        return AllReduce(shards) if self.gathers_tokens else AllGather(shards)

    def enter(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The tokens that this rank routes, of the layer's input [sequence, ...]."""
        if self.splits_tokens:
            return scatter_to_sequence_parallel_region(hidden_states, group=self.groups.tp)
        return hidden_states

    def leave(self, output: torch.Tensor) -> torch.Tensor:
        """The layer's output for all of its input, from that for `enter`."""
        if self.splits_tokens:
            return gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False, group=self.groups.tp)
        return output

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [N * T, ...]: that of all shards of the host, if tokens are gathered."""
        if self.gathers_tokens:
            return gather_from_sequence_parallel_region(
                tensor, tensor_parallel_output_grad=False, group=self.groups.expt_tp
            )
        return tensor

    def agree(self, logits: torch.Tensor) -> torch.Tensor:
        """The router logits from which all ranks that share rows decide: those of the first of these ranks.

        Copies of hidden states differ by rounding on a GPU. Ranks that chose different experts for a token would count,
        send and combine different rows. A rank's own logits get the gradient.
        """
        return _FirstMembers.apply(logits, self.groups.tp) if self.splits_rows else logits

    def shares(self, probs_TE: torch.Tensor, map_TE: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """By source, in the order of the ranks that have these tokens: what it sends of them, as (weights, choices)."""
        if not self.splits_rows:
            return {self.source: (probs_TE, map_TE)}
        members = self.members
        tokens_ME = split_evenly(map_TE.sum(0, keepdim=True), len(members))[:, 0]
        shared = zip(*(tensor.chunk(len(members), 1) for tensor in in_chunks(probs_TE, map_TE, tokens_ME)), strict=True)
        return dict(zip(members, shared, strict=True))

    def keep(self, output_TH: torch.Tensor) -> torch.Tensor:
        """The part of this shard's own tokens, as `gather` took them."""
        if self.gathers_tokens:
            return scatter_to_sequence_parallel_region(output_TH, group=self.groups.expt_tp)
        return output_TH

    def router_groups(self) -> ProcessGroupCollection:
        """What a router reduces its auxiliary losses over: ranks with other tokens, not those with the same."""
        if self.copies == 1 or self.splits_tokens:
            return self.groups
        chosen = ProcessGroupCollection(**vars(self.groups))
        chosen.tp_cp, chosen.tp_dp_cp = self.groups.cp, self.groups.dp_cp
        return chosen

    def alone(self, tensor: torch.Tensor) -> torch.Tensor:
        """What experts are given by each of `repeats` ranks: its gradient is that of one of them times all."""
        return tensor if self.repeats == 1 else _GradientTimes.apply(tensor, self.repeats)

    def together(self, output: torch.Tensor) -> torch.Tensor:
        """What experts returned to `alone`: they get their gradient from `repeats` ranks, a part from each."""
        return output if self.repeats == 1 else _GradientTimes.apply(output, 1 / self.repeats)

    def _before(self, one: TokenStep, other: TokenStep) -> bool:
        return {one, other} <= {*self.steps} and self.steps.index(one) < self.steps.index(other)


class _FirstMembers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _GradientTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None
