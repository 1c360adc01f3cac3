"""Choices of experts that do not come from the router: synthetic workloads, and the routing of an earlier run."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron_balance.build.wiring import Wiring
from megatron_balance.config.run_config import RunConfig
from megatron_balance.device.versions import number_of
from megatron_balance.flow.routers import routers_of
from megatron_balance.training.logging import moe_layer_pattern
from megatron_balance.workloads.forced_routing import BatchPart, force_routing
from megatron_balance.workloads.replay import RecordedChoices, ReplayedModel, replay_routing


def batch_part(wiring: Wiring) -> BatchPart:
    """Return the tokens of a global batch that this rank's routers see."""
    config = wiring.config
    divided = wiring.dispatch.splits_tokens or config.transformer.sequence_parallel
    return BatchPart.of(wiring.groups, config.model.seq_length, divided)


def force_workload(wiring: Wiring, model: Sequence[torch.nn.Module], microbatches: Callable[[], int]) -> None:
    """Let `--moe-router-force-workload` choose the experts; `microbatches` as in `build_balancer`."""
    config = wiring.config
    name = config.balance.moe_router_force_workload
    if name == "none":
        return
    force_routing(
        model,
        name,
        batch_part(wiring),
        seed=config.train.seed,
        step=lambda: wiring.progress.iteration,
        microbatches=microbatches,
    )


def replay(wiring: Wiring, model: Sequence[torch.nn.Module], microbatches: Callable[[], int]) -> RecordedChoices | None:
    """Let the trace of `--moe-routing-replay-path` choose the experts; `microbatches` as in `build_balancer`."""
    progress = wiring.progress
    layers = [number_of(router) for router in routers_of(model)]
    recorded = read_recorded(wiring.config, layers, lambda: progress.consumed_samples)
    if recorded is not None:
        part = batch_part(wiring)
        replay_routing(model, recorded, part, step=lambda: progress.iteration, microbatches=microbatches)
    return recorded


def read_recorded(
    config: RunConfig, layers: Sequence[int] = (), consumed: Callable[[], int] = int
) -> RecordedChoices | None:
    """Return the choices that the run repeats; arguments and errors as those of `RecordedChoices`."""
    directory = config.balance.moe_routing_replay_path
    shape = config.transformer
    if directory is None or shape.num_moe_experts is None:
        return None
    model = ReplayedModel(
        layers=frozenset(number for number, moe in enumerate(moe_layer_pattern(shape), 1) if moe),
        num_experts=shape.num_moe_experts,
        topk=shape.moe_router_topk,
        seq_length=config.model.seq_length,
    )
    return RecordedChoices(Path(directory), model, layers, consumed)
