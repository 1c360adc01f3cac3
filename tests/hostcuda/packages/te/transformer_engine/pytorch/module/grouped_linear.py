"""Linear layers of the experts of an MoE layer, computed one after the other."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..constants import GemmParallelModes
from ..utils import divide
from ._gemm import How, LinearFunction
from .base import TransformerEngineBaseModule


class GroupedLinear(TransformerEngineBaseModule):
    """Parameters `weight0`, `bias0` and so on; no collectives."""

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
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert parallel_mode in GemmParallelModes, f"parallel_mode {parallel_mode} not supported"
        assert not ub_overlap_ag and not ub_overlap_rs, "GroupedLinear doesn't support Userbuffer overlap."
        if delay_wgrad_compute:
            raise NotImplementedError("GroupedLinear: delay_wgrad_compute")
        self._set_tensor_parallelism(tp_group, tp_size)
        assert not (self.tp_size > 1 and bias), "GroupedLinear doesn't support bias when TP > 1."
        self.num_gemms = num_gemms
        self.rng_tracker_name = rng_tracker_name
        self.parallel_mode = parallel_mode
        self.out_features = divide(out_features, self.tp_size if parallel_mode == "column" else 1)
        self.in_features = divide(in_features, self.tp_size if parallel_mode == "row" else 1)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.save_original_input = save_original_input
        new: dict[str, Any] = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        for place in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, **new))
            self.register_parameter(f"weight{place}", weight)
            self._initialize(weight, init_method or (lambda one: one.normal_(0.0, 0.023)), get_rng_state_tracker)
            biases = torch.zeros(self.out_features if bias else 0, **new)
            if bias:
                self.register_parameter(f"bias{place}", torch.nn.Parameter(biases))
            else:
                setattr(self, f"bias{place}", biases)
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
