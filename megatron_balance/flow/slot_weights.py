"""The weights of one linear layer in a rank's slots: parameters in home slots, copies in guest slots."""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, eq=False)
class Projection:
    """Weights of one linear layer for some slots: `weight` [S, O, I] and `bias` [S, O] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def first(self, slots: int) -> "Projection":
        """Return the first `slots` slots."""
        return Projection(self.weight[:slots], None if self.bias is None else self.bias[:slots])

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

    def forward(self, guests: int = 0) -> list[Projection]:
        """Return the weights to compute with: home slots, and the first `guests` guest slots if there are any.

        This is a forward pass because DDP's `--overlap-param-gather` waits for a module's parameters before it.
        """
        if not guests:
            return [self.home()]
        assert self.guests is not None, "guests need room: allocate_guests"
        return [self.home(), self.guests.first(guests)]

    def home(self) -> Projection:
        """Return the parameters of the home slots."""
        return Projection(self.weight, self.bias)

    def find(self, slot: int) -> tuple[Projection, int]:
        """Return the slots, home or guest, to which a slot belongs, and its index in them."""
        home = len(self.weight)
        if slot < home:
            return self.home(), slot
        assert self.guests is not None, "guests need room: allocate_guests"
        return self.guests, slot - home


def main_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a weight's gradients over microbatches: DDP's for a parameter, or a guest slot's own."""
    return tensor.main_grad  # pyright: ignore[reportAttributeAccessIssue]


def slots_of(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensor of each slot, given tensors [S_i, ...] of consecutive slots."""
    for part in parts:
        yield from part.unbind()


def _guest_like(parameter: torch.nn.Parameter, slots: int) -> torch.Tensor:
    """Return guest slots [G, ...] whose gradients are summed in `main_grad` over microbatches, as DDP does."""
    shape = (slots, *parameter.shape[1:])
    guest = parameter.detach().new_zeros(shape)
    guest.main_grad = main_grad(parameter).new_zeros(shape)  # pyright: ignore[reportAttributeAccessIssue]
    return guest
