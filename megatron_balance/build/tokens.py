"""Wires how tokens travel: RunConfig -> their steps, their all-to-alls, their chunks, and the profile that decides."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_balance.comm.alltoall import default_all_to_all
from megatron_balance.comm.codecs import load_codec
from megatron_balance.comm.compressed import TokenExchange, token_exchange
from megatron_balance.comm.registry import load_all_to_all
from megatron_balance.config.run_config import RunConfig
from megatron_balance.flow.chunks.choice import ByMiniTasks, ByPrediction, ChunkChoice, Decide, find_degrees
from megatron_balance.flow.chunks.order import find_order
from megatron_balance.flow.chunks.times import TaskModel
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.parallel_schedule import SCHEDULES, ParallelDispatch, Shape
from megatron_balance.flow.schedule_choice import ScheduleModel, ranges
from megatron_balance.job import groups as device_groups
from megatron_balance.measure.measure import LARGE_SIZES, REPEATS, SIZES, measure, measure_parallel, measured_once
from megatron_balance.measure.probes import codec_passes, expert_passes, schedule_run
from megatron_balance.measure.stopwatch import Stopwatch
from megatron_balance.placement.cost_model import CostModel
from megatron_balance.placement.policies import load_policy, policy_options
from megatron_balance.profile.cluster import Ranks, load_profile
from megatron_balance.profile.cluster_profile import ClusterProfile, ParallelLines, builtin, load

MINIMAL_LOAD = 64
"""Tokens per rank below which experts are not worth timing."""


def build_path(
    config: RunConfig, groups: ProcessGroupCollection, profile: Callable[[], ClusterProfile]
) -> ParallelDispatch:
    """Steps of the layers' tokens; every rank of the job calls it."""
    schedule, beside = config.comm.moe_parallel_schedule, None
    if schedule == "auto":
        schedule = _better_schedule(config, groups, profile)
    if schedule == "s2" and groups.tp.size() > 1 and _simultaneous(config):
        beside = _beside(config, groups)
    return ParallelDispatch(SCHEDULES[schedule], groups, config.transformer.sequence_parallel, beside)


def _simultaneous(config: RunConfig) -> bool:
    """Whether s2 passes results on while it collects them (SAA)."""
    comm = config.comm
    # It takes whole rows, by messages of its own
    simple = comm.moe_comm_codec == "none" and comm.moe_comm_alltoall in ("default", "p2p", "pipe")
    return comm.moe_parallel_saa and simple


def _beside(config: RunConfig, groups: ProcessGroupCollection) -> dist.ProcessGroup:
    return device_groups.new_twin(groups.tp, dist.group.WORLD, config.launch.distributed_timeout_minutes)


def _better_schedule(config: RunConfig, groups: ProcessGroupCollection, profile: Callable[[], ClusterProfile]) -> str:
    """s1 or s2, for layers as the run's: all of them have one shape."""
    say = functools.partial(print, flush=True) if dist.get_rank() == 0 else lambda *_: None
    if not has_choice(config, groups):
        say(
            "--moe-parallel-schedule auto: s1, because s2 needs tensor-parallel ranks with the same tokens, as many as "
            "divide the experts' ranks"
        )
        return "s1"
    shape, simultaneous = layer_shape(config, groups), _simultaneous(config)
    model = ScheduleModel(_profile_of(config, groups.tp_ep, profile()), shape.mp, shape.esp)
    itemsize = config.transformer.params_dtype.itemsize
    seconds = {name: model.seconds(name, shape, itemsize, simultaneous) for name in ("s1", "s2")}
    chosen = min(seconds, key=seconds.__getitem__)
    times = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in seconds.items())
    say(f"--moe-parallel-schedule auto: {chosen} (predicted exchanges of a layer's forward pass: {times})")
    return chosen


