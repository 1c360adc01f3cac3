"""Linear layers."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.hostcuda.packages import kernels

from ._gemm import How, LinearFunction
from .base import TransformerEngineBaseModule

NAMES = ("name", "ub_name", "save_original_input")
"""Arguments that change no result."""


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
        device: Any = "cuda",
        **others: Any,
    ) -> None:
        super().__init__()
        kernels.check_others(f"{__name__}:Linear.__init__", others, harmless=NAMES)
        self.rng_tracker_name = rng_tracker_name
        # megatron-core sets it
        self.save_original_input = False
        self._set_shape(in_features, out_features, parallel_mode, tp_group, tp_size, sequence_parallel)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        new: dict[str, Any] = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        self._add_norm(new)
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **new))
        self._initialize(self.weight, init_method, get_rng_state_tracker)
        self.bias = torch.nn.Parameter(torch.zeros(self.out_features, **new)) if bias else torch.empty(0, **new)
        self._mark(parallel_mode)

    def _add_norm(self, new: dict[str, Any]) -> None:
        """Register the parameters that come before the weight: none."""

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
