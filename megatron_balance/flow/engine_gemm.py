"""Products of all slots by Transformer Engine: `--moe-expert-gemm te`."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from megatron_balance.flow.grouped_gemm import DeviceSplit, GroupedGemm, Split, TorchGemm, WeightTerm
from megatron_balance.flow.slot_weights import slots_of


class EngineGemm(GroupedGemm):
    """Products by the function that Transformer Engine's GroupedLinear computes with; needs CUDA.

    It takes the matrices of all slots as lists, starts their products on several streams, and adds weight gradients
    to float32 in the kernel. Its matrices are row-major. Its layouts name the first two arguments, A and B, in the
    column-major view: TN is `B A^T`, NN is `B A`, NT is `B^T A`.
    """

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
        if len(rows):
            matrices = [*slots_of(weights)]
            parts = [*rows.contiguous().split(sizes)]
            self._call(matrices, parts, [output], m_splits=sizes, single_output=True, **options)
        return output

    def _call(
        self, first: list[torch.Tensor], second: list[torch.Tensor], out: list[torch.Tensor], **more: Any
    ) -> None:
        accepted = self._parameters
        if "quantization_params" in accepted:
            # Since 2.11
            more["quantization_params"] = [None] * len(first)
        if "workspaces" in accepted:
            # Until 2.9
            more["workspaces"] = _workspaces()
        self._gemm(first, second, out=out, out_dtype=out[0].dtype, **more)

    # On demand: a dry run builds models on machines that lack the package

    @functools.cached_property
    def _gemm(self) -> Callable:
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm  # pyright: ignore

        return general_grouped_gemm

    @functools.cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(inspect.signature(self._gemm).parameters)


def _workspaces() -> list[torch.Tensor]:
    from transformer_engine.pytorch.module.base import get_multi_stream_cublas_workspace  # pyright: ignore

    return get_multi_stream_cublas_workspace()


def expert_gemm(name: Literal["default", "te"]) -> GroupedGemm:
    """Return what computes the products of experts for a value of `--moe-expert-gemm`."""
    return EngineGemm() if name == "te" else TorchGemm()
