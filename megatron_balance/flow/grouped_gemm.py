"""Matrix products for the rows of all slots: outputs, input gradients and weight gradients.

Rows are grouped by slot. The weights are a sequence of tensors [S_i, O, I] of consecutive slots: a parameter for home
slots, a separate buffer for guest slots. Numbers of kernels of a projection with S home slots and G guest slots in use:

| products                 | `TorchGemm` on its fast path | `TorchGemm` otherwise | `EngineGemm` |
|--------------------------|------------------------------|-----------------------|--------------|
| output, input gradient   | 1 + G                        | S + G                 | 1 call       |
| weight gradient          | S + G                        | S + G                 | 1 call       |

If only the device knows the numbers of rows (`DeviceSplit`), each product is one grouped kernel of torch. If guest
slots are in use, the weights of all slots are then copied into one tensor.

torch's grouped product takes one tensor of weights and allocates its result, so guest slots are multiplied one by one.
It also rounds weight gradients to the inputs' precision, whereas one product per slot adds to float32.
"""

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

GROUPED_MM_ALIGNMENT = 16
"""`grouped_mm` requires strides that are multiples of this many bytes."""

GROUPED_MM_MAJORS = (9, 10)
"""Major compute capabilities for which torch has a grouped kernel."""


@dataclass(frozen=True, eq=False)
class RowSplit:
    """Numbers of rows of consecutive slots, known to the host; may be zero. More rows may follow, undefined."""

    sizes: Sequence[int]
    device: torch.device

    def parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return each slot's rows."""
        return rows[: sum(self.sizes)].split(self.sizes)

    @functools.cached_property
    def ends(self) -> torch.Tensor:
        """[S] int32 on the device: the end of each slot's rows."""
        ends = torch.tensor(self.sizes).cumsum(0).to(torch.int32)
        # A copy from pageable memory is staged immediately, so the host does not wait
        return ends.to(self.device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class DeviceSplit:
    """Split of rows into slots, known only to the device. Rows after the last end are undefined."""

    ends: torch.Tensor
    """[S] int32 on the device."""


Split = RowSplit | DeviceSplit


def split_of(tokens_per_slot: torch.Tensor, device: torch.device) -> Split:
    """Return the split of rows on `device`, given each slot's number of rows [S] in host memory or on the device."""
    if tokens_per_slot.is_cpu:
        return RowSplit(tokens_per_slot.tolist(), device)
    return DeviceSplit(tokens_per_slot.cumsum(0, dtype=torch.int32))


class WeightTerm(NamedTuple):
    """A weight gradient to add: `total_OI` += `gradient_RO`.T @ `rows_RI`, over one slot's rows."""

    total_OI: torch.Tensor
    gradient_RO: torch.Tensor
    rows_RI: torch.Tensor


class GroupedGemm(ABC):
    """Products of one linear layer in all slots, outside autograd."""

    @abstractmethod
    def outputs(self, rows_RI: torch.Tensor, weights: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
        """Multiply each slot's rows by the transpose of its weight: [R, I] x [S, O, I] -> [R, O]."""

    @abstractmethod
    def input_gradients(self, gradient_RO: torch.Tensor, weights: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
        """Multiply each slot's rows by its weight: [R, O] x [S, O, I] -> [R, I]."""

    @abstractmethod
    def add_weight_gradients(self, terms: Iterable[WeightTerm]) -> None:
        """Add each term to its total, in the total's precision; no two terms share a total."""


class TorchGemm(GroupedGemm):
    def outputs(self, rows_RI: torch.Tensor, weights: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
        if isinstance(split, DeviceSplit):
            return F.grouped_mm(rows_RI, in_one(weights).mT, offs=split.ends)
        return _products(rows_RI, [weight_SOI.mT for weight_SOI in weights], split)

    def input_gradients(self, gradient_RO: torch.Tensor, weights: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
        if isinstance(split, DeviceSplit):
            return F.grouped_mm(gradient_RO, in_one(weights), offs=split.ends)
        return _products(gradient_RO, weights, split)

    def add_weight_gradients(self, terms: Iterable[WeightTerm]) -> None:
        for total_OI, gradient_RO, rows_RI in terms:
            if total_OI.dtype == rows_RI.dtype:
                total_OI.addmm_(gradient_RO.T, rows_RI)
            elif rows_RI.is_cuda:
                torch.addmm(total_OI, gradient_RO.T, rows_RI, out_dtype=total_OI.dtype, out=total_OI)
            else:
                # On a CPU, inputs must have the precision of the result
                total_OI.addmm_(gradient_RO.to(total_OI.dtype).T, rows_RI.to(total_OI.dtype))


def weight_gradients(gradient_RO: torch.Tensor, rows_RI: torch.Tensor, split: DeviceSplit) -> torch.Tensor:
    """Return the weight gradients [S, O, I] in the rows' precision; zero for slots without rows."""
    return F.grouped_mm(gradient_RO.T, rows_RI, offs=split.ends)


def slots_of(parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensor of each slot, given tensors [S_i, ...] of consecutive slots."""
    for part in parts:
        yield from part.unbind()


def in_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors; a single one is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])


def _products(rows_RI: torch.Tensor, matrices: Sequence[torch.Tensor], split: RowSplit) -> torch.Tensor:
    """Multiply each slot's rows by its matrix [I, O]: [R, I] -> [R, O]."""
    first_SIO = matrices[0]
    width = matrices[0].shape[-1]
    grouped = len(first_SIO)
    if sum(split.sizes[:grouped]) and grouped_mm_is_fast(first_SIO):
        # Products of guest slots fill the rows after the last end
        output_RO = F.grouped_mm(rows_RI, first_SIO, offs=split.ends[:grouped])
    else:
        output_RO = rows_RI.new_empty(len(rows_RI), width)
        grouped = 0
    each = zip(split.parts(rows_RI), split.parts(output_RO), slots_of(matrices), strict=True)
    for number, (rows, output, matrix_IO) in enumerate(each):
        if number >= grouped and len(rows):
            torch.mm(rows, matrix_IO, out=output)
    return output_RO


def grouped_mm_is_fast(matrix_SIO: torch.Tensor) -> bool:
    """Return whether `torch.nn.functional.grouped_mm` multiplies rows by these matrices in one kernel, without host
    waits. Source: aten/src/ATen/native of torch 2.13, `_grouped_mm_cuda` in cuda/GroupedBlas.cpp, and
    `check_valid_strides_and_return_transposed` in GroupedMMUtils.h."""
    if matrix_SIO.dtype != torch.bfloat16 or not matrix_SIO.is_cuda or torch.version.hip is not None:
        return False
    aligned = all(width * matrix_SIO.element_size() % GROUPED_MM_ALIGNMENT == 0 for width in matrix_SIO.shape[1:])
    return aligned and torch.cuda.get_device_capability(matrix_SIO.device)[0] in GROUPED_MM_MAJORS


class EngineGemm(GroupedGemm):
    """Products by the function behind Transformer Engine's GroupedLinear; needs CUDA. It takes the matrices of all
    slots as lists, starts one product per slot on several streams, and adds weight gradients to float32 in the kernel.
    A layout names transposes of the first two arguments, A and B, in the column-major view of row-major matrices: TN is
    `B A^T`, NN is `B A`, NT is `B^T A`."""

    def outputs(self, rows_RI: torch.Tensor, weights: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
        return self._products(rows_RI, weights, split, weights[0].shape[1], layout="TN")

    def input_gradients(self, gradient_RO: torch.Tensor, weights: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
        return self._products(gradient_RO, weights, split, weights[0].shape[2], layout="NN", grad=True)

    def add_weight_gradients(self, terms: Iterable[WeightTerm]) -> None:
        if not (terms := list(terms)):
            return
        totals, gradients, rows = (list(column) for column in zip(*terms, strict=True))
        sizes = [len(one) for one in rows]
        self._call(rows, gradients, totals, m_splits=sizes, layout="NT", grad=True, accumulate=True)

    def _products(
        self, rows: torch.Tensor, weights: Sequence[torch.Tensor], split: Split, width: int, **options: Any
    ) -> torch.Tensor:
        assert not isinstance(split, DeviceSplit), "the numbers of rows are arguments"
        output = rows.new_empty(len(rows), width)
        sizes = list(split.sizes)
        if any(sizes):
            matrices = [*slots_of(weights)]
            parts = [*split.parts(rows.contiguous())]
            self._call(matrices, parts, [output[: sum(sizes)]], m_splits=sizes, single_output=True, **options)
        return output

    def _call(
        self, first: list[torch.Tensor], second: list[torch.Tensor], out: list[torch.Tensor], **more: Any
    ) -> None:
        gemm, accepted = self._gemm
        if "quantization_params" in accepted:
            # Since 2.11
            more["quantization_params"] = [None] * len(first)
        if "workspaces" in accepted:
            # Until 2.9
            from transformer_engine.pytorch.module.base import get_multi_stream_cublas_workspace  # pyright: ignore

            more["workspaces"] = get_multi_stream_cublas_workspace()
        gemm(first, second, out=out, out_dtype=out[0].dtype, **more)

    @functools.cached_property
    def _gemm(self) -> tuple[Callable, frozenset[str]]:
        """The function and its parameters; imported on demand, because a dry run works without the package."""
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm  # pyright: ignore

        return general_grouped_gemm, frozenset(inspect.signature(general_grouped_gemm).parameters)


def expert_gemm(name: Literal["default", "te"]) -> GroupedGemm:
    """Return the products of experts for a value of `--moe-expert-gemm`."""
    return EngineGemm() if name == "te" else TorchGemm()
