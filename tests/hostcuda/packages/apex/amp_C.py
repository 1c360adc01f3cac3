"""apex's kernels over lists of tensors."""

import torch

from tests.hostcuda.packages import kernels

Lists = list[list[torch.Tensor]]


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor_python: bool | None, /
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all tensors, shape [1], and none of each."""
    kernels.check_lists(noop_flag, tensor_lists, 1)
    if per_tensor_python:
        raise NotImplementedError("multi_tensor_l2norm: a norm of each tensor")
    total = kernels.norm(tensor_lists[0])
    return total, total.new_empty(0)


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float, /) -> None:
    """Write the first list's tensors, times `scale`, into those of the second."""
    kernels.check_lists(noop_flag, tensor_lists, 2)
    kernels.scale(*tensor_lists, scale)


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
    """A step with lists of gradients, parameters and both moments."""
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
    """A step with lists of gradients, parameters and momenta."""
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
