"""Gradients of the experts' weights, apart from those of their inputs.

A backward pass computes the input gradients of all chunks first, because other ranks wait for them. What the weight
gradients need, rows and output gradients, is kept until then. Each weight gradient is one product over all chunks, so
that it does not depend on their number, and it overlaps with the exchange of the last input gradients.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megatron_balance.flow.grouped_gemm import DeviceSplit, GroupedGemm, Split, WeightTerm, weight_gradients
from megatron_balance.flow.slot_weights import GroupedWeights, main_grad, slots_of


class SlotRows(NamedTuple):
    """Some rows of one slot, the gradient of their products, and what scales the bias of each row."""

    rows_RI: torch.Tensor
    gradient_RO: torch.Tensor
    scale_R: torch.Tensor | None


class LinearGradients:
    """The gradients of one linear layer's weights in all slots, over one backward pass.

    They are added to the `main_grad` of guest slots, and of parameters that megatron-core's DDP has marked with
    `grad_added_to_main_grad`. Gradients of other parameters are summed in float32 or better and rounded once.
    """

    def __init__(self, linear: GroupedWeights, slots: int, gemm: GroupedGemm) -> None:
        """`slots` is the number of slots in use: home slots, then guest slots."""
        self.linear = linear
        self.gemm = gemm
        self.parts: list[list[SlotRows]] = [[] for _ in range(slots)]
        self._uncounted: list[tuple[torch.Tensor, torch.Tensor, DeviceSplit]] = []
        """Rows of all slots and the gradient of their products, where only the device knows the numbers of rows."""

    def add(
        self,
        first: int,
        rows_RI: torch.Tensor,
        gradient_RO: torch.Tensor,
        scale_R: torch.Tensor | None,
        split: Split,
    ) -> None:
        """Keep rows of the slots from `first` on, and the gradient of their products, until `sum`."""
        if isinstance(split, DeviceSplit):
            self._uncounted.append((gradient_RO, rows_RI, split))
            return
        rows = rows_RI.split(split.sizes)
        gradients = gradient_RO.split(split.sizes)
        scales = [None] * len(rows) if scale_R is None else scale_R.split(split.sizes)
        for slot, part in enumerate(map(SlotRows, rows, gradients, scales), first):
            if len(part.rows_RI):
                self.parts[slot].append(part)

    @torch.no_grad()
    def sum(self) -> None:
        """Add everything that was kept to the gradients."""
        weights, *biases = self._totals
        self.gemm.add_weight_gradients(self._terms(weights))
        for rows in self._uncounted:
            self._add(weight_gradients(*rows))
        self._uncounted.clear()
        for totals in biases:
            for total_O, parts in zip(totals, self.parts, strict=False):
                for part in parts:
                    total_O.add_(_bias_gradient(part, total_O.dtype))
        for parts in self.parts:
            parts.clear()

    @torch.no_grad()
    def finish(self) -> list[torch.Tensor | None]:
        """Compute the gradients; return those of the parameters, for autograd.

        The gradient of a parameter that DDP has marked is a placeholder, which DDP's hook drops: it exists so that the
        hook runs. See `_make_backward_post_hook` in megatron/core/distributed/distributed_data_parallel.py.
        """
        self.sum()
        return [
            self._for_autograd(parameter, sums)
            for parameter, sums in zip(self.linear.parameters(), self._sums, strict=True)
        ]

    def _add(self, gradient_SOI: torch.Tensor) -> None:
        """Add a weight gradient of every slot in use."""
        home = self.linear.weight
        guests = self.linear.guests
        if home.requires_grad:
            self._sums[0].add_(gradient_SOI[: len(home)])
        if len(gradient_SOI) > len(home):
            assert guests is not None
            main_grad(guests.weight)[: len(gradient_SOI) - len(home)].add_(gradient_SOI[len(home) :])

    @functools.cached_property
    def _sums(self) -> list[torch.Tensor]:
        """Where the gradients of each parameter are added; an empty tensor if it needs none."""
        return [
            parameter.new_empty(0)
            if not parameter.requires_grad
            else main_grad(parameter)
            if _is_marked(parameter)
            else torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
            for parameter in self.linear.parameters()
        ]

    @functools.cached_property
    def _totals(self) -> list[list[torch.Tensor]]:
        """Where each slot's gradient is added: of the weight and, if there is one, of the bias."""
        guests = self.linear.guests
        copies = [] if guests is None else [main_grad(tensor) for tensor in guests.tensors()]
        return [
            [*slots_of([sums, *copies[number : number + 1]])] if len(sums) else []
            for number, sums in enumerate(self._sums)
        ]

    def _terms(self, totals: Sequence[torch.Tensor]) -> Iterator[WeightTerm]:
        """Yield the rows of each slot in all chunks; slot by slot, so that few copies exist at the same time."""
        for total_OI, parts in zip(totals, self.parts, strict=False):
            if parts:
                rows, gradients, _ = zip(*parts, strict=True)
                yield WeightTerm(total_OI, _joined(gradients), _joined(rows))

    def _for_autograd(self, parameter: torch.Tensor, sums: torch.Tensor) -> torch.Tensor | None:
        if not parameter.requires_grad:
            return None
        if not _is_marked(parameter):
            return sums.to(parameter.dtype)
        parameter.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
        # A new tensor of the right shape that costs no memory; nothing reads its values
        return parameter.detach()


def _is_marked(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "grad_added_to_main_grad")


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])


def _bias_gradient(part: SlotRows, dtype: torch.dtype) -> torch.Tensor:
    gradient_RO = part.gradient_RO if part.scale_R is None else part.gradient_RO * part.scale_R.unsqueeze(-1)
    return gradient_RO.sum(0, dtype=dtype)
