"""The experts of one rank: two projections with an activation between them, for all slots at once.

A slot holds one expert's weights. With expert tensor parallelism, it holds this rank's shard: a part of the inner width
(I in shapes), whose output is a term of the sum over shards. Home slots are the module's parameters. Guest slots hold
copies of other ranks' experts and collect the gradients of these copies.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedStateDict, ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_gpu
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_balance.device.shards import mark_experts, mark_shards
from megatron_balance.flow.grouped_gemm import GroupedGemm, TorchGemm, split_of
from megatron_balance.flow.slot_linear import SlotLinear
from megatron_balance.flow.slot_weights import GroupedWeights, LinearGradients, main_grad
from megatron_balance.profile.computation import recomputed


class GroupedExperts(MegatronModule):
    """Experts of one rank, given the logical expert in each home slot, and the implementation of products (default:
    torch). Initial weights for the same seed, and names and shapes in a checkpoint, equal those of megatron-core's
    SequentialMLP."""

    def __init__(
        self,
        home_experts: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        gemm: GroupedGemm | None = None,
    ) -> None:
        super().__init__(config)
        self.config: TransformerConfig
        shards = pg_collection.expt_tp
        assert shards.size() == 1 or not config.add_bias_linear, "each shard would add the second bias"
        assert config.moe_ffn_hidden_size is not None
        self.home_experts = tuple(home_experts)
        self.gemm = gemm or TorchGemm()
        self.repeats = False
        """See `Slots` in comm/trans_agg.py."""
        self._ahead: ForwardSlots | None = None
        self.shard, self.shards = shards.rank(), shards.size()
        self.replica = pg_collection.expt_dp.rank()
        num_local_experts = len(self.home_experts)
        self.activation_recompute = "moe_act" in recomputed(config)
        inner = config.moe_ffn_hidden_size // self.shards
        width = 2 * inner if config.gated_linear_unit else inner
        self.linear_fc1 = GroupedWeights(num_local_experts, config.hidden_size, width, config)
        self.linear_fc2 = GroupedWeights(num_local_experts, inner, config.hidden_size, config)
        if config.perform_initialization:
            self._initialize()
        # In other programs, nothing else makes these marks before DDP and the optimizer read them
        mark_experts(self, pg_collection)
        mark_shards(self, pg_collection)

    def _initialize(self) -> None:
        """Draw weights from the expert-parallel generator in megatron-core's order; biases stay zero."""
        first = self.linear_fc1
        second = self.linear_fc2
        for weight1, weight2 in zip(first.weight.data, second.weight.data, strict=True):
            _initialize_affine_weight_gpu(weight1, self.config.init_method, partition_dim=0, is_expert=True)
            _initialize_affine_weight_gpu(
                weight2, self.config.output_layer_init_method, partition_dim=1, is_expert=True
            )

    def forward(
        self,
        rows_RH: torch.Tensor,
        tokens_per_slot: torch.Tensor,
        probs_R: torch.Tensor,
        gradients: "ExpertGradients | None" = None,
    ) -> torch.Tensor:
        """Compute each row with its slot's expert, weighted by its combine probability: [R, H].

        Args:
            rows_RH: rows grouped by slot.
            tokens_per_slot: [S] home slots, then the guest slots in use: int64, in host memory or on a device, for
                which the host does not wait. `rows_RH` may have more rows, whose results are undefined.
            probs_R: [R] combine weights.
            gradients: collects the gradients of the weights; None: autograd gets them.
        """
        if gradients is not None:
            return self.compute(rows_RH, tokens_per_slot, probs_R, gradients)
        return _ExpertsFunction.apply(rows_RH, probs_R, tokens_per_slot, self, torch.is_grad_enabled(), *self.weights)

    @functools.cached_property
    def weights(self) -> tuple[torch.nn.Parameter, ...]:
        """All parameters, cached: `parameters()` walks through the modules every time."""
        return tuple(self.parameters())

    def gradients(self, slots: int) -> "ExpertGradients":
        """Return empty sums of weight gradients for `slots` slots in use."""
        return ExpertGradients(
            *(LinearGradients(linear, slots, self.gemm) for linear in (self.linear_fc1, self.linear_fc2))
        )

    def graph(
        self,
        rows_RH: torch.Tensor,
        tokens_per_slot: torch.Tensor,
        probs_R: torch.Tensor,
        gradients: "ExpertGradients",
        with_graph: bool,
        compute: Callable[..., torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, "ExpertGraph | None"]:
        """Do the same as `forward`; also return the autograd graph of this computation alone, if `with_graph`.
        `compute` replaces the call of this module, and thus skips its hooks."""
        with torch.set_grad_enabled(with_graph):
            rows_RH, probs_R = (tensor.detach().requires_grad_(with_graph) for tensor in (rows_RH, probs_R))
            output_RH = (compute or self)(rows_RH, tokens_per_slot, probs_R, gradients)
        graph = ExpertGraph(get_gradient_edge(output_RH), rows_RH, probs_R) if with_graph else None
        return output_RH.detach(), graph

    def compute(
        self,
        rows_RH: torch.Tensor,
        tokens_per_slot: torch.Tensor,
        probs_R: torch.Tensor,
        gradients: "ExpertGradients",
    ) -> torch.Tensor:
        """Do the same as `forward`, differentiable with respect to rows and combine weights only."""
        if self.config.moe_apply_probs_on_input:
            rows_RH = (probs_R.unsqueeze(-1) * rows_RH).to(rows_RH.dtype)
            probs_R = torch.ones_like(probs_R)
        guests = len(tokens_per_slot) - len(self.home_experts)
        first = SlotLinear(self.linear_fc1(guests, self.repeats), gradients.first)
        second = SlotLinear(self.linear_fc2(guests, self.repeats), gradients.second)
        split = split_of(tokens_per_slot, rows_RH.device)
        inner = first(rows_RH, split)
        if not self.activation_recompute:
            return second(self._activate(inner, probs_R), split, probs_R)
        # megatron-core accepts the precision, although its annotation says bool
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=self.config.fp8)  # pyright: ignore[reportArgumentType]
        activated = checkpoint.checkpoint(self._activate, inner, probs_R)
        output = second(activated, split, probs_R)
        checkpoint.discard_output_and_register_recompute(output)
        return output

    def _activate(self, inner: torch.Tensor, probs_R: torch.Tensor) -> torch.Tensor:
        """Apply the activation and the combine weight: [R, I or 2 I] -> [R, I]."""
        config = self.config
        if config.bias_activation_fusion and config.gated_linear_unit and config.activation_func is F.silu:
            return weighted_bias_swiglu_impl(inner, None, probs_R.unsqueeze(-1), config.activation_func_fp8_input_store)
        if config.gated_linear_unit:
            gate, linear = inner.chunk(2, dim=-1)
            if (limit := config.activation_func_clamp_value) is not None:
                gate = gate.clamp(max=limit)
                linear = linear.clamp(min=-limit, max=limit)
            # Adding zero would allocate a tensor that autograd keeps
            linear = linear + config.glu_linear_offset if config.glu_linear_offset else linear
            activated = config.activation_func(gate) * linear
        else:
            activated = config.activation_func(inner)
        return (activated * probs_R.unsqueeze(-1)).to(activated.dtype)

    def allocate_guests(self, slots: int, shared: "GroupedExperts | None" = None, apart: bool = False) -> int:
        """See `GroupedWeights.allocate_guests`; `shared` is another layer, whose latest guest slots are used."""
        self._ahead = ForwardSlots(self) if apart else None
        first = self.linear_fc1.allocate_guests(slots, shared and shared.linear_fc1, apart)
        return first + self.linear_fc2.allocate_guests(slots, shared and shared.linear_fc2, apart)

    @property
    def forward_slots(self) -> "GroupedExperts | ForwardSlots":
        """The slots whose weights forward passes compute with."""
        return self._ahead or self

    def own(self, home_experts: Sequence[int]) -> None:
        """Set the logical experts in the home slots; checkpoints store weights by logical expert."""
        assert len(home_experts) == len(self.home_experts)
        self.home_experts = tuple(home_experts)

    def ready(self) -> None:
        """Let DDP finish this layer's weights, on the model's thread; see `GroupedWeights.forward`."""
        self.linear_fc1()
        self.linear_fc2()

    def weights_of(self, slot: int, forward: bool = False) -> list[torch.Tensor]:
        """Return views of all weights in one slot: home slots come first, guest slots after them. See `ready`, and
        `GroupedWeights.tensors_of` for `forward`."""
        return [tensor.detach()[index] for tensor, index in self._tensors(slot, forward)]

    def gradients_of(self, slot: int) -> list[torch.Tensor]:
        """Return views of the gradients that a slot has collected before any reduction, ordered as in `weights_of`."""
        return [main_grad(tensor)[index] for tensor, index in self._tensors(slot)]

    def _tensors(self, slot: int, forward: bool = False) -> list[tuple[torch.Tensor, int]]:
        return [*self.linear_fc1.tensors_of(slot, forward), *self.linear_fc2.tensors_of(slot, forward)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return every parameter as pieces of each slot and shard, placed by logical expert. So a checkpoint holds
        `experts.linear_fc1.weight` [..., E, O, I], independent of owners and of the number of shards."""
        parts = 2 if self.config.gated_linear_unit else 1
        # fc1 holds the gate, then the linear part; each is cut into shards
        cuts = {
            "linear_fc1": ShardCut(0, self.shard, self.shards, parts),
            "linear_fc2": ShardCut(1, self.shard, self.shards, 1),
        }
        assert self.config.num_moe_experts is not None
        # megatron-core accepts lists of pieces, although its annotations do not
        return {
            f"{prefix}{name}": ShardedTensorFactory(
                f"{prefix}experts.{name}",
                parameter,
                functools.partial(  # pyright: ignore[reportArgumentType]
                    _pieces_by_expert,
                    self.home_experts,
                    self.config.num_moe_experts,
                    cuts[name.split(".")[0]],
                    sharded_offsets,
                ),
                functools.partial(_slots, len(self.home_experts)),  # pyright: ignore[reportArgumentType]
                (0, 0, self.replica),
            )
            for name, parameter in self.named_parameters()
        }


@dataclass(frozen=True, eq=False)
class ForwardSlots:
    """The slots that forward passes compute with, if their guest slots are not those of backward passes."""

    experts: GroupedExperts

    def ready(self) -> None:
        self.experts.ready()

    def weights_of(self, slot: int) -> list[torch.Tensor]:
        return self.experts.weights_of(slot, forward=True)


class ShardCut(NamedTuple):
    """How one expert's tensor is cut into shards."""

    axis: int
    shard: int
    shards: int
    parts: int
    """Number of equal parts along the axis; each part is cut into shards."""


def _pieces_by_expert(
    experts: Sequence[int],
    num_experts: int,
    cut: ShardCut,
    sharded_offsets: tuple,
    key: str,
    tensor_S: torch.Tensor,
    replica_id: ReplicaId,
    flattened_range: slice | None,
) -> list[ShardedTensor]:
    """Return the pieces of each slot of a parameter, or of its optimizer state, [S, ...]."""
    assert flattened_range is None, "optimizer state is saved in the parameters' shapes"
    axis = len(sharded_offsets)
    pieces: list[tuple[torch.Tensor, tuple[Any, ...]]]
    if cut.shards == 1:
        pieces = [(tensor, ()) for tensor in tensor_S.unbind()]
    else:
        place = [(cut.shard + part * cut.shards, cut.shards * cut.parts) for part in range(cut.parts)]
        pieces = [
            (piece, ((axis + 1 + cut.axis, *at),))
            for tensor in tensor_S.unbind()
            for piece, at in zip(tensor.chunk(cut.parts, cut.axis), place, strict=True)
        ]
    return [
        ShardedTensor.from_rank_offsets(
            key,
            piece,
            *sharded_offsets,
            (axis, experts[number * len(experts) // len(pieces)], num_experts),
            *offsets,
            replica_id=replica_id,
            prepend_axis_num=axis + 1,
        )
        for number, (piece, offsets) in enumerate(pieces)
    ]


def _slots(slots: int, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the pieces of `_pieces_by_expert`: concatenate each slot's pieces, stack slots: [S, ...]."""
    each = len(pieces) // slots
    return torch.stack([torch.cat([*pieces[first : first + each]]) for first in range(0, len(pieces), each)])


class ExpertGradients(NamedTuple):
    """Weight gradients of one rank's experts, over the chunks of one backward pass."""

    first: LinearGradients
    second: LinearGradients

    def finish(self) -> list[torch.Tensor | None]:
        """Compute the gradients; return autograd's gradient of each parameter of the experts."""
        return [*self.first.finish(), *self.second.finish()]


class ExpertGraph(NamedTuple):
    """Ends of the experts' autograd graph: gradients enter at `output` and leave at `rows_RH` and `probs_R`."""

    output: GradientEdge
    rows_RH: torch.Tensor
    probs_R: torch.Tensor

    def backward(self, gradient_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of the rows and of the combine weights, given the gradient of the output."""
        # megatron-core's recomputation refuses autograd.grad
        torch.autograd.backward([self.output], [gradient_RH])
        assert self.rows_RH.grad is not None and self.probs_R.grad is not None
        return self.rows_RH.grad, self.probs_R.grad


class _ExpertsFunction(torch.autograd.Function):
    """The experts as one operation of autograd, with one gradient for each weight."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RH: torch.Tensor,
        probs_R: torch.Tensor,
        tokens_per_slot: torch.Tensor,
        experts: GroupedExperts,
        with_graph: bool,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.gradients = experts.gradients(len(tokens_per_slot))
        output_RH, ctx.graph = experts.graph(
            rows_RH, tokens_per_slot, probs_R, ctx.gradients, with_graph, experts.compute
        )
        return output_RH

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        graph = ctx.graph
        ctx.graph = None
        return *graph.backward(gradients[0]), None, None, None, *ctx.gradients.finish()
