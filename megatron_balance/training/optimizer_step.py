"""The optimizer's step in two parts; in between, the host decides whether weights change.

megatron-core's optimizer computes the gradient norm inside its step, and waits for each part of the model whose norm is
summed over other ranks. The loop may skip the step, so it needs all numbers of an iteration before, and reads them
together. It therefore computes the norm first and passes it to the step.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron_balance.training.optimizer_state import grad_scalers


def scales_losses(optimizer: MegatronOptimizer) -> bool:
    """Return whether losses are scaled. If so, the step itself looks for infinite gradients, before there is a norm."""
    return bool(grad_scalers(optimizer))


@torch.no_grad()
def statistics(optimizer: MegatronOptimizer, count_zeros: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Prepare the gradients; return the squared norms [1] of the model's parts, and the numbers [1] of their zeros.

    All ranks call this after gradients are reduced. It changes no weight and does not wait for the device. If losses
    are scaled, it does and returns nothing.
    """
    if scales_losses(optimizer):
        return [], []
    whole: Any = optimizer
    whole.prepare_grads()
    gradients = [(_gradients(parts), group) for parts, group in _together(optimizer)]
    norms = [_squared_norm(own, group) for own, group in gradients]
    return norms, [_zeros(own, group) for own, group in gradients if count_zeros]


@torch.no_grad()
def squared_parameter_norms(optimizer: MegatronOptimizer) -> torch.Tensor:
    """Return the squared norms [parts] of the (main) parameters after a step, without a wait; every rank calls it."""
    return torch.cat([_squared_norm(_parameters(parts), group) for parts, group in _together(optimizer)])


def step(
    optimizer: MegatronOptimizer, squares: Sequence[float], zeros: Sequence[float] | None = None
) -> tuple[bool, float | None, float | None]:
    """Step the optimizer; return whether it did, the gradient norm, and the number of zeros in the gradients.

    `squares` and `zeros` are the results of `statistics` in this iteration, on the host; None: zeros are not counted.
    """
    whole: Any = optimizer
    scaled = scales_losses(optimizer)
    given: dict[str, Any]
    if scaled:
        given = {"prepare_grads": lambda: _prepare_scaled_gradients(whole)}
    else:
        norm = squares[0] ** 0.5 if len(squares) == 1 else math.sqrt(sum((square**0.5) ** 2 for square in squares))
        given = {"prepare_grads": lambda: False, "get_grad_norm": lambda: norm}
    # With scaled losses, megatron-core itself counts zeros, and waits for the result
    if zeros is None or not scaled:
        count = None if zeros is None else sum(zeros)
        given["count_zeros"] = lambda: count
    vars(whole).update(given)
    try:
        stepped, norm, counted = whole.step()
    finally:
        for name in given:
            delattr(whole, name)
    # Some optimizers return 0 where zeros were not requested
    return stepped, norm, None if zeros is None else counted


def _prepare_scaled_gradients(whole: Any) -> bool:
    """Divide the gradients by the loss scale, adapt it, and return whether any gradient is infinite or NaN.

    Losses are multiplied by the scale of the first part. megatron-core's prepare_grads adapts each part's scale to that
    part's own gradients. After an overflow in one part, the gradients of the others would be divided by a different
    number than the loss was multiplied by. Therefore, all parts get the same scale here.
    """
    scalers = grad_scalers(whole)
    before = scalers[0].state_dict()
    infinite = type(whole).prepare_grads(whole)
    scalers[0].load_state_dict(before)
    scalers[0].update(infinite)
    for other in scalers[1:]:
        other.load_state_dict(scalers[0].state_dict())
    return infinite


def _together(optimizer: MegatronOptimizer) -> list[tuple[list[Any], dist.ProcessGroup]]:
    """Return the parts whose statistics are summed together, with the group that sums them."""
    whole: Any = optimizer
    parts = whole.chained_optimizers
    together = [parts] if whole.grads_states_parallel_group_is_shared() else [[part] for part in parts]
    return [(some, some[0].get_grad_stats_parallel_group()) for some in together]


def _parameters(parts: Sequence[Any]) -> list[torch.Tensor]:
    found = []
    for part in parts:
        # Since 0.19, megatron-core distinguishes the groups that hold copies of experts
        groups = {name: getattr(part, name) for name in ("tp_group", "expert_tp_group") if hasattr(part, name)}
        for parameter in part.get_parameters():
            if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, **groups):
                found.append(parameter.detach())
    return found


def _gradients(parts: Sequence[Any]) -> list[torch.Tensor]:
    """Return the gradients that count on this rank; since 0.19, megatron-core can exclude some from the norm."""
    newer = hasattr(parts[0], "get_grads_for_grad_norm")
    name = "get_grads_for_grad_norm" if newer else "get_main_grads_for_grad_norm"
    return [gradient for part in parts for gradient in getattr(part, name)()]


def _zeros(gradients: Sequence[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the number [1] of zeros in all ranks' gradients, counted as by `clip_grads.count_zeros_fp32`."""
    total = torch.zeros(1, device=torch.cuda.current_device())
    for gradient in gradients:
        total += gradient.numel() - torch.count_nonzero(gradient)
    dist.all_reduce(total, group=group)
    return total


def _squared_norm(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the squared norm [1] of all ranks' tensors, computed as by `clip_grads.get_grad_norm_fp32`."""
    device = torch.cuda.current_device()
    norm = torch.zeros(1, device=device)
    if tensors:
        overflow = torch.zeros(1, dtype=torch.int, device=device)
        norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [tensors], False)
    square = norm**2.0
    dist.all_reduce(square, group=group)
    return square
