"""Weights of one linear layer in a rank's slots, and their gradients.

A backward pass computes the input gradients of all chunks first, because other ranks wait for them, and keeps the rows
and output gradients. Each weight gradient is then one product over all chunks. So it does not depend on the number of
chunks, and it overlaps with the exchange of the last input gradients.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.flow.grouped_gemm import (
    DeviceSplit,
    GroupedGemm,
    Split,
    WeightTerm,
    in_one,
    slots_of,
    weight_gradients,
)


class Projection(NamedTuple):
    """Weights of one linear layer for some slots: `weight` [S, O, I] and `bias` [S, O] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        """Return the weight and, if there is one, the bias."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def first(self, slots: int) -> "Projection":
        """Return the first slots."""
        return Projection(self.weight[:slots], None if self.bias is None else self.bias[:slots])


class GroupedWeights(torch.nn.Module):
    """One linear layer in all slots of a rank; the home slots are `weight` [S, O, I] and `bias` [S, O] or None."""

    bias: torch.nn.Parameter | None

    def __init__(self, slots: int, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        new = functools.partial(torch.zeros, device=torch.cuda.current_device(), dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(new(slots, outputs, inputs))
        self.register_parameter("bias", torch.nn.Parameter(new(slots, outputs)) if config.add_bias_linear else None)
        self.guests: list[Projection] = []
        """Guest slots: plain tensors, unknown to the optimizer, checkpoints and module conversions. They collect
        gradients, and backward passes compute with their weights."""
        self.forward_guests: list[Projection] = []
        """Guest slots whose weights forward passes compute with: the same ones, or others without gradients."""

    def allocate_guests(self, slots: int, shared: "GroupedWeights | None" = None, apart: bool = False) -> int:
        """Add guest slots, and return the bytes of new memory; call this after DDP has set the parameters' `main_grad`.

        Args:
            shared: a layer whose latest guest slots are added, in place of new ones.
            apart: whether forward passes compute with guest slots of their own, which have no gradients.
        """
        if shared is not None:
            self.guests.append(shared.guests[-1])
            self.forward_guests.append(shared.forward_guests[-1])
            return 0
        new = _new_guests(self, slots)
        for guest, parameter in zip(new.tensors(), self.parameters(), strict=True):
            guest.main_grad = main_grad(parameter).new_zeros(guest.shape)  # pyright: ignore[reportAttributeAccessIssue]
        self.guests.append(new)
        self.forward_guests.append(_new_guests(self, slots) if apart else new)
        more = self.forward_guests[-1].tensors() if apart else []
        return sum(guest.nbytes + main_grad(guest).nbytes for guest in new.tensors()) + sum(one.nbytes for one in more)

    def forward(self, guests: int = 0, repeats: bool = False) -> tuple[list[Projection], list[Projection]]:
        """Return the weights of the home slots and of the first `guests` guest slots, for a forward pass and for its
        backward pass. `repeats`: whether this forward pass repeats another one as a part of a backward pass. The method
        is called `forward` because DDP's `--overlap-param-gather` waits for parameters before a module's forward."""
        backward = self._first(self.guests, guests)
        return backward if repeats else self._first(self.forward_guests, guests), backward

    def _first(self, among: Sequence[Projection], guests: int) -> list[Projection]:
        found = [Projection(self.weight, self.bias)]
        for projection in among:
            if guests:
                found.append(projection.first(guests))
                guests -= len(found[-1].weight)
        assert not guests, "guests need room: allocate_guests"
        return found

    def tensors_of(self, slot: int, forward: bool = False) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the weight and the bias that contain a home or guest slot, and the slot's index in them. `forward`:
        whether the slot is one of those that forward passes compute with."""
        for projection in (Projection(self.weight, self.bias), *(self.forward_guests if forward else self.guests)):
            if slot < len(projection.weight):
                yield from ((tensor, slot) for tensor in projection.tensors())
                return
            slot -= len(projection.weight)
        raise AssertionError("guests need room: allocate_guests")


def main_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Return the buffer that sums a weight's gradients over microbatches: DDP's for a parameter, a guest slot's own."""
    return tensor.main_grad  # pyright: ignore[reportAttributeAccessIssue]


def _new_guests(linear: GroupedWeights, slots: int) -> Projection:
    """Return zeroed guest slots [G, ...]."""
    weight, *bias = (one.detach().new_zeros((slots, *one.shape[1:])) for one in linear.parameters())
    return Projection(weight, bias[0] if bias else None)


