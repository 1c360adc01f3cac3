"""Wiring: the values that a run's layers, hooks and balancer share on this rank.

configuration, groups -> Profiles -> ParallelDispatch -> TokenExchange -> ChunkChoice
"""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_balance.build.profiles import (
    Profiles,
    first_rank_log,
    layer_shape,
    routing_of,
    schedule_choices,
)
from megatron_balance.comm.codecs import load_codec
from megatron_balance.comm.compressed import TokenExchange, token_exchange
from megatron_balance.comm.registry import CopiesCase, exchange_models, load_all_to_all
from megatron_balance.config.run_config import RunConfig
from megatron_balance.cost.flex import FlexModel
from megatron_balance.cost.model import CostModel
from megatron_balance.device.host_memory import HostReader
from megatron_balance.flow.chunks.choice import ByMiniTasks, ByPrediction, ChunkChoice, Decide, TaskModel, find_degrees
from megatron_balance.flow.chunks.order import find_order
from megatron_balance.flow.parallel_schedule import SCHEDULES, ParallelDispatch
from megatron_balance.flow.schedule_choice import ScheduleModel
from megatron_balance.job.groups import Topology, new_node_groups, new_twin
from megatron_balance.planning.policies import load_policy, policy_options
from megatron_balance.training.progress import Progress


@dataclass(frozen=True, kw_only=True, eq=False)
class Wiring:
    """Shared values of a run's parts. Only `progress` and the state inside the objects change."""

    config: RunConfig
    groups: ProcessGroupCollection

    profiles: Profiles
    """Speed of the cluster; the first access reads or measures it."""

    dispatch: ParallelDispatch
    """The steps that tokens take through an MoE layer."""

    exchange: TokenExchange
    """The all-to-alls that all layers share."""

    reader: HostReader
    """Brings the loads of all layers to the host."""

    chunks: ChunkChoice | None
    """Splits the tokens of all layers into chunks; None: tokens are not split."""

    progress: Progress


def build_wiring(config: RunConfig, groups: ProcessGroupCollection, progress: Progress) -> Wiring:
    """Build the wiring; every rank calls it. ValueError: an all-to-all, codec, order or profile does not fit."""
    world_size = dist.get_world_size()
    profiles = Profiles(config, groups, Topology(world_size, config.comm.moe_comm_node_size or world_size))
    dispatch = _dispatch(profiles)
    exchange = _exchange(profiles, dispatch)
    return Wiring(
        config=config,
        groups=groups,
        profiles=profiles,
        dispatch=dispatch,
        exchange=exchange,
        reader=HostReader(),
        chunks=_chunk_choice(profiles, dispatch, exchange, progress),
        progress=progress,
    )


def _dispatch(profiles: Profiles) -> ParallelDispatch:
    config = profiles.config
    groups = profiles.groups
    schedule = config.comm.moe_parallel_schedule
    if schedule == "auto":
        schedule = _faster_schedule(profiles)
    overlaps = schedule == "s2" and groups.tp.size() > 1 and _is_simultaneous(config)
    # All-gathers of s2 overlap with its all-to-all (SAA), so they have a group of their own
    saa_group = new_twin(groups.tp, config.launch.distributed_timeout_minutes) if overlaps else None
    return ParallelDispatch(SCHEDULES[schedule], groups, config.transformer.sequence_parallel, saa_group)


def _is_simultaneous(config: RunConfig) -> bool:
    """Return whether s2 forwards results while it still receives others (SAA)."""
    comm = config.comm
    # SAA sends whole rows in separate messages
    simple = comm.moe_comm_codec == "none" and comm.moe_comm_alltoall in ("default", "p2p", "pipe")
    return comm.moe_parallel_saa and simple


