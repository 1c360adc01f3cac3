"""Linear layers of several experts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.hostcuda.packages import kernels

from ._gemm import How, LinearFunction
from .base import TransformerEngineBaseModule
from .linear import NAMES


class GroupedLinear(TransformerEngineBaseModule):
    """A linear layer for each expert, with parameters `weight0`, `bias0` and so on; no collectives."""

    def __init__(
        self,
        num_gemms: int,
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
        kernels.check_others(f"{__name__}:GroupedLinear.__init__", others, harmless=NAMES)
        self.rng_tracker_name = rng_tracker_name
        # megatron-core sets it
        self.save_original_input = False
        self._set_shape(in_features, out_features, parallel_mode, tp_group, tp_size, sequence_parallel)
        assert not (self.tp_size > 1 and bias), "GroupedLinear doesn't support bias when TP > 1."
        self.num_gemms = num_gemms
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        new: dict[str, Any] = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        for place in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **new))
            self.register_parameter(f"weight{place}", weight)
            self._initialize(weight, init_method, get_rng_state_tracker)
            biases = torch.zeros(self.out_features if bias else 0, **new)
            setattr(self, f"bias{place}", torch.nn.Parameter(biases) if bias else biases)
        self._mark(parallel_mode)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing; callers run this before loading."""

    def forward(
        self, inp: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the output; with `return_bias`, also the biases.

        Args:
            inp: [rows, in_features].
            m_splits: rows of each expert, on the host.
        """
        assert len(m_splits) == self.num_gemms, "Number of splits should match number of GEMMs."
        assert all(isinstance(rows, int) for rows in m_splits), "rows of each expert, on the host"
        inp = self._prepare(inp)
        how = How(None, None, 1, False, self.fuse_wgrad_accumulation)
        biases = [getattr(self, f"bias{place}") for place in range(self.num_gemms)]
        outputs = [
            LinearFunction.apply(
                getattr(self, f"weight{place}"), rows.contiguous(), biases[place] if self.apply_bias else None, how
            )
            for place, rows in enumerate(inp.flatten(0, -2).split(m_splits))
        ]
        out = torch.cat(outputs).view(*inp.shape[:-1], -1)
        return (out, biases) if self.return_bias else out
