"""A norm and a linear layer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ._norm import normalize
from .linear import Linear


class LayerNormLinear(Linear):
    """A norm followed by a linear layer, with the default random state."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: Any = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        assert normalization in ("LayerNorm", "RMSNorm"), "Unsupported normalization type!"
        if return_layernorm_output or return_layernorm_output_gathered:
            raise NotImplementedError("LayerNormLinear: return_layernorm_output")
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        super().__init__(
            in_features,
            out_features,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            tp_group=tp_group,
            tp_size=tp_size,
            get_rng_state_tracker=get_rng_state_tracker,
            init_method=init_method,
            bias=bias,
            return_bias=return_bias,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            parameters_split=parameters_split,
            device=device,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            ub_name=ub_name,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
            name=name,
        )

    def _add_weight(self, *args: Any, params_dtype: torch.dtype, device: Any) -> None:
        """Register the linear layer's parameters after the norm's."""
        ones = torch.full((self.in_features,), float(not self.zero_centered_gamma), device=device, dtype=params_dtype)
        self.layer_norm_weight = torch.nn.Parameter(ones)
        self.layer_norm_bias = None if self.normalization == "RMSNorm" else torch.nn.Parameter(torch.zeros_like(ones))
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel
        super()._add_weight(*args, params_dtype=params_dtype, device=device)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return the output; with `return_bias`, also the bias."""
        inp = self._prepare(inp)
        normal = normalize(
            self.normalization, inp, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma
        )
        return self._multiply(normal)
