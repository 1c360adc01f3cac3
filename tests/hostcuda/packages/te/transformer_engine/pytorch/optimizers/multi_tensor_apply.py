"""Kernels over lists of tensors."""

import torch

from tests.hostcuda.packages import kernels
from tests.hostcuda.packages.kernels import Lists, multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale

__all__ = ["multi_tensor_adam", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale"]


def multi_tensor_adam(_chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, *hyper: float) -> None:
    """Take a step with lists of gradients, parameters, both moments and, optionally, main parameters."""
    kernels.check_lists(noop_flag, tensor_lists, len(tensor_lists))
    adam(tensor_lists, hyper)


def adam(tensor_lists: Lists, hyper: tuple) -> None:
    """Do `multi_tensor_adam` without checks: step the main parameter and round it to the parameter."""
    for gradient, parameter, mean, square, *main in zip(*tensor_lists, strict=True):
        kernels.require(mean.dtype == square.dtype == torch.float32, "moments are in single precision")
        if not main:
            kernels.adam(parameter, gradient, mean, square, *hyper)
        elif main[0].dtype == torch.int16:
            whole = joined(parameter, main[0])
            kernels.adam(whole, gradient, mean, square, *hyper)
            part(whole, parameter, main[0])
        else:
            kernels.adam(main[0], gradient, mean, square, *hyper)
            parameter.copy_(main[0])


def joined(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the single-precision number with the rounded upper half `parameter` and the lower half `remainder`."""
    upper = parameter.contiguous().view(torch.int16).int() - (remainder < 0).int()
    return ((upper << 16) | (remainder.int() & 0xFFFF)).view(torch.float32)


def part(whole: torch.Tensor, parameter: torch.Tensor, remainder: torch.Tensor) -> None:
    """Write both halves of `whole`, as the inverse of `joined`."""
    bits = whole.view(torch.int32)
    remainder.copy_(bits.to(torch.int16))
    parameter.view(torch.int16).copy_(((bits >> 16) + (remainder < 0)).to(torch.int16))
