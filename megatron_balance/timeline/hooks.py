"""Where Plan, Trans and Agg find their moment: the only place where balancing touches megatron-core's hooks and DDP."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.device import clock
from megatron_balance.timeline.runtime import Balancer


def install(
    balancer: Balancer, layers: Mapping[int, Any], model: list[DistributedDataParallel], config: TransformerConfig
) -> None:
    """Let the balancer act in every iteration of megatron-core's schedules.

    Args:
        balancer: of this rank's layers.
        layers: the MoE layers themselves, by layer number; each calls its `host` in every forward pass.
        model: chunks in DDP.
        config: the schedules read `finalize_model_grads_func` from it, which has to be set already.
    """
    for number, layer in layers.items():
        layer.host = functools.partial(balancer.host, number)
        _time(layer, balancer.layers[number].note)
    assert config.finalize_model_grads_func is not None
    config.finalize_model_grads_func = _aggregating(balancer, config.finalize_model_grads_func, _held(model))


def _aggregating(balancer: Balancer, finalize: Callable, held: list[Any]) -> Callable:
    @functools.wraps(finalize)
    def aggregate_and_finalize(*args: Any, **kwargs: Any) -> Any:
        balancer.aggregate()
        for group in held:
            type(group).start_grad_sync(group)
        result = finalize(*args, **kwargs)
        balancer.finish_iteration()
        return result

    return aggregate_and_finalize


def _held(model: list[DistributedDataParallel]) -> list[Any]:
    """DDP's groups of expert gradients, kept from being reduced under the backward pass: Agg has to come first."""
    groups = [
        group
        for chunk in model
        if chunk.ddp_config.overlap_grad_reduce
        for group in chunk.expert_parallel_bucket_groups
    ]
    for group in groups:
        group.start_grad_sync = lambda *_, **__: None
    return groups


def _time(layer: torch.nn.Module, note: Callable[[clock.Mark, clock.Mark], None]) -> None:
    """Note when a layer's forward and backward passes begin and end, of those passes that have a backward."""
    started: list[clock.Mark] = []

    def before(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if module.training and torch.is_grad_enabled():
            started.append(clock.mark())

    def after(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        if not started:
            return
        note(started.pop(), clock.mark())
        if inputs[0].requires_grad:
            backward: list[clock.Mark] = []
            outputs[0].register_hook(lambda gradient: backward.append(clock.mark()))
            inputs[0].register_hook(lambda gradient: note(backward.pop(), clock.mark()))

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after)
