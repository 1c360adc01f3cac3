"""The state of a run that a checkpoint holds, as megatron-core's sharded state dict, and its restoration.

Weights and optimizer state are named by global layer and logical expert, so a run may resume on another layout. State
that is only valid on the same layout is stored per rank, such as random number generators, or per group of ranks.
"""

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from megatron_balance.config.run_config import RunConfig
from megatron_balance.planning.policies import policy_options
from megatron_balance.training.optimizer_state import allocate, grad_scalers, optimizers
from megatron_balance.training.run import Run

CONTENT = {
    # The default form of the distributed optimizer's state raises in megatron-core 0.16.1
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""Metadata that selects how megatron-core names and shards the state."""

Parts = frozenset[str]
"""The parts saved or loaded in addition to the weights: a subset of `optimizer`, `rng`, `balancer` and `chunks`."""


def layout(config: RunConfig) -> dict[str, Any]:
    """Return the parallel sizes, and unusual layers or ranks of stages: equal if per-rank state is to be valid."""
    transformer = config.transformer
    stages = transformer.pipeline_model_parallel_layout
    return {
        **({} if stages is None else {"stages": str(stages)}),
        **({"order": "stages before replicas"} if config.launch.use_tp_pp_dp_mapping else {}),
        "world_size": dist.get_world_size(),
        "tensor": transformer.tensor_model_parallel_size,
        "pipeline": transformer.pipeline_model_parallel_size,
        "virtual_pipeline": transformer.virtual_pipeline_model_parallel_size or 1,
        "context": transformer.context_parallel_size,
        "expert": transformer.expert_model_parallel_size,
        "expert_tensor": transformer.expert_tensor_parallel_size,
    }


def balance(config: RunConfig) -> dict[str, Any]:
    """Return the settings that must be equal for placements and predictions to continue."""
    settings = config.balance
    names = ("policy", "guest_slots", "interval", "load", "predictor", "token_split", "ownership")
    options = policy_options(settings.balance_policy, vars(settings))
    return layout(config) | options | {name: getattr(settings, f"balance_{name}") for name in names}


def common_state(run: Run, parts: Parts) -> dict[str, Any]:
    """Return the state that is the same on every rank: numbers, strings and a few scalar tensors."""
    progress = run.progress
    state = {
        "checkpoint_version": 3.0,
        "iteration": progress.iteration,
        "consumed_samples": progress.consumed_samples,
        "consumed_valid_samples": progress.consumed_valid_samples,
        "opt_param_scheduler": run.scheduler.state_dict(),
        "layout": layout(run.config),
        "balance": balance(run.config),
        "comm": dataclasses.asdict(run.config.comm),
        "parts": sorted(parts),
    }
    if "optimizer" in parts:
        state["optimizer_step"] = _step(run.optimizer)
        # All parts of the optimizer have the same loss scale
        state["grad_scaler"] = next((scaler.state_dict() for scaler in grad_scalers(run.optimizer)), None)
    return state


def sharded_state(run: Run, parts: Parts, is_loading: bool) -> ShardedStateDict:
    """Return this rank's shards of all parts except `balancer`; collective if the optimizer is distributed."""
    metadata = CONTENT | {"dp_cp_group": run.groups.dp_cp}
    if run.config.ddp.overlap_param_gather and not is_loading:
        # Each rank has updated only the parameters of its own shard; the next forward pass would gather the others
        for chunk in run.model:
            chunk.start_param_sync(force_sync=True)
    modules = unwrap_model(run.model)
    # Virtual pipeline chunks need separate keys in this dict; their tensors' keys in the checkpoint are distinct anyway
    models = {f"model{index}": module.sharded_state_dict(metadata=metadata) for index, module in enumerate(modules)}
    for model in models.values():
        # State of 8-bit training, which is not supported. Without it, all layer types have the same keys
        model.update({name: LocalNonpersistentObject(None) for name in model if name.endswith("_extra_state")})
    state: dict[str, Any] = dict(models)
    if "optimizer" in parts:
        allocate(run.optimizer)
        with _optimizer_patched(run.optimizer):
            optimizer = run.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=metadata)
        half = run.config.transformer.bf16 or run.config.transformer.fp16
        _name_main_parameters(optimizer, models, half, is_loading)
        # Hyperparameters come from the flags, and their structure depends on the layout. megatron-core would drop empty
        # dicts and lists, such as those of a stage without parameters, and move the others to their places
        state["optimizer"] = LocalNonpersistentObject(dict_list_map_inplace(_unwrapped, optimizer))
        state["optimizer_shards"] = {index: shard for index, (_, _, shard) in enumerate(_shards(optimizer))}
    if "chunks" in parts:
        assert run.chunks is not None
        state["chunks"] = _per_rank_object("chunks", run.chunks.state())
    if "rng" in parts:
        state["rng_state"] = _per_rank_object("rng_state", random_states())
    # Without the empty ones of a stage or chunk without parameters, which would be part of the common state
    return {name: part for name, part in state.items() if part}