def layer_shape(config: RunConfig, groups: ProcessGroupCollection) -> Shape:
    """Of a microbatch in a layer, if routing is even."""
    transformer = config.transformer
    tokens = config.train.micro_batch_size * config.model.seq_length // transformer.context_parallel_size
    factor = transformer.moe_expert_capacity_factor or 1.0
    if not transformer.moe_pad_expert_input_to_capacity:
        factor = min(factor, 1.0)
    rows = round(tokens * transformer.moe_router_topk * factor)
    return Shape(tokens, transformer.hidden_size, rows, groups.tp.size(), groups.expt_tp.size())


def has_choice(config: RunConfig, groups: ProcessGroupCollection) -> bool:
    """Whether s1 and s2 differ, and s2 is possible."""
    copies = 1 if config.transformer.sequence_parallel else groups.tp.size()
    return copies > 1 and groups.tp_ep.size() % copies == 0


def build_exchange(config: RunConfig, path: ParallelDispatch, profile: Callable[[], ClusterProfile]) -> TokenExchange:
    """The all-to-alls of this rank's `path.wire`, which all layers share; every rank of the job calls it."""
    wire = load_all_to_all(
        config.comm.moe_comm_alltoall,
        path.wire,
        lambda: device_groups.new_node_groups(
            path.wire, dist.group.WORLD, _node_size(config, path.wire), config.launch.distributed_timeout_minutes
        ),
        lambda: _profile_of(config, path.wire, profile()),
        functools.partial(print, flush=True) if dist.get_rank() == 0 else None,
    )
    return token_exchange(wire, load_codec(config.comm.moe_comm_codec), config.comm.moe_comm_codec_directions)


def build_chunk_choice(
    config: RunConfig,
    path: ParallelDispatch,
    exchange: TokenExchange,
    profile: Callable[[], ClusterProfile],
    iteration: Callable[[], int],
) -> ChunkChoice | None:
    """What splits the tokens of all layers; None where they stay together."""
    comm, transformer = config.comm, config.transformer
    if comm.moe_comm_chunks == "1" or exchange.probs.group.size() == 1:
        return None
    decide: Decide
    scheduler = find_order(comm.moe_comm_order)
    if scheduler is None:
        token_bytes = transformer.hidden_size * transformer.params_dtype.itemsize
        # Weights of lent experts are there before the first chunk computes
        cost = CostModel(profile(), token_bytes=token_bytes, param_bytes=0.0, grad_bytes=0.0)
        policy = load_policy(comm.moe_comm_order, **policy_options(comm.moe_comm_order, vars(config.balance)))
        decide = ByMiniTasks(policy, cost)
    else:
        known, row = _profile_of(config, path.wire, profile()), (transformer.hidden_size, transformer.params_dtype)
        model = TaskModel(known, exchange, path.sharding(), path.groups.ep.size(), comm.moe_comm_codec, *row)
        decide = ByPrediction(find_degrees(comm.moe_comm_chunks), scheduler, model)
    say = functools.partial(print, flush=True) if dist.get_rank() == 0 and config.balance.balance_explain else None
    return ChunkChoice(decide, iteration, comm.moe_comm_refit_interval, say)


def _node_size(config: RunConfig, group: dist.ProcessGroup) -> int:
    """Ranks of `group`, an expert-parallel one with or without all shards, on one node."""
    node, transformer = config.comm.moe_comm_node_size or dist.get_world_size(), config.transformer
    every = transformer.expert_model_parallel_size * transformer.expert_tensor_parallel_size // group.size()
    return device_groups.expert_node_size(device_groups.Topology(dist.get_world_size(), node), group.size(), every)


def _profile_of(config: RunConfig, group: dist.ProcessGroup, profile: ClusterProfile) -> ClusterProfile:
    """The same links for the ranks of `group`, as of `_node_size`."""
    return dataclasses.replace(profile, num_ranks=group.size(), node_size=_node_size(config, group))


