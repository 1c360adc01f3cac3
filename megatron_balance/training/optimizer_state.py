"""State that megatron-core's optimizers keep for a parameter, with or without the distributed optimizer."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from megatron_balance.comm.ownership_transfer import Field, Interval

NOTHING = "nothing"
"""Key of the state of an optimizer without parameters."""

HALF = (torch.float16, torch.bfloat16)
"""Precisions of parameters that have main parameters in float32."""


def optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that step parameters of this rank."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in chained if not getattr(part, "is_stub_optimizer", False)]


def grad_scalers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return megatron-core's loss scalers of all parts, with or without parameters; none if losses are not scaled."""
    whole: Any = optimizer
    scalers = (getattr(part, "grad_scaler", None) for part in whole.chained_optimizers)
    return [scaler for scaler in scalers if scaler is not None]


def state_names(inner: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the tensors that Adam, SGD or Muon keeps for a parameter, all of its size."""
    group = inner.param_groups[0]
    if "betas" in group:
        return "exp_avg", "exp_avg_sq"
    # Muon's momentum has this name before version 0.2 of its package
    return ("momentum_buffer",) if group.get("momentum") or "momentum_beta" in group else ()


def tell_groups_apart(optimizer: MegatronOptimizer) -> None:
    """Mark parameter groups that have their own learning rate, because megatron-core 0.16 would mix them up."""
    if "max_lr" in param_group_identifier_keys:
        return
    for group in optimizer.param_groups:
        group["is_decoupled_lr"] = not group["default_config"]


def allocate(optimizer: MegatronOptimizer) -> None:
    """Allocate the state that optimizers have after a step, because a run that skipped every step also saves it."""
    for part in optimizers(optimizer):
        if part.init_state_fn is None:
            # megatron-core calls this function even if there is none, as for SGD
            part.init_state_fn = lambda *_: None
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                _allocate(part.optimizer, parameter)
        if isinstance(part.optimizer, torch.optim.Adam) and not part.optimizer.state:
            # For example on a stage without experts: the distributed optimizer requires Adam's step there, too
            cast(dict, part.optimizer.state)[NOTHING] = {"step": torch.tensor(0.0)}


def _allocate(inner: Any, parameter: torch.Tensor) -> None:
    state = inner.state[parameter]
    if hasattr(inner, "initialize_state"):
        # Transformer Engine's FusedAdam may also keep main parameters, and each tensor in its own precision. It takes
        # any non-empty state to be complete
        if not state:
            inner.initialize_state(parameter, inner.store_param_remainders and parameter.dtype == torch.bfloat16)
        return
    if isinstance(inner, torch.optim.Adam):
        state.setdefault("step", torch.tensor(0.0))
    for name in state_names(inner):
        state.setdefault(name, torch.zeros_like(parameter))


def fuse(optimizer: MegatronOptimizer) -> None:
    """Let torch's Adam update a CPU parameter in one pass over memory; parameters are too large for the caches."""
    for part in optimizers(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam):
            for group in part.optimizer.param_groups:
                group["fused"] = all(parameter.is_cpu for parameter in group["params"]) or group["fused"]


def expert_fields(
    optimizer: MegatronOptimizer, parameters: Sequence[torch.nn.Parameter], gathered_late: bool
) -> list[Field]:
    """Return all tensors that must move with the experts in `parameters` [S, ...]: the same fields on every rank.

    `gathered_late`: only the optimizer's shard of them is up to date between steps (`--overlap-param-gather`).
    """
    allocate(optimizer)
    return [field for parameter in parameters for field in _fields(optimizer, parameter, gathered_late)]


def state_bytes(optimizer: MegatronOptimizer, parameters: Sequence[torch.nn.Parameter], sharers: int) -> float:
    """Return the bytes of the parameters, and of their optimizer state on each rank if `sharers` ranks share it."""
    names = state_names(optimizers(optimizer)[0].optimizer)
    total = 0.0
    for parameter in parameters:
        tensors = len(names) + (parameter.dtype in HALF)
        total += parameter.nbytes + 4 * parameter.numel() * tensors / sharers
    return total


def _fields(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter, gathered_late: bool) -> Iterator[Field]:
    values = parameter.data.view(-1)
    slot_size = parameter.numel() // len(parameter)
    kept, state = _kept_state(optimizer, parameter)
    up_to_date = kept if gathered_late else (0, len(values))
    yield Field(slot_size, up_to_date, values[slice(*up_to_date)])
    yield from (Field(slot_size, kept, tensor.view(-1)) for tensor in state)


def _kept_state(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter) -> tuple[Interval, Sequence[torch.Tensor]]:
    """Return the range of a parameter's elements that this rank steps, and its main parameter and optimizer state."""
    half = parameter.dtype in HALF
    parts = optimizers(optimizer)
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            if parameter not in part.model_param_gbuf_map:
                continue
            kept = part._get_model_param_range_map(parameter)["param"]
            group, index = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][index]
            interval = (kept.start, kept.end)
        else:
            main = parameter.main_param if half else parameter  # pyright: ignore[reportAttributeAccessIssue]
            interval = (0, parameter.numel())
            if all(main is not other for group in part.optimizer.param_groups for other in group["params"]):
                continue
        state = [part.optimizer.state[main][name] for name in state_names(part.optimizer)]
        # In full precision, the main parameter is the parameter itself
        return interval, [main.data, *state] if half else state
    nothing = parameter.new_empty(0, dtype=torch.float32)
    return (0, 0), [nothing] * (half + len(state_names(parts[0].optimizer)))
