"""The optimizer's step in two parts, between which the host decides whether weights change.

megatron-core's optimizer computes the gradient norm inside its step and waits for it, once for each part of the model
whose norm is summed over other ranks. The loop needs all numbers of an iteration before the step, which it may skip,
and reads them together. So it computes the norm first, and hands it to the step.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, clip_grads


def scales_losses(optimizer: MegatronOptimizer) -> bool:
    """Return whether losses are scaled: then the step itself looks for infinite gradients before there is a norm."""
    return any(getattr(part, "grad_scaler", None) for part in _parts(optimizer))


@torch.no_grad()
def squared_norms(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """Prepare the gradients for the step; return the squared norms [1] of the model's parts, for `step`.

    All ranks call this after gradients are reduced. It changes no weight and does not wait for the device. If losses
    are scaled, it does nothing and returns nothing.
    """
    if scales_losses(optimizer):
        return []
    whole: Any = optimizer
    whole.prepare_grads()
    parts = _parts(optimizer)
    together = [parts] if whole.grads_states_parallel_group_is_shared() else [[part] for part in parts]
    return [
        _squared_norm(
            [gradient for part in some for gradient in _gradients(part)], some[0].get_grad_stats_parallel_group()
        )
        for some in together
    ]


def step(optimizer: MegatronOptimizer, squares: Sequence[float]) -> tuple[bool, float | None]:
    """Step the optimizer; return whether it did, and the gradient norm.

    Args:
        squares: what `squared_norms` returned in this iteration, on the host.
    """
    whole: Any = optimizer
    if scales_losses(optimizer):
        stepped, norm, _ = whole.step()
        return stepped, norm
    norm = squares[0] ** 0.5 if len(squares) == 1 else math.sqrt(sum((square**0.5) ** 2 for square in squares))
    whole.prepare_grads, whole.get_grad_norm = lambda: False, lambda: norm
    try:
        stepped, norm, _ = whole.step()
    finally:
        del whole.prepare_grads, whole.get_grad_norm
    return stepped, norm


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    whole: Any = optimizer
    return whole.chained_optimizers


def _gradients(part: Any) -> list[torch.Tensor]:
    """Return the gradients that count on this rank; since 0.19, megatron-core can leave some out of the norm."""
    if hasattr(part, "get_grads_for_grad_norm"):
        return part.get_grads_for_grad_norm()
    return part.get_main_grads_for_grad_norm()


def _squared_norm(gradients: list[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the square [1] of the norm of all ranks' gradients, as `clip_grads.get_grad_norm_fp32` computes it."""
    device = torch.cuda.current_device()
    norm = torch.zeros(1, device=device)
    if gradients:
        overflow = torch.zeros(1, dtype=torch.int, device=device)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
    square = norm**2.0
    dist.all_reduce(square, group=group)
    return square