def cluster_profile(config: RunConfig, groups: ProcessGroupCollection) -> ClusterProfile:
    """The cost model's constants, as `--balance-profile` says; every rank of the job calls it.

    What `auto` measures is kept in `--save`, and looked for there and in `--load`, so that a resumed run plans alike.
    """
    wanted, transformer, num_ranks = config.balance.balance_profile, config.transformer, groups.ep.size()
    node_size, shards = _node_size(config, groups.ep), groups.expt_tp.size()
    matrices = 3 if transformer.gated_linear_unit else 2
    inner = transformer.moe_ffn_hidden_size * matrices // (2 * shards)
    experts = transformer.hidden_size, inner, transformer.params_dtype.itemsize
    if wanted == "builtin":
        return builtin(num_ranks, node_size, *experts)
    if wanted.endswith((".yaml", ".yml")):
        ranks = Ranks(num_ranks, node_size, config.comm.moe_comm_node_size or dist.get_world_size(), shards)
        return device_groups.on_first_rank(lambda: load_profile(Path(wanted), ranks, *experts))
    if wanted != "auto":
        return device_groups.on_first_rank(lambda: load(Path(wanted), num_ranks, node_size))
    say = functools.partial(print, flush=True) if dist.get_rank() == 0 else None
    measure_now = functools.partial(measure_cluster, config, groups, node_size, say)
    split = f"_tp_{groups.tp.size()}_etp_{shards}" if has_choice(config, groups) else ""
    name = f"cluster_profile_{num_ranks}_in_nodes_of_{node_size}{split}.json"
    paths = [Path(directory) / name for directory in (config.checkpoint.save, config.checkpoint.load) if directory]
    return measured_once(paths, num_ranks, node_size, measure_now)


def measure_cluster(
    config: RunConfig, groups: ProcessGroupCollection, node_size: int, say: Callable[[str], None] | None = None
) -> ClusterProfile:
    """Measure this job's cluster with experts of the run's shape and precision; every rank calls it.

    Experts compute an eighth of a microbatch's mean load per rank up to twice that. Random number generators are left
    as they are, so that a run with a profile measured before learns the same.

    Args:
        node_size: expert-parallel ranks on one node, `expert_node_size`.
        say: called with lines of progress, on the ranks that give it.
    """
    transformer = copy.copy(config.transformer)
    transformer.perform_initialization = False
    slots = transformer.num_moe_experts // groups.ep.size()
    experts = GroupedExperts(range(slots), transformer, groups)
    device = experts.linear_fc1.weight.device
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=transformer.init_method_std, generator=generator)
    sequence = config.model.seq_length // (groups.tp.size() if transformer.sequence_parallel else 1)
    codecs = {}
    if (name := config.comm.moe_comm_codec) != "none":
        sizes = load_codec(name), transformer.hidden_size, transformer.params_dtype, device
        codecs[name] = functools.partial(codec_passes, *sizes)
    load = max(MINIMAL_LOAD, config.train.micro_batch_size * sequence * transformer.moe_router_topk)
    profile = measure(
        groups.ep,
        dist.group.WORLD,
        node_size,
        functools.partial(expert_passes, experts),
        [load // 8, load // 4, load // 2, load, 2 * load],
        device,
        transformer.params_dtype,
        sizes_bytes=LARGE_SIZES if device.type == "cuda" else SIZES,
        codecs=codecs,
        say=say,
    )
    if not has_choice(config, groups):
        return profile
    return dataclasses.replace(profile, parallel=measure_schedules(config, groups, say))


def measure_schedules(
    config: RunConfig, groups: ProcessGroupCollection, say: Callable[[str], None] | None = None
) -> ParallelLines:
    """Measure what tells s1 from s2 (Parm, section V-A) where there `has_choice`; every rank of the job calls it."""
    beside, transformer, shape = _beside(config, groups), config.transformer, layer_shape(config, groups)
    path = ParallelDispatch(SCHEDULES["s2"], groups, transformer.sequence_parallel, beside)
    device = torch.device(torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    runs = functools.partial(
        *(schedule_run, path, default_all_to_all(path.wire)),
        *(transformer.hidden_size, transformer.params_dtype, device),
    )
    stopwatch, sizes = Stopwatch(groups.tp_ep, device, REPEATS), ranges(shape, transformer.params_dtype.itemsize)
    try:
        return measure_parallel(stopwatch, dist.group.WORLD, shape.mp, shape.esp, runs, sizes, say)
    finally:
        dist.destroy_process_group(beside)