def keep_own_biases(state: dict[str, Any], kind: str) -> None:
    """Let routers keep their expert biases, which are zero, because the checkpoint has none. `kind` is the name of the
    buffer: `expert_bias`, or `qb_beta` of quantile balancing."""
    for name, model in state.items():
        if name.startswith("model"):
            biases = {key: shard for key, shard in model.items() if key.endswith(f".router.{kind}")}
            model.update({key: LocalNonpersistentObject(shard.data) for key, shard in biases.items()})


@contextlib.contextmanager
def _optimizer_patched(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Inside the block, mend how megatron-core describes an optimizer's state.

    It writes the `repr` of shards to a debug log, where a value would sync the device.

    It removes the padding at the end of each of the distributed optimizer's buckets, but then looks for parameters at
    their places in the padded buffer: all parameters behind a padded bucket would get the state of their neighbors.
    """
    with contextlib.ExitStack() as stack:
        for kind in (ShardedTensor, ShardedTensorFactory):
            stack.enter_context(mock.patch.object(kind, "__repr__", lambda shard: shard.key))
        for buffer in (buffer for part in optimizers(optimizer) for buffer in getattr(part, "buffers", ())):
            stack.enter_context(mock.patch.object(buffer, "numel_unpadded", buffer.numel))
            for bucket in buffer.buckets:
                stack.enter_context(mock.patch.object(bucket, "numel_unpadded", bucket.grad_data.numel()))
        yield


def balancer_state(run: Run) -> ShardedStateDict:
    """Return the placements and predictions of this rank's layers, which are loaded first: they place the experts.
    Ranks that share a placement also predict the same loads, so the first of them saves both for all."""
    assert run.balancer is not None
    group = run.balancer.deciders
    first = min(dist.get_process_group_ranks(group))
    rank = group.rank()
    state = None if rank else run.balancer.state()
    return {"balancer": ShardedObject(f"balancer.{first}", state, (1,), (0,), replica_id=rank)}


def _per_rank_object(name: str, value: Any) -> ShardedObject:
    return ShardedObject(name, value, (dist.get_world_size(),), (dist.get_rank(),))


def restore(run: Run, loaded: dict[str, Any], parts: Parts, weights_only: bool) -> None:
    """Restore the run from what `dist_checkpointing.load` returned for `sharded_state`. With `weights_only`, the run
    starts at iteration 0 with these weights."""
    for index, module in enumerate(unwrap_model(run.model)):
        module.load_state_dict(loaded.get(f"model{index}", {}), strict=True)
    if "optimizer" in parts:
        optimizer = loaded["optimizer"]
        values = loaded.get("optimizer_shards", {})
        for index, (holder, key, _) in enumerate([*_shards(optimizer)]):
            holder[key] = values[index]
        _load_optimizer(run.optimizer, optimizer, loaded["optimizer_step"])
        for scaler in grad_scalers(run.optimizer):
            if loaded["grad_scaler"] is not None:
                scaler.load_state_dict(loaded["grad_scaler"])
    else:
        run.optimizer.reload_model_params()
    if "chunks" in parts:
        assert run.chunks is not None
        run.chunks.restore(loaded["chunks"])
    if "rng" in parts:
        set_random_states(loaded["rng_state"])
    if not weights_only:
        # Like upstream, --no-load-optim also starts the schedule of the learning rate afresh
        if not run.config.checkpoint.no_load_optim:
            run.scheduler.load_state_dict(loaded["opt_param_scheduler"])
        run.progress.iteration = loaded["iteration"]
        run.progress.consumed_samples = loaded["consumed_samples"]
        run.progress.consumed_valid_samples = loaded["consumed_valid_samples"]


def random_states() -> dict[str, Any]:
    """Return the states of all of this rank's generators, in plain containers and tensors."""
    algorithm, keys, *rest = cast(tuple, np.random.get_state())
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    return {
        "python": random.getstate(),
        "numpy": (str(algorithm), torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": dict(tracker.get_states()),
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Set all of this rank's generators: the inverse of `random_states`."""
    random.setstate(states["python"])
    algorithm, keys, *rest = states["numpy"]
    np.random.set_state((algorithm, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    torch.cuda.set_rng_state(states["cuda"])
    tracker: Any = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states(states["tracker"])


def _unwrapped(value: Any) -> Any:
    return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value


def _shards(state: Any) -> Iterator[tuple[Any, Any, ShardedBase | ShardedTensorFactory]]:
    """Yield each shard in nested dicts and lists, after the dict or list that holds it and its key there."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    for key, value in items:
        if isinstance(value, ShardedBase | ShardedTensorFactory):
            yield state, key, value
        else:
            yield from _shards(value)


def _step(optimizer: MegatronOptimizer) -> int:
    """Return the number of steps that Adam's bias correction has counted; 0 before the first, and with SGD."""
    steps = {0}
    for part in optimizers(optimizer):
        states = (*part.optimizer.state.values(), *part.optimizer.param_groups)
        steps |= {int(state["step"]) for state in states if "step" in state}
    return max(steps)


def _name_main_parameters(optimizer: dict, models: dict, half: bool, is_loading: bool) -> None:
    """Name the distributed optimizer's main parameters as other optimizers do, so that a resumed run may switch:
    `fp32_param` in half precision; otherwise they are the weights, which are saved already."""
    prefix = "optimizer.state.param."
    weights = {
        _shard_key(shard, shard.key): shard.data
        for shard in nested_values(models)
        if isinstance(shard, ShardedTensor | ShardedTensorFactory)
    }
    for part in (optimizer, *(value for value in optimizer.values() if isinstance(value, dict))):
        for tensors in (part.get("param_state") or {}).values():
            shard = tensors.pop("param")
            name = shard.key.removeprefix(prefix)
            if half:
                tensors["param"] = dataclasses.replace(shard, key=f"optimizer.state.fp32_param.{name}")
            elif is_loading:
                tensors["param"] = weights[_shard_key(shard, name)]


def _shard_key(shard: ShardedTensor | ShardedTensorFactory, name: str) -> tuple:
    """Return a key that is unique among this rank's shards; the name alone is not, because layers share names."""
    return name, shard.build_fn if isinstance(shard, ShardedTensorFactory) else shard.global_offset


def _load_optimizer(optimizer: MegatronOptimizer, state: dict, step: int) -> None:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for index, part in enumerate(parts):
        if part not in optimizers(optimizer):
            continue
        part_state = state if len(parts) == 1 else state[index]
        inner = part.optimizer
        shards = part_state.pop("param_state", None)
        # Float16 and distributed optimizers wrap the inner optimizer's state dict
        _insert_step(part_state.get("optimizer", part_state), step, inner)
        part.load_state_dict(part_state)
        if shards is not None:
            for parameter_state in inner.state.values():
                # megatron-core 0.16.1 would look for torch's step among the shards
                parameter_state.pop("step", None)
            part.load_parameter_state_from_fully_reshardable(shards)
        if isinstance(inner, torch.optim.Adam):
            for parameter_state in inner.state.values():
                # One tensor each: torch counts in place
                parameter_state["step"] = torch.tensor(float(step))


def _insert_step(state: dict, step: int, inner: torch.optim.Optimizer) -> None:
    """Insert the step count where megatron-core, or the inner optimizer, expects it in an optimizer's state dict."""
    per_parameter = isinstance(inner, torch.optim.Adam)
    for group in state["param_groups"]:
        # Fused optimizers count per group, from their first step on
        if "step" in group or ("betas" in group and not per_parameter):
            group["step"] = step
    if per_parameter and "state" in state:
        state["state"]["common_step"] = torch.tensor(float(step))