class SlotRows(NamedTuple):
    """Some rows of one slot, the gradient of their products, and the scale of each row's bias."""

    rows_RI: torch.Tensor
    gradient_RO: torch.Tensor
    scale_R: torch.Tensor | None


class LinearGradients:
    """Gradients of one linear layer's weights in all slots, over one backward pass: added to `main_grad` of guest slots
    and of parameters that DDP has marked (`grad_added_to_main_grad`), otherwise summed in float32 or better and rounded
    once."""

    def __init__(self, linear: GroupedWeights, slots: int, gemm: GroupedGemm) -> None:
        """`slots`: number of home slots plus guest slots in use."""
        self.linear = linear
        self.gemm = gemm
        self.parts: list[list[SlotRows]] = [[] for _ in range(slots)]
        self._uncounted: list[tuple[torch.Tensor, torch.Tensor, DeviceSplit]] = []
        """Gradients of products, rows of all slots, and their split, if only the device knows the numbers of rows."""

    def add(self, rows_RI: torch.Tensor, gradient_RO: torch.Tensor, scale_R: torch.Tensor | None, split: Split) -> None:
        """Keep rows of all slots, and the gradients of their products, until `finish`."""
        if isinstance(split, DeviceSplit):
            self._uncounted.append((gradient_RO, rows_RI, split))
            return
        rows = split.parts(rows_RI)
        gradients = split.parts(gradient_RO)
        scales = [None] * len(rows) if scale_R is None else split.parts(scale_R)
        for parts, part in zip(self.parts, map(SlotRows, rows, gradients, scales), strict=False):
            if len(part.rows_RI):
                parts.append(part)

    @torch.no_grad()
    def finish(self) -> list[torch.Tensor | None]:
        """Compute and return the parameters' gradients; a placeholder for parameters that DDP has marked, which only
        makes DDP's hook run: see `_make_backward_post_hook` in
        megatron/core/distributed/distributed_data_parallel.py."""
        weights, *biases = self._totals
        self.gemm.add_weight_gradients(self._terms(weights))
        for rows in self._uncounted:
            self._add(weight_gradients(*rows))
        self._uncounted.clear()
        for totals in biases:
            for total_O, parts in zip(totals, self.parts, strict=False):
                for _, gradient_RO, scale_R in parts:
                    scaled_RO = gradient_RO if scale_R is None else gradient_RO * scale_R.unsqueeze(-1)
                    total_O.add_(scaled_RO.sum(0, dtype=total_O.dtype))
        for parts in self.parts:
            parts.clear()
        return list(map(_for_autograd, self.linear.parameters(), self._sums))

    def _add(self, gradient_SOI: torch.Tensor) -> None:
        home = len(self.linear.weight)
        if self.linear.weight.requires_grad:
            self._sums[0].add_(gradient_SOI[:home])
        left_SOI = gradient_SOI[home:]
        for projection in self.linear.guests:
            total_SOI = main_grad(projection.weight)[: len(left_SOI)]
            total_SOI.add_(left_SOI[: len(total_SOI)])
            left_SOI = left_SOI[len(total_SOI) :]

    @functools.cached_property
    def _sums(self) -> list[torch.Tensor]:
        """Sum of each parameter's gradients; an empty tensor if it needs none."""
        return [
            parameter.new_empty(0)
            if not parameter.requires_grad
            else main_grad(parameter)
            if hasattr(parameter, "grad_added_to_main_grad")
            else torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
            for parameter in self.linear.parameters()
        ]

    @functools.cached_property
    def _totals(self) -> list[list[torch.Tensor]]:
        """Each slot's sum of gradients: of the weight and, if there is one, of the bias."""
        copies = [[main_grad(tensor) for tensor in projection.tensors()] for projection in self.linear.guests]
        return [
            [*slots_of([sums, *(each[number] for each in copies)])] if len(sums) else []
            for number, sums in enumerate(self._sums)
        ]

    def _terms(self, totals: Sequence[torch.Tensor]) -> Iterator[WeightTerm]:
        """Yield each slot's term over all chunks, slot by slot, so that few copies exist at the same time."""
        for total_OI, parts in zip(totals, self.parts, strict=False):
            if parts:
                rows, gradients, _ = zip(*parts, strict=True)
                yield WeightTerm(total_OI, in_one(gradients), in_one(rows))


def _for_autograd(parameter: torch.Tensor, sums: torch.Tensor) -> torch.Tensor | None:
    if not parameter.requires_grad:
        return None
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return sums.to(parameter.dtype)
    parameter.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    # A placeholder that shares the parameter's memory; nothing reads its values
    return parameter.detach()
