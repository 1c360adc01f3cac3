"""apex's kernels over lists of tensors."""

import torch

from tests.hostcuda.packages import kernels
from tests.hostcuda.packages.kernels import Lists, multi_tensor_l2norm, multi_tensor_scale

__all__ = ["multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale"]


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    *hyper: float,
) -> None:
    """Take a step with lists of gradients, parameters and both moments."""
    kernels.check_lists(noop_flag, tensor_lists, 4)
    for gradient, parameter, mean, square in zip(*tensor_lists, strict=True):
        kernels.require(gradient.dtype == parameter.dtype, "gradients have the parameters' type")
        kernels.require(mean.dtype == square.dtype == torch.float32, "moments are in single precision")
        kernels.adam(parameter, gradient, mean, square, *hyper)