def _faster_schedule(profiles: Profiles) -> str:
    """Return the schedule predicted to be the fastest for the run's MoE layers, which all have one shape."""
    config = profiles.config
    groups = profiles.groups
    log = first_rank_log() or (lambda line: None)
    names = schedule_choices(config, groups)
    if len(names) == 1:
        log(f"--moe-parallel-schedule auto: {names[0]}, because the schedules do not differ in this layout")
        return names[0]
    shape = layer_shape(config, groups)
    itemsize = config.transformer.params_dtype.itemsize
    model = ScheduleModel(profiles.of(groups.tp_ep), shape.mp, shape.esp)
    overlapped = _is_simultaneous(config)
    seconds = {name: model.seconds(name, shape, itemsize, overlapped) for name in names}
    chosen = min(seconds, key=seconds.__getitem__)
    times = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in seconds.items())
    log(f"--moe-parallel-schedule auto: {chosen} (predicted exchanges of a layer's forward pass: {times})")
    return chosen


def _exchange(profiles: Profiles, dispatch: ParallelDispatch) -> TokenExchange:
    comm = profiles.config.comm
    group = dispatch.exchange_group
    minutes = profiles.config.launch.distributed_timeout_minutes
    # DEMI's chunks, and ranks in s2, divide the rows of one token. Copies have no memory of constant size
    can_copy = find_order(comm.moe_comm_order) is not None and not dispatch.splits_rows
    can_copy = can_copy and profiles.config.balance.balance_certify is None
    all_to_all = load_all_to_all(
        comm.moe_comm_alltoall,
        group,
        # Lazy: only some all-to-alls need the groups of nodes or a profile, and creating either is collective
        nodes=lambda: new_node_groups(group, profiles.node_size(group), minutes),
        profile=lambda: profiles.of(group),
        log=first_rank_log(),
        copies=(lambda: _copies_case(profiles, dispatch)) if can_copy else None,
    )
    return token_exchange(all_to_all, load_codec(comm.moe_comm_codec), comm.moe_comm_codec_directions)


def _copies_case(profiles: Profiles, dispatch: ParallelDispatch) -> CopiesCase:
    """Return the model of `dedup`, and the rows that a rank exchanges."""
    config = profiles.config
    transformer = config.transformer
    group = dispatch.exchange_group
    # With s1 and s2, tokens go to each shard of a host
    shards = group.size() // dispatch.groups.ep.size()
    model = FlexModel.of(profiles.of(group), routing_of(transformer), "dedup", shards)
    shape = layer_shape(config, dispatch.groups)
    rows = shape.rows * shards / (shape.mp if dispatch.splits_tokens else 1)
    return CopiesCase(model, rows * transformer.hidden_size * transformer.params_dtype.itemsize)


def _chunk_choice(
    profiles: Profiles, dispatch: ParallelDispatch, exchange: TokenExchange, progress: Progress
) -> ChunkChoice | None:
    config = profiles.config
    comm = config.comm
    transformer = config.transformer
    if comm.moe_comm_chunks == "1" or exchange.probs.group.size() == 1:
        return None
    order = comm.moe_comm_order
    scheduler = find_order(order)
    if scheduler is None:
        token_bytes = transformer.hidden_size * transformer.params_dtype.itemsize
        # Weights cost nothing here: guests' weights arrive before the first chunk computes
        cost = CostModel(profile=profiles.experts, token_bytes=token_bytes, param_bytes=0.0, grad_bytes=0.0)
        decide: Decide = ByMiniTasks(load_policy(order, **policy_options(order, vars(config.balance))), cost)
    else:
        profile = profiles.of(dispatch.exchange_group)
        model = TaskModel(
            profile=profile,
            exchange=exchange,
            models=exchange_models(exchange.probs, profile, _copies_case(profiles, dispatch).model),
            sharding=dispatch.sharding(),
            hosts=dispatch.groups.ep.size(),
            codec=comm.moe_comm_codec,
            hidden=transformer.hidden_size,
            dtype=transformer.params_dtype,
        )
        decide = ByPrediction(find_degrees(comm.moe_comm_chunks), scheduler, model)
    log = first_rank_log() if config.balance.balance_explain else None
    return ChunkChoice(decide, lambda: progress.iteration, comm.moe_comm_refit_interval, log)
