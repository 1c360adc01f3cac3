"""The experts of one rank: one grouped GEMM per projection, whatever the device.

A slot holds one expert's weights, or this rank's shard of them (expert tensor parallelism): a part of the inner width,
whose output is a term of the sum over shards. Home slots are the module's parameters; guest slots hold copies of other
ranks' experts, which come and go, and collect the gradients that those get here.

Shape suffixes: S slots (of this rank), G guest slots, R rows (tokens, grouped by slot), H hidden, F the shard's inner
width (2F for gated units before the activation).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_gpu
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16)
GROUPED_MM_ALIGNMENT = 16
"""Bytes; `grouped_mm` wants strides that are multiples of it."""


def grouped_linear(rows_RI: torch.Tensor, weight_SOI: torch.Tensor, tokens_per_slot: torch.Tensor) -> torch.Tensor:
    """Rows of slot s times weight_SOI[s].T, for all slots: [R, I] x [S, O, I] -> [R, O].

    `tokens_per_slot` [S] int64 on the host says how many consecutive rows belong to each slot (zero is fine).
    Float64 and widths that `torch.nn.functional.grouped_mm` refuses take one matrix product per slot.
    """
    if _grouped_mm_accepts(weight_SOI):
        offsets = tokens_per_slot.cumsum(0).to(device=rows_RI.device, dtype=torch.int32, non_blocking=True)
        output = F.grouped_mm(rows_RI.contiguous(), weight_SOI.transpose(-1, -2), offs=offsets)
        if output.requires_grad:
            # Its backward refuses the expanded gradient that a plain sum() sends
            output.register_hook(torch.Tensor.contiguous)
        return output
    chunks = rows_RI.split(tokens_per_slot.tolist())
    return torch.cat([F.linear(chunk, weight) for chunk, weight in zip(chunks, weight_SOI.unbind(), strict=True)])


def _grouped_mm_accepts(weight_SOI: torch.Tensor) -> bool:
    widths = weight_SOI.shape[1:]
    aligned = all(width * weight_SOI.element_size() % GROUPED_MM_ALIGNMENT == 0 for width in widths)
    return weight_SOI.dtype in GROUPED_MM_DTYPES and aligned


StandIns = Mapping[torch.Tensor, torch.Tensor]
"""For each of the tensors that experts compute with, the one to take instead: the same numbers, gradients apart."""


@dataclass(frozen=True, eq=False)
class Projection:
    """Weights of one linear layer for some slots: `weight` [S, O, I] and `bias` [S, O] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(
        self, rows_RI: torch.Tensor, tokens_per_slot: torch.Tensor, scale_R: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[R, I] -> [R, O]; the bias is multiplied by `scale_R` [R] if given."""
        rows = grouped_linear(rows_RI, self.weight, tokens_per_slot)
        return rows if self.bias is None else _AddSlotBias.apply(rows, self.bias, tokens_per_slot.tolist(), scale_R)

    def first(self, slots: int) -> "Projection":
        """The first slots alone."""
        return Projection(self.weight[:slots], None if self.bias is None else self.bias[:slots])

    def replaced(self, stand_ins: StandIns) -> "Projection":
        """With what stands for its tensors."""
        return Projection(stand_ins[self.weight], None if self.bias is None else stand_ins[self.bias])

    def by_slot(self) -> list["Projection"]:
        """Each slot alone."""
        weights = self.weight.split(1)
        biases = [None] * len(weights) if self.bias is None else self.bias.split(1)
        return [Projection(weight, bias) for weight, bias in zip(weights, biases, strict=True)]


class GroupedWeights(torch.nn.Module):
    """Parameters of one linear layer per slot: `weight` [S, O, I] and, if asked for, `bias` [S, O]."""

    def __init__(self, slots: int, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        new = functools.partial(torch.zeros, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(new(slots, outputs, inputs))
        self.register_parameter("bias", torch.nn.Parameter(new(slots, outputs)) if config.add_bias_linear else None)
        as_all_else = config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        for parameter in self.parameters():
            # DDP and the optimizer keep parameters apart by this mark that not the same ranks have as all others
            parameter.allreduce = config.expert_model_parallel_size == 1 and as_all_else
        self.guests: Projection | None = None
        """Guest slots [G, ...]. Plain tensors: no optimizer, checkpoint or cast of the module knows of them."""

    def allocate_guests(self, slots: int) -> int:
        """Make room for other ranks' experts once DDP has given the parameters their `main_grad`; returns bytes."""
        bias = None if self.bias is None else _guest_like(self.bias, slots)
        self.guests = Projection(_guest_like(self.weight, slots), bias)
        guests = [self.guests.weight] if bias is None else [self.guests.weight, bias]
        return sum(guest.nbytes + guest.main_grad.nbytes for guest in guests)

    def forward(self, guests: int = 0, by_slot: bool = False, stand_ins: StandIns | None = None) -> list[Projection]:
        """The weights to compute with: home slots and the first `guests` guest slots, or each slot alone.

        A call of the module, because DDP's `--overlap-param-gather` waits for a module's parameters before its call.
        """
        together = [Projection(self.weight, self.bias)]
        if guests:
            assert self.guests is not None, "guests need room: allocate_guests"
            together.append(self.guests)
        if stand_ins is not None:
            together = [projection.replaced(stand_ins) for projection in together]
        if 0 < guests < len(together[-1].weight):  # The gradient of a slice is a copy
            together[1] = together[1].first(guests)
        return [slot for part in together for slot in part.by_slot()] if by_slot else together


def _guest_like(parameter: torch.nn.Parameter, slots: int) -> torch.Tensor:
    """A leaf [G, ...] whose gradients add up in its `main_grad` over microbatches, as DDP does it for parameters."""
    shape = (slots, *parameter.shape[1:])
    guest = parameter.new_zeros(shape).requires_grad_()
    guest.main_grad = parameter.main_grad.new_zeros(shape)
    guest.register_post_accumulate_grad_hook(_accumulate)
    return guest


def _accumulate(guest: torch.Tensor) -> None:
    guest.main_grad.add_(guest.grad)
    guest.grad = None


class _AddSlotBias(torch.autograd.Function):
    """Adds each slot's bias to its rows in place, times `scale_R` if given.

    A gathered bias per row would be as large as the rows, and its gradient a scatter; this needs neither.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_RO: torch.Tensor, bias_SO: torch.Tensor, sizes: list[int], scale_R: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.sizes, ctx.has_scale = sizes, scale_R is not None
        ctx.save_for_backward(*((bias_SO, scale_R) if scale_R is not None else ()))
        for slot, (rows, bias) in enumerate(zip(rows_RO.split(sizes), bias_SO, strict=True)):
            if scale_R is None:
                rows.add_(bias)
            else:
                scale = scale_R.split(sizes)[slot].unsqueeze(-1)
                rows.add_((bias * scale).to(rows.dtype))
        ctx.mark_dirty(rows_RO)
        return rows_RO

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, torch.Tensor | None]:
        chunks = gradient.split(ctx.sizes)
        if not ctx.has_scale:
            return gradient, torch.stack([chunk.sum(0) for chunk in chunks]), None, None
        bias_SO, scale_R = ctx.saved_tensors
        scales = scale_R.split(ctx.sizes)
        weighted = [(chunk * scale.unsqueeze(-1)).sum(0) for chunk, scale in zip(chunks, scales, strict=True)]
        to_scale = [(chunk * bias).sum(-1) for chunk, bias in zip(chunks, bias_SO, strict=True)]
        return gradient, torch.stack(weighted).to(bias_SO.dtype), None, torch.cat(to_scale).to(scale_R.dtype)


class GroupedExperts(MegatronModule):
    """Experts of one rank: two projections with an activation between, for every slot at once.

    The initial weights equal those of megatron-core's SequentialMLP for the same seed, and so do the names and shapes
    in a checkpoint.

    Args:
        home_experts: the logical expert in each slot.
    """

    def __init__(
        self, home_experts: Sequence[int], config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config)
        shards = pg_collection.expt_tp
        assert shards.size() == 1 or not config.add_bias_linear, "each shard would add the second bias"
        self.home_experts = tuple(home_experts)
        self.shard, self.shards = shards.rank(), shards.size()
        self.replica = pg_collection.expt_dp.rank()
        num_local_experts = len(self.home_experts)
        recompute = config.recompute_modules if config.recompute_granularity == "selective" else []
        self.activation_recompute = "moe_act" in recompute
        inner = config.moe_ffn_hidden_size // self.shards
        width = 2 * inner if config.gated_linear_unit else inner
        self.linear_fc1 = GroupedWeights(num_local_experts, config.hidden_size, width, config)
        self.linear_fc2 = GroupedWeights(num_local_experts, inner, config.hidden_size, config)
        if config.perform_initialization:
            self._initialize()

    def _initialize(self) -> None:
        """Draw from the expert-parallel generator expert by expert, in megatron-core's order; biases stay zero."""
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
        """Every row through its slot's expert, weighted by its combine probability: [R, H].

        Args:
            rows_RH: rows grouped by slot.
            tokens_per_slot: [S] int64 on the host: home slots, then as many guest slots as are in use.
            probs_R: [R] combine weights.
            stand_ins: for all of `tensors`.
        """
        if self.config.moe_apply_probs_on_input:
            rows_RH = (probs_R.unsqueeze(-1) * rows_RH).to(rows_RH.dtype)
            probs_R = torch.ones_like(probs_R)
        # A CPU gains nothing from grouping; slot by slot, the tensors between the projections stay in its caches
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
            return self._compute(*first, *second, rows_RH, tokens_per_slot, probs_R)
        tokens = tokens_per_slot.split([len(projection.weight) for projection in first])
        sizes = [int(part.sum()) for part in tokens]
        parts = zip(first, second, rows_RH.split(sizes), tokens, probs_R.split(sizes), strict=True)
        return torch.cat([self._compute(*part) for part in parts])

    def allocate_guests(self, slots: int) -> int:
        """Make room for other ranks' experts, once DDP has wrapped the model; returns bytes."""
        return self.linear_fc1.allocate_guests(slots) + self.linear_fc2.allocate_guests(slots)

    def own(self, home_experts: Sequence[int]) -> None:
        """Call the home slots' contents by these logical experts: what a checkpoint stores them as."""
        assert len(home_experts) == len(self.home_experts)
        self.home_experts = tuple(home_experts)

    def tensors(self, slots: int) -> list[torch.Tensor]:
        """The leaves that get gradients where so many slots are in use."""
        found: list[torch.Tensor | None] = list(self.parameters())
        if slots > len(self.home_experts):
            for linear in (self.linear_fc1, self.linear_fc2):
                found += [linear.guests.weight, linear.guests.bias]
        return [tensor for tensor in found if tensor is not None]

    def ready(self) -> None:
        """Wait until this layer's weights are there, see GroupedWeights.forward; on the thread that runs the model."""
        self.linear_fc1(), self.linear_fc2()

    def weights_of(self, slot: int) -> list[torch.Tensor]:
        """Views of all weights in one slot: home slots come first, guest slots after them. See `ready`."""
        return [tensor.detach()[index] for tensor, index in self._tensors(slot)]

    def gradients_of(self, slot: int) -> list[torch.Tensor]:
        """Views of the gradients that one slot has collected, before any reduction, as in `weights_of`."""
        return [tensor.main_grad[index] for tensor, index in self._tensors(slot)]

    def _tensors(self, slot: int) -> list[tuple[torch.Tensor, int]]:
        home, tensors = len(self.home_experts), []
        for linear in (self.linear_fc1, self.linear_fc2):
            owned = Projection(linear.weight, linear.bias)
            projection, index = (owned, slot) if slot < home else (linear.guests, slot - home)
            tensors += [(tensor, index) for tensor in (projection.weight, projection.bias) if tensor is not None]
        return tensors

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
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=self.config.fp8)
        activated = checkpoint.checkpoint(self._activate, inner, probs_R)
        output = second(activated, tokens_per_slot, probs_R)
        checkpoint.discard_output_and_register_recompute(output)
        return output

    def _activate(self, inner: torch.Tensor, probs_R: torch.Tensor) -> torch.Tensor:
        """Activation and combine weight: [R, F or 2F] -> [R, F]."""
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

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Every parameter as pieces of each slot, placed by its logical expert along an axis of all experts.

        A checkpoint holds `experts.linear_fc1.weight` [..., E, O, I]: it knows neither which rank owned an expert nor
        in how many shards it was.
        """
        parts = 2 if self.config.gated_linear_unit else 1
        return {
            f"{prefix}{name}": ShardedTensorFactory(
                f"{prefix}experts.{name}",
                parameter,
                functools.partial(
                    _pieces_by_expert,
                    self.home_experts,
                    self.config.num_moe_experts,
                    # Gate and linear part lie one after the other, each cut into shards
                    _Cut(0, self.shard, self.shards, parts) if "fc1" in name else _Cut(1, self.shard, self.shards, 1),
                    sharded_offsets,
                ),
                functools.partial(_slots, len(self.home_experts)),
                (0, 0, self.replica),
            )
            for name, parameter in self.named_parameters()
        }


class _Cut(NamedTuple):
    """How one expert's tensor is cut into shards."""

    axis: int
    shard: int
    shards: int
    parts: int
    """Equal parts along the axis, of which each shard has its piece."""


def _pieces_by_expert(
    experts: Sequence[int],
    num_experts: int,
    cut: _Cut,
    sharded_offsets: tuple,
    key: str,
    tensor_S: torch.Tensor,
    replica_id: tuple[int, ...],
    flattened_range: None,
) -> list[ShardedTensor]:
    """The pieces of each slot of a parameter, or of its optimizer state, [S, ...]."""
    assert flattened_range is None, "optimizer state is saved in the parameters' shapes"
    axis = len(sharded_offsets)
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
    """[S, ...] of what `_pieces_by_expert` made; those of a slot follow each other along its first axis."""
    each = len(pieces) // slots
    return torch.stack([torch.cat([*pieces[first : first + each]]) for first in range(0, len(pieces), each)])
