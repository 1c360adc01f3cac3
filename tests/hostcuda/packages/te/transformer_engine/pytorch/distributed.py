"""Collectives of tensor parallelism; names of random states and of recomputation."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist


def get_distributed_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the group's size, or 1 if torch.distributed is not initialized."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def set_tensor_model_parallel_attributes(tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Set the tensor-parallel attributes of a parameter that has none of them."""
    marks = {"tensor_model_parallel": is_parallel, "partition_dim": dim, "partition_stride": stride}
    assert not any(hasattr(tensor, name) for name in marks)
    for name, value in marks.items():
        setattr(tensor, name, value)


def gather_along_first_dim(inp: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all ranks' rows."""
    out = inp.new_empty(group.size() * inp.shape[0], *inp.shape[1:])
    dist.all_gather_into_tensor(out, inp.contiguous(), group=group)
    return out


def reduce_scatter_along_first_dim(inp: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's rows of the sum."""
    out = inp.new_empty(inp.shape[0] // group.size(), *inp.shape[1:])
    dist.reduce_scatter_tensor(out, inp.contiguous(), group=group)
    return out


@contextlib.contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Do nothing: recomputation has no low-precision state."""
    yield


class CudaRNGStatesTracker:
    """megatron-core derives a class from it, which it uses with CUDA graphs only."""

    def __init__(self) -> None:
        raise NotImplementedError("CudaRNGStatesTracker")


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Recompute `function` in the backward pass; megatron-core uses its own function unless in low precision."""
    raise NotImplementedError("checkpoint")
