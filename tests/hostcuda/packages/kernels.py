"""Argument checks for the kernels of both packages, and the multi-tensor kernels that both packages have.

A real kernel takes addresses. It refuses little, and computes nonsense from tensors that are strided or not on the
device. The stand-ins refuse all of those.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

HALVES = (torch.float16, torch.bfloat16)

Lists = list[list[torch.Tensor]]


def require(condition: bool, message: str) -> None:
    """Raise the error of a kernel's own checks unless `condition` holds."""
    if not condition:
        raise RuntimeError(message)


SIGNATURES: dict[str, str] = json.loads(
    (Path(__file__).parents[2] / "data" / "nvidia_signatures.json").read_text(encoding="utf-8")
)
"""Parameters by function, from the sources of Transformer Engine 2.11.0, and of apex and DeepEP at commits 10417ac and
94a9f8f; `=` stands for a default."""


def check_names(function: str, given: Collection[str]) -> None:
    """Refuse arguments that the real function, named as in `SIGNATURES`, does not have."""
    if unknown := {*given} - {*re.findall(r"\w+", SIGNATURES[function])}:
        raise TypeError(f"{function} has no arguments {sorted(unknown)}")


def check_others(function: str, others: Mapping[str, Any], harmless: Collection[str] = ()) -> None:
    """Refuse, among arguments that the stand-in does not name, those that the real function does not have, and values
    that ask for a feature which the stand-in lacks; `harmless` names may have any value."""
    check_names(function, others)
    if asked := [name for name, value in others.items() if value and name not in harmless]:
        raise NotImplementedError(f"{function}: {asked}")


def on_device(**tensors: torch.Tensor | None) -> None:
    """Refuse tensors on the host, by name; ignore None."""
    for name, tensor in tensors.items():
        require(tensor is None or tensor.is_cuda, f"{name}: a CUDA kernel cannot read memory of the host")


def dense(**tensors: torch.Tensor | None) -> None:
    """Refuse tensors on the host and strided tensors, by name; ignore None."""
    on_device(**tensors)
    for name, tensor in tensors.items():
        require(tensor is None or tensor.is_contiguous(), f"{name}: the kernel takes contiguous memory")


def check_lists(overflow: torch.Tensor, lists: Lists, depth: int) -> None:
    """Refuse lists that a multi-tensor kernel does not take; tensors at one position must have equal sizes."""
    on_device(overflow=overflow)
    require(overflow.dtype == torch.int32 and overflow.numel() == 1, "the overflow buffer holds one int32")
    require(len(lists) == depth, f"{len(lists)} lists of tensors, not {depth}")
    require(len(lists[0]) > 0, "a list of tensors is empty")
    require(len({len(tensors) for tensors in lists}) == 1, "lists of tensors differ in length")
    for place in zip(*lists, strict=True):
        require(len({tensor.numel() for tensor in place}) == 1, "tensors of one place differ in size")
        for tensor in place:
            dense(tensor=tensor)
            require(tensor.device == overflow.device, "tensors and the overflow buffer are on different devices")


def multi_tensor_applier(op: Callable, noop_flag_buffer: torch.Tensor, tensor_lists: Lists, *args: Any) -> Any:
    """Call a kernel with the size of its chunks."""
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, per_tensor_python: bool | None, /
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors, shape [1], and an empty tensor instead of the norm of each."""
    check_lists(noop_flag, tensor_lists, 1)
    if per_tensor_python:
        raise NotImplementedError("multi_tensor_l2norm: a norm of each tensor")
    each = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensor_lists[0]]
    total = torch.linalg.vector_norm(torch.stack(each)).view(1)
    return total, total.new_empty(0)


def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: Lists, scale: float, /) -> None:
    """Write the first list's tensors, times `scale`, into the second list's tensors."""
    check_lists(noop_flag, tensor_lists, 2)
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source.float() * scale if source.dtype in HALVES else source * scale)


def adam(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Take one step of Adam (mode 0) or AdamW (1) in place, in single precision and in the order of `torch.optim`."""
    single = parameter.float()
    gradient = gradient.float()
    if mode == 1:
        single.mul_(1 - lr * weight_decay)
    elif weight_decay:
        gradient = gradient.add(single, alpha=weight_decay)
    first = mean.float()
    second = square.float()
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    single.addcdiv_(first, (second.sqrt() / corrections[1] ** 0.5).add_(epsilon), value=-lr / corrections[0])
    for kept, computed in ((parameter, single), (mean, first), (square, second)):
        if kept is not computed:
            kept.copy_(computed)
