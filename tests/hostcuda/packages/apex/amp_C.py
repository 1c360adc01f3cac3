"""apex's kernels over lists of tensors."""

import torch

from tests.hostcuda.packages import kernels
from tests.hostcuda.packages.kernels import Lists, multi_tensor_l2norm, multi_tensor_scale

__all__ = ["multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale", "multi_tensor_sgd"]


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    /,
) -> None:
    """Take a step with lists of gradients, parameters and both moments."""
    kernels.check_lists(noop_flag, tensor_lists, 4)
    for gradient, parameter, mean, square in zip(*tensor_lists, strict=True):
        kernels.require(gradient.dtype == parameter.dtype, "gradients have the parameters' type")
        kernels.require(mean.dtype == square.dtype == torch.float32, "moments are in single precision")
        kernels.adam(
            parameter,
            gradient,
            mean,
            square,
            lr,
            beta1,
            beta2,
            epsilon,
            step,
            mode,
            bias_correction,
            weight_decay,
        )


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
    /,
) -> None:
    """Take a step with lists of gradients, parameters and momenta."""
    kernels.check_lists(noop_flag, tensor_lists, 3)
    for gradient, parameter, buffer in zip(*tensor_lists, strict=True):
        kernels.sgd(
            parameter,
            gradient.float() * scale,
            buffer,
            wd,
            momentum,
            dampening,
            lr,
            nesterov,
            first_run,
            wd_after_momentum,
        )
