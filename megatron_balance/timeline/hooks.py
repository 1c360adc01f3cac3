"""Hooks that call the balancer when each computation of its schedule begins.

Only this file attaches balancing to megatron-core's modules, to its schedules and to DDP.

| computation begins                | when                                                                      |
|-----------------------------------|---------------------------------------------------------------------------|
| FNEC of a chunk's start           | the chunk is called                                                       |
| A2A.1, A2A.2: dispatch, combine   | the layer asks for its placement; its experts have computed all chunks    |
| FEC                               | the experts are about to compute the first chunk                          |
| FNEC                              | the layer returns                                                         |
| BNEC of a chunk's last block      | the gradient of the chunk's output is complete                            |
| A2A.3, A2A.4: their gradients     | the gradient of the layer's output is complete; experts have all chunks'  |
| BEC                               | the experts are about to compute the first chunk's gradients              |
| BNEC of the block before          | the gradients of the layer's input and of its experts are complete        |
| REDUCE, STEP                      | megatron-core begins to finalize gradients; has finalized them            |
"""

import functools
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.timeline.actions import Operation, chunk_start
from megatron_balance.timeline.lower import Pass, one_forward_one_backward
from megatron_balance.timeline.runtime import Balancer

COMPUTATIONS = {
    "experts": (Operation.FEC,),
    "combine": (Operation.A2A, 2, 4),
    "experts_backward": (Operation.BEC,),
    "dispatch_backward": (Operation.A2A, 4, 4),
}
"""Argument of a layer's `begin` -> the computation that begins."""


def stage_passes(config: TransformerConfig, stage: int, microbatches: int) -> list[Pass]:
    """Return the order of microbatches in megatron-core's schedules on a pipeline stage."""
    stages = config.pipeline_model_parallel_size
    chunks = config.virtual_pipeline_model_parallel_size
    paired = config.overlap_moe_expert_parallel_comm
    if chunks is None:
        table = [(0, microbatch) for microbatch in range(microbatches)]
        return one_forward_one_backward(table, 1, stages - stage - 1, paired)
    group = config.microbatch_group_size_per_vp_stage
    assert group is not None
    table = [(chunk, microbatch) for microbatch, chunk in get_schedule_table(microbatches, chunks, group)]
    return one_forward_one_backward(table, chunks, 2 * (stages - stage - 1) + (chunks - 1) * group, paired)


def install(
    balancer: Balancer, layers: Mapping[int, Any], model: list[DistributedDataParallel], config: TransformerConfig
) -> None:
    """Attach the balancer to `layers` (by layer number, ascending in each chunk), to the chunks of `model` in DDP, and
    to the `finalize_model_grads_func` of `config`, which the schedules call."""
    for index, chunk in enumerate(model):
        modules = set(chunk.modules())
        numbers = [number for number, layer in layers.items() if layer in modules]
        if not numbers:
            continue
        start = chunk_start(index)
        _follow_chunk(balancer, start, numbers[-1], chunk)
        for before, number in pairwise([start, *numbers]):
            _follow_layer(balancer, before, number, layers[number])
    _reduce_after_agg(balancer, layers, model)
    _gather_once(model)
    finalize = config.finalize_model_grads_func
    assert finalize is not None

    @functools.wraps(finalize)
    def aggregate_and_finalize(*args: Any, **kwargs: Any) -> Any:
        balancer.aggregate()
        result = finalize(*args, **kwargs)
        balancer.finish_iteration()
        return result

    config.finalize_model_grads_func = aggregate_and_finalize


def _follow_chunk(balancer: Balancer, start: int, last: int, chunk: torch.nn.Module) -> None:
    def called(module: torch.nn.Module, inputs: Any) -> None:
        balancer.aside = not (module.training and torch.is_grad_enabled())
        balancer.enter(start, Operation.FNEC)

    def returned(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        _on_gradient(output, balancer, last, Operation.BNEC)
        balancer.aside = False

    chunk.register_forward_pre_hook(called)
    chunk.register_forward_hook(returned)


def _follow_layer(balancer: Balancer, before: int, number: int, layer: Any) -> None:
    def called(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        _on_gradient(inputs[0], balancer, before, Operation.BNEC)

    def returned(module: torch.nn.Module, inputs: Any, outputs: tuple[torch.Tensor, None]) -> None:
        balancer.enter(number, Operation.FNEC)
        _on_gradient(outputs[0], balancer, number, Operation.A2A, 3, 4)

    layer.host = functools.partial(balancer.host, number)
    others = layer.begin

    def begin(work: str) -> None:
        others(work)
        if work in COMPUTATIONS:
            balancer.enter(number, *COMPUTATIONS[work])

    layer.begin = begin
    layer.register_forward_pre_hook(called)
    layer.register_forward_hook(returned)


def _on_gradient(tensor: torch.Tensor, balancer: Balancer, *computation: Any) -> None:
    """Begin a computation when a tensor's gradient is complete, except in passes without a backward pass."""
    if tensor.requires_grad and not balancer.aside:
        tensor.register_hook(lambda gradient: balancer.enter(*computation))


def _reduce_after_agg(balancer: Balancer, layers: Mapping[int, Any], model: list[DistributedDataParallel]) -> None:
    """Delay DDP's overlapped reduction of each group of expert gradients until the Aggs of its layers are complete."""
    layers_of: dict[Any, set[int]] = {}
    for chunk in model:
        if not chunk.ddp_config.overlap_grad_reduce:
            continue
        for group in chunk.expert_parallel_bucket_groups:
            parameters = {parameter for bucket in group.buckets for parameter in bucket.params}
            numbers = {
                number for number, layer in layers.items() if not parameters.isdisjoint(layer.experts.parameters())
            }
            # In other programs, there may also be experts of megatron-core's own layers
            if numbers:
                layers_of[group] = numbers
                group.start_grad_sync = lambda *_, **__: None
    missing = {group: set(numbers) for group, numbers in layers_of.items()}

    def aggregated(number: int) -> None:
        for group in [group for group, numbers in missing.items() if number in numbers]:
            missing[group].remove(number)
            if not missing[group]:
                missing[group] = set(layers_of[group])
                type(group).start_grad_sync(group)

    balancer.aggregated = aggregated


def _gather_once(model: list[DistributedDataParallel]) -> None:
    """Let DDP all-gather each bucket of expert parameters once per iteration. A Trans may need the parameters before
    megatron-core's interleaved schedule starts their all-gather. The Trans then starts it. A second all-gather would
    overwrite parameters that the Trans is still sending."""
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:
            for group in chunk.expert_parallel_bucket_groups:
                group.start_param_sync = functools.partial(_start_param_sync, group)


def _start_param_sync(group: Any, force_sync: bool = False) -> None:
    if force_sync or not group.param_gather_dispatched:
        type(group).start_param_sync(group, force_sync)
