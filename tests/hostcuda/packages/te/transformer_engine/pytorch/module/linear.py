"""Linear layers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..constants import GemmParallelModes
from ..utils import divide
from ._gemm import How, LinearFunction
from .base import TransformerEngineBaseModule


class Linear(TransformerEngineBaseModule):
    """y = x W^T + b."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if any((ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad)):
            raise NotImplementedError("Linear: overlap of communication in user buffers")
        if delay_wgrad_compute or symmetric_ar_type or parameters_split:
            raise NotImplementedError("Linear: delay_wgrad_compute, symmetric_ar_type, parameters_split")
        self.rng_tracker_name = rng_tracker_name
        self.save_original_input = save_original_input
        self.name = name
        self._set_shape(in_features, out_features, parallel_mode, tp_group, tp_size, sequence_parallel)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.ub_name = ub_name
        dtype = params_dtype or torch.get_default_dtype()
        self._add_weight(init_method, get_rng_state_tracker, bias, return_bias, params_dtype=dtype, device=device)
        self._mark(parallel_mode)

    def _set_shape(
        self,
        in_features: int,
        out_features: int,
        parallel_mode: str | None,
        tp_group: dist.ProcessGroup | None,
        tp_size: int,
        sequence_parallel: bool,
    ) -> None:
        """Set the shape of this rank's part of the weight."""
        assert parallel_mode in GemmParallelModes, f"parallel_mode {parallel_mode} not supported"
        self._set_tensor_parallelism(tp_group, tp_size)
        self.parallel_mode = parallel_mode
        self.out_features = divide(out_features, self.tp_size if parallel_mode == "column" else 1)
        self.in_features = divide(in_features, self.tp_size if parallel_mode == "row" else 1)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel

    def _add_weight(
        self,
        init_method: Callable | None,
        tracker: Callable | None,
        bias: bool,
        return_bias: bool,
        *,
        params_dtype: torch.dtype,
        device: Any,
    ) -> None:
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        new: dict[str, Any] = {"device": device, "dtype": params_dtype}
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **new))
        self._initialize(self.weight, init_method or (lambda weight: weight.normal_(0.0, 0.023)), tracker)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(self.out_features, **new))
        else:
            self.bias = torch.empty(0, **new)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the output; with `return_bias`, also the bias."""
        return self._multiply(self._prepare(inp))

    def _multiply(self, inp: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        how = How(
            parallel_mode=self.parallel_mode,
            group=self.tp_group,
            ranks=self.tp_size,
            sequence_parallel=self.sequence_parallel,
            accumulate=self.fuse_wgrad_accumulation,
        )
        # A row-parallel layer adds its bias once, to the sum
        later = self.apply_bias and self.parallel_mode == "row"
        out = LinearFunction.apply(self.weight, inp, self.bias if self.apply_bias and not later else None, how)
        out = out + self.bias if later else out
        return (out, self.bias) if self.return_bias else out
