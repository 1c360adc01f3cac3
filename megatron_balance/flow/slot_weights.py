"""The weights of one linear layer in a rank's slots: parameters in home slots, copies in guest slots."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.flow.grouped_gemm import grouped_linear
from megatron_balance.flow.slot_bias import add_slot_bias

StandIns = Mapping[torch.Tensor, torch.Tensor]
"""Each weight of the experts -> a leaf that shares its values and collects a separate gradient."""


@dataclass(frozen=True, eq=False)
class Projection:
    """Weights of one linear layer for some slots: `weight` [S, O, I] and `bias` [S, O] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(
        self, rows_RI: torch.Tensor, tokens_per_slot: torch.Tensor, scale_R: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply rows by their slot's weight and add its bias, times `scale_R` [R] if given: [R, I] -> [R, O]."""
        rows = grouped_linear(rows_RI, self.weight, tokens_per_slot)
        return rows if self.bias is None else add_slot_bias(rows, self.bias, tokens_per_slot.tolist(), scale_R)

    def first(self, slots: int) -> "Projection":
        """Return the first `slots` slots."""
        return Projection(self.weight[:slots], None if self.bias is None else self.bias[:slots])

    def replaced(self, stand_ins: StandIns) -> "Projection":
        """Return the projection with its tensors replaced by their stand-ins."""
        return Projection(stand_ins[self.weight], None if self.bias is None else stand_ins[self.bias])

    def by_slot(self) -> list["Projection"]:
        """Return one projection per slot."""
        weights = self.weight.split(1)
        biases = [None] * len(weights) if self.bias is None else self.bias.split(1)
        return [Projection(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def tensors(self) -> list[torch.Tensor]:
        """Return the weight and, if there is one, the bias."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class GroupedWeights(torch.nn.Module):
    """One linear layer in all slots of a rank; `weight` [S, O, I] and `bias` [S, O] or None are the home slots."""

    bias: torch.nn.Parameter | None

    def __init__(self, slots: int, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        new = functools.partial(torch.zeros, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(new(slots, outputs, inputs))
        self.register_parameter("bias", torch.nn.Parameter(new(slots, outputs)) if config.add_bias_linear else None)
        same_shards = config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        for parameter in self.parameters():
            # DDP and the optimizer group parameters by this mark: whether it is replicated like non-expert parameters
            parameter.allreduce = config.expert_model_parallel_size == 1 and same_shards  # pyright: ignore[reportAttributeAccessIssue]
        self.guests: Projection | None = None
        """Guest slots [G, ...]: plain tensors, which the optimizer, checkpoints and casts of the module ignore."""

    def allocate_guests(self, slots: int) -> int:
        """Allocate guest slots, after DDP has given the parameters their `main_grad`; return their bytes."""
        bias = None if self.bias is None else _guest_like(self.bias, slots)
        self.guests = Projection(_guest_like(self.weight, slots), bias)
        return sum(guest.nbytes + main_grad(guest).nbytes for guest in self.guests.tensors())

    def forward(self, guests: int = 0, by_slot: bool = False, stand_ins: StandIns | None = None) -> list[Projection]:
        """Return the weights to compute with: home slots and the first `guests` guest slots, or each slot alone.

        This is a forward pass because DDP's `--overlap-param-gather` waits for a module's parameters before it.
        """
        together = [self.home()]
        if guests:
            assert self.guests is not None, "guests need room: allocate_guests"
            together.append(self.guests)
        if stand_ins is not None:
            together = [projection.replaced(stand_ins) for projection in together]
        if 0 < guests < len(together[-1].weight):  # The gradient of a slice is a copy
            together[1] = together[1].first(guests)
        return [slot for part in together for slot in part.by_slot()] if by_slot else together

    def home(self) -> Projection:
        """Return the parameters of the home slots."""
        return Projection(self.weight, self.bias)


def main_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a weight's gradients over microbatches: DDP's for a parameter, or a guest slot's own."""
    return tensor.main_grad  # pyright: ignore[reportAttributeAccessIssue]


def _guest_like(parameter: torch.nn.Parameter, slots: int) -> torch.Tensor:
    """Return a leaf [G, ...] whose gradients are summed in `main_grad` over microbatches, as DDP does."""
    shape = (slots, *parameter.shape[1:])
    guest = parameter.new_zeros(shape).requires_grad_()
    guest.main_grad = main_grad(parameter).new_zeros(shape)  # pyright: ignore[reportAttributeAccessIssue]
    guest.register_post_accumulate_grad_hook(_accumulate)
    return guest


def _accumulate(guest: torch.Tensor) -> None:
    assert guest.grad is not None
    main_grad(guest).add_(guest.grad)
    guest.grad = None
