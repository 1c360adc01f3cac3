"""Common parts of the layers."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..distributed import get_distributed_world_size, set_tensor_model_parallel_attributes


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Return a placeholder for a weight's gradient that was already added to the main gradient."""
    assert len(shape) == 2
    return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device="cuda")


class TransformerEngineBaseModule(torch.nn.Module):
    """Initializes parameters from a named random state, and checks inputs."""

    tp_group: dist.ProcessGroup | None = None
    rng_tracker_name: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.tp_group_initialized = False
        self.fp8_meta: dict[str, Any] = {}
        self.sequence_parallel = False

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        self.tp_group = tp_group
        self.tp_group_initialized = True

    def _set_tensor_parallelism(self, tp_group: dist.ProcessGroup | None, tp_size: int) -> None:
        self.tp_size = tp_size if tp_group is None else get_distributed_world_size(tp_group)
        if tp_group is not None or tp_size == 1:
            self.set_tensor_parallel_group(tp_group)

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
        self._set_tensor_parallelism(tp_group, tp_size)
        self.parallel_mode = parallel_mode
        self.out_features = out_features // (self.tp_size if parallel_mode == "column" else 1)
        self.in_features = in_features // (self.tp_size if parallel_mode == "row" else 1)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel

    def _initialize(
        self, parameter: torch.nn.Parameter, init_method: Callable | None, tracker: Callable | None
    ) -> None:
        """Draw values from the tracker's state named `rng_tracker_name`, or from its default state."""
        forked: Any = contextlib.nullcontext()
        if tracker is not None:
            forked = tracker().fork(self.rng_tracker_name) if self.rng_tracker_name else tracker().fork()
        with forked:
            (init_method or (lambda weight: weight.normal_(0.0, 0.023)))(parameter.data)

    def _mark(self, parallel_mode: str | None) -> None:
        """Set the attributes that megatron-core reads from the weight and the bias."""
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("weight"):
                set_tensor_model_parallel_attributes(parameter, True, 1 if parallel_mode == "row" else 0, 1)
            elif name.startswith("bias") and parallel_mode == "column":
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            elif name.startswith("bias") and parallel_mode == "row":
                parameter.sequence_parallel = self.sequence_parallel

    def _prepare(self, inp: torch.Tensor) -> torch.Tensor:
        """Refuse inputs that none of the layers accepts."""
        assert inp.is_cuda, "TransformerEngine needs CUDA."
        if self.tp_size > 1:
            assert self.tp_group_initialized, "TP group not initialized."
        for name, parameter in self.named_parameters():
            assert inp.dtype == parameter.dtype, f"input of {inp.dtype}, but {name} of {parameter.dtype}"
            assert parameter.is_cuda, f"{name} is on {parameter.device}"
        return inp.contiguous()

    def get_extra_state(self) -> torch.Tensor:
        """Return an empty tensor: there is no low-precision state."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        assert state is None or not state.numel(), "state of low precision"
