"""The experts of one rank: two projections with an activation between them, for all slots at once.

A slot holds one expert's weights, or this rank's shard of them (expert tensor parallelism): a part of the inner width,
whose output is a term of the sum over shards. Home slots are the module's parameters. Guest slots hold copies of other
ranks' experts, and collect the gradients that those copies get here.

In shapes, F is the shard's inner width (2F for gated units before the activation).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_gpu
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.flow.expert_shards import Cut, by_expert
from megatron_balance.flow.slot_weights import GroupedWeights, Projection, StandIns, main_grad


def recomputes(config: TransformerConfig, module: str) -> bool:
    """Return whether `--recompute-modules` names a module."""
    return config.recompute_granularity == "selective" and module in (config.recompute_modules or [])


class GroupedExperts(MegatronModule):
    """Experts of one rank.

    The initial weights equal those of megatron-core's SequentialMLP for the same seed, and so do the names and shapes
    in a checkpoint.

    Args:
        home_experts: the logical expert in each home slot.
    """

    def __init__(
        self, home_experts: Sequence[int], config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config)
        self.config: TransformerConfig
        shards = pg_collection.expt_tp
        assert shards.size() == 1 or not config.add_bias_linear, "each shard would add the second bias"
        assert config.moe_ffn_hidden_size is not None
        self.home_experts = tuple(home_experts)
        self.shard, self.shards = shards.rank(), shards.size()
        self.replica = pg_collection.expt_dp.rank()
        num_local_experts = len(self.home_experts)
        self.activation_recompute = recomputes(config, "moe_act")
        inner = config.moe_ffn_hidden_size // self.shards
        width = 2 * inner if config.gated_linear_unit else inner
        self.linear_fc1 = GroupedWeights(num_local_experts, config.hidden_size, width, config)
        self.linear_fc2 = GroupedWeights(num_local_experts, inner, config.hidden_size, config)
        if config.perform_initialization:
            self._initialize()

    def _initialize(self) -> None:
        """Draw weights from the expert-parallel generator, by expert in megatron-core's order; biases stay zero."""
        first, second = self.linear_fc1, self.linear_fc2
        for weight1, weight2 in zip(first.weight.data, second.weight.data, strict=True):
            _initialize_affine_weight_gpu(weight1, self.config.init_method, partition_dim=0, is_expert=True)
            _initialize_affine_weight_gpu(
                weight2, self.config.output_layer_init_method, partition_dim=1, is_expert=True
            )
        stride = 2 if self.config.gated_linear_unit else 1
        for parameter, dimension, step in ((first.weight, 1, stride), (first.bias, 1, stride), (second.weight, 2, 1)):
            if parameter is not None:
                # Without this mark, gradient norms would count only tensor-parallel rank 0's experts
                tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dimension, step)

    def forward(
        self,
        rows_RH: torch.Tensor,
        tokens_per_slot: torch.Tensor,
        probs_R: torch.Tensor,
        stand_ins: StandIns | None = None,
    ) -> torch.Tensor:
        """Compute each row with its slot's expert, weighted by its combine probability: [R, H].

        Args:
            rows_RH: rows grouped by slot.
            tokens_per_slot: [S] int64 on the host: home slots, then the guest slots in use.
            probs_R: [R] combine weights.
            stand_ins: leaves to compute with in place of all `tensors`.
        """
        if self.config.moe_apply_probs_on_input:
            rows_RH = (probs_R.unsqueeze(-1) * rows_RH).to(rows_RH.dtype)
            probs_R = torch.ones_like(probs_R)
        # A CPU gains nothing from grouping, and slot by slot, the tensors between the projections stay in its caches
        return self._all_slots(rows_RH, tokens_per_slot, probs_R, not rows_RH.is_cuda, stand_ins)

    def _all_slots(
        self,
        rows_RH: torch.Tensor,
        tokens_per_slot: torch.Tensor,
        probs_R: torch.Tensor,
        by_slot: bool,
        stand_ins: StandIns | None = None,
    ) -> torch.Tensor:
        guests = len(tokens_per_slot) - len(self.home_experts)
        first, second = (linear(guests, by_slot, stand_ins) for linear in (self.linear_fc1, self.linear_fc2))
        if len(first) == 1:
            return self._compute(first[0], second[0], rows_RH, tokens_per_slot, probs_R)
        tokens = tokens_per_slot.split([len(projection.weight) for projection in first])
        sizes = [int(part.sum()) for part in tokens]
        parts = zip(first, second, rows_RH.split(sizes), tokens, probs_R.split(sizes), strict=True)
        return torch.cat([self._compute(*part) for part in parts])

    def _compute(
        self,
        first: Projection,
        second: Projection,
        rows_RH: torch.Tensor,
        tokens_per_slot: torch.Tensor,
        probs_R: torch.Tensor,
    ) -> torch.Tensor:
        inner = first(rows_RH, tokens_per_slot)
        if not self.activation_recompute:
            return second(self._activate(inner, probs_R), tokens_per_slot, probs_R)
        # megatron-core takes the precision, although its annotation says bool
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=self.config.fp8)  # pyright: ignore[reportArgumentType]
        activated = checkpoint.checkpoint(self._activate, inner, probs_R)
        output = second(activated, tokens_per_slot, probs_R)
        checkpoint.discard_output_and_register_recompute(output)
        return output

    def _activate(self, inner: torch.Tensor, probs_R: torch.Tensor) -> torch.Tensor:
        """Apply the activation and the combine weight: [R, F or 2F] -> [R, F]."""
        config = self.config
        if config.bias_activation_fusion and config.gated_linear_unit and config.activation_func is F.silu:
            return weighted_bias_swiglu_impl(inner, None, probs_R.unsqueeze(-1), config.activation_func_fp8_input_store)
        if config.gated_linear_unit:
            gate, linear = inner.chunk(2, dim=-1)
            if (limit := config.activation_func_clamp_value) is not None:
                gate, linear = gate.clamp(max=limit), linear.clamp(min=-limit, max=limit)
            activated = config.activation_func(gate) * (linear + config.glu_linear_offset)
        else:
            activated = config.activation_func(inner)
        return (activated * probs_R.unsqueeze(-1)).to(activated.dtype)

    def allocate_guests(self, slots: int) -> int:
        """Allocate guest slots, after DDP has wrapped the model; return their bytes."""
        return self.linear_fc1.allocate_guests(slots) + self.linear_fc2.allocate_guests(slots)

    def own(self, home_experts: Sequence[int]) -> None:
        """Set the logical experts in the home slots, under which a checkpoint stores their weights."""
        assert len(home_experts) == len(self.home_experts)
        self.home_experts = tuple(home_experts)

    def ready(self) -> None:
        """Wait on the model's thread until this layer's weights are up to date; see `GroupedWeights.forward`."""
        self.linear_fc1()
        self.linear_fc2()

    def tensors(self, slots: int) -> list[torch.Tensor]:
        """Return the leaves that get gradients while `slots` slots are in use."""
        found: list[torch.Tensor] = list(self.parameters())
        if slots > len(self.home_experts):
            for linear in (self.linear_fc1, self.linear_fc2):
                found += _guests(linear).tensors()
        return found

    def weights_of(self, slot: int) -> list[torch.Tensor]:
        """Return views of all weights in one slot: home slots come first, guest slots after them. See `ready`."""
        return [tensor.detach()[index] for tensor, index in self._tensors(slot)]

    def gradients_of(self, slot: int) -> list[torch.Tensor]:
        """Return views of the gradients that a slot has collected before any reduction, ordered as in `weights_of`."""
        return [main_grad(tensor)[index] for tensor, index in self._tensors(slot)]

    def _tensors(self, slot: int) -> list[tuple[torch.Tensor, int]]:
        home, tensors = len(self.home_experts), []
        for linear in (self.linear_fc1, self.linear_fc2):
            projection, index = (linear.home(), slot) if slot < home else (_guests(linear), slot - home)
            tensors += [(tensor, index) for tensor in projection.tensors()]
        return tensors

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return every parameter as pieces of each slot, placed by logical expert; see flow/expert_shards.py."""
        parts = 2 if self.config.gated_linear_unit else 1
        # Gate and linear part follow each other, each cut into shards
        cuts = {
            "linear_fc1": Cut(0, self.shard, self.shards, parts),
            "linear_fc2": Cut(1, self.shard, self.shards, 1),
        }
        assert self.config.num_moe_experts is not None
        return {
            f"{prefix}{name}": by_expert(
                f"{prefix}experts.{name}",
                parameter,
                experts=self.home_experts,
                num_experts=self.config.num_moe_experts,
                cut=cuts[name.split(".")[0]],
                offsets=sharded_offsets,
                replica=self.replica,
            )
            for name, parameter in self.named_parameters()
        }


def _guests(linear: GroupedWeights) -> Projection:
    assert linear.guests is not None, "guests need room: allocate_guests"
    return linear.guests
