"""Cluster profiles of a run, read from `--balance-profile` or measured with the run's shapes when first needed."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.comm.codecs import load_codec
from megatron_balance.config.run_config import RunConfig
from megatron_balance.cost.exchange import resized
from megatron_balance.cost.flex import Routing
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.grouped_gemm import expert_gemm
from megatron_balance.flow.parallel_schedule import SCHEDULES, ParallelDispatch, Shape
from megatron_balance.flow.schedule_choice import choices, ranges
from megatron_balance.job.groups import Topology, expert_node_size, new_twin, on_first_rank
from megatron_balance.measure.measure import LARGE_SIZES, REPEATS, SIZES, measure, measure_parallel, measured_once
from megatron_balance.measure.operations import Call, codec_passes, expert_passes, schedule_call
from megatron_balance.measure.stopwatch import Stopwatch
from megatron_balance.profile.cluster import Ranks, is_cluster, load_profile
from megatron_balance.profile.cluster_profile import ClusterProfile, ParallelLines, builtin, load

MINIMAL_LOAD = 64
"""Fewest tokens per rank with which timing experts makes sense."""

Log = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Profiles:
    """Profiles of one cluster: for expert-parallel groups, and for groups that also include the experts' shards."""

    config: RunConfig
    groups: ProcessGroupCollection
    topology: Topology

    @functools.cached_property
    def experts(self) -> ClusterProfile:
        """The profile for `groups.ep`. The first access is collective: all ranks of the job make it at the same point.

        `auto` stores its measurement in `--save`. It reuses one found there or in `--load`, so that a resumed run makes
        the same plans.
        """
        profile = self._read_or_measured()
        capacities = self.config.balance.balance_capacities
        if capacities is None:
            return profile
        mean = sum(capacities) / len(capacities)
        return dataclasses.replace(profile, rates=tuple(capacity / mean for capacity in capacities))

    def _read_or_measured(self) -> ClusterProfile:
        config = self.config
        groups = self.groups
        num_ranks = groups.ep.size()
        wanted = config.balance.balance_profile
        node_size = self.node_size(groups.ep)
        shards = groups.expt_tp.size()
        if wanted == "builtin":
            return builtin(num_ranks, node_size, *expert_shape(config, shards))
        if wanted != "auto":
            return on_first_rank(lambda: read_profile(config, self.topology))
        split = f"_tp_{groups.tp.size()}_etp_{shards}" if len(schedule_choices(config, groups)) > 1 else ""
        name = f"cluster_profile_{num_ranks}_in_nodes_of_{node_size}{split}.json"
        paths = [Path(directory) / name for directory in (config.checkpoint.save, config.checkpoint.load) if directory]
        measure_now = functools.partial(measure_cluster, config, groups, node_size)
        return measured_once(paths, num_ranks, node_size, measure_now)

    def of(self, group: dist.ProcessGroup) -> ClusterProfile:
        """Return the profile of the same links for the ranks of `group`; collective like `experts`."""
        return resized(self.experts, group.size(), self.node_size(group))

    def node_size(self, group: dist.ProcessGroup) -> int:
        """Return the number of ranks of `group` on each node; ValueError: nodes divide groups into unequal parts."""
        transformer = self.config.transformer
        assert transformer.expert_tensor_parallel_size is not None
        ranks = transformer.expert_model_parallel_size * transformer.expert_tensor_parallel_size
        return expert_node_size(self.topology, group.size(), ranks // group.size())


def read_profile(config: RunConfig, topology: Topology) -> ClusterProfile:
    """Return the profile of expert-parallel groups from `--balance-profile`; ValueError if the file does not fit."""
    transformer = config.transformer
    path = Path(config.balance.balance_profile)
    num_ranks = transformer.expert_model_parallel_size
    shards = transformer.expert_tensor_parallel_size
    assert shards is not None
    node_size = expert_node_size(topology, num_ranks, shards)
    if is_cluster(path):
        ranks = Ranks(num_ranks, node_size, topology.node_size, shards)
        assert transformer.num_moe_experts is not None
        return load_profile(path, ranks, *expert_shape(config, shards), transformer.num_moe_experts // num_ranks)
    return load(path, num_ranks, node_size)


def expert_shape(config: RunConfig, shards: int) -> tuple[int, int, int]:
    """Return the hidden size, half of an expert shard's weights per hidden channel, and the bytes per number."""
    transformer = config.transformer
    assert transformer.moe_ffn_hidden_size is not None
    matrices = 3 if transformer.gated_linear_unit else 2
    inner = transformer.moe_ffn_hidden_size * matrices // (2 * shards)
    return transformer.hidden_size, inner, 1 if transformer.fp8 else transformer.params_dtype.itemsize


def first_rank_log() -> Log | None:
    """Return a log that prints on the job's rank 0; None on other ranks."""
    return functools.partial(print, flush=True) if dist.get_rank() == 0 else None


def microbatch_tokens(config: RunConfig) -> int:
    """Return the tokens of a microbatch on each context-parallel rank."""
    return config.train.micro_batch_size * config.model.seq_length // config.transformer.context_parallel_size


def layer_shape(config: RunConfig, groups: ProcessGroupCollection) -> Shape:
    """Return the shape of an MoE layer's input on each rank, for a microbatch under even routing."""
    transformer = config.transformer
    tokens = microbatch_tokens(config)
    copies = groups.tp.size()
    if transformer.sequence_parallel:
        tokens //= copies
        copies = 1
    factor = transformer.moe_expert_capacity_factor or 1.0
    if not transformer.moe_pad_expert_input_to_capacity:
        factor = min(factor, 1.0)
    rows = round(tokens * transformer.moe_router_topk * factor)
    return Shape(tokens, transformer.hidden_size, rows, copies, groups.expt_tp.size())


def even_rows(config: RunConfig, groups: ProcessGroupCollection, dispatch: ParallelDispatch | None) -> int:
    """Return the rows of a microbatch that each rank's experts, or shards of experts, compute under even routing. None:
    the steps of megatron-core's layer."""
    rows = layer_shape(config, groups).rows * groups.expt_tp.size()
    splits = dispatch is not None and (dispatch.splits_tokens or dispatch.splits_rows)
    return rows // groups.tp.size() if splits else rows


def routing_of(transformer: TransformerConfig) -> Routing:
    """Return how many experts the tokens of a model choose, and from what."""
    assert transformer.num_moe_experts is not None
    groups = transformer.moe_router_num_groups or 1
    chosen = transformer.moe_router_group_topk or groups
    return Routing(transformer.num_moe_experts, transformer.moe_router_topk, groups, chosen)


def schedule_choices(config: RunConfig, groups: ProcessGroupCollection) -> tuple[str, ...]:
    """Return the parallel schedules that `auto` chooses from."""
    found = choices(layer_shape(config, groups), groups.tp_ep.size())
    if config.comm.moe_comm_alltoall != "dedup":
        return found
    # s2 divides a token's rows among ranks
    return tuple(name for name in found if name != "s2")


def measure_cluster(config: RunConfig, groups: ProcessGroupCollection, node_size: int) -> ClusterProfile:
    """Measure this job's cluster with experts of the run's shape and precision; every rank calls it.

    Experts are timed with an eighth of a rank's mean load per microbatch up to twice that load. Random number
    generators keep their state, so training does not depend on when the profile was measured. `node_size` counts
    expert-parallel ranks.
    """
    transformer = copy.copy(config.transformer)
    transformer.perform_initialization = False
    assert transformer.num_moe_experts is not None
    home = range(transformer.num_moe_experts // groups.ep.size())
    gemm = expert_gemm(config.balance.moe_expert_gemm)
    experts = GroupedExperts(home, transformer, groups, gemm)
    device = experts.linear_fc1.weight.device
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=transformer.init_method_std, generator=generator)
    codecs = {}
    if (name := config.comm.moe_comm_codec) != "none":
        rows = {"hidden": transformer.hidden_size, "dtype": transformer.params_dtype, "device": device}
        codecs[name] = functools.partial(codec_passes, load_codec(name), **rows)
    sizes = [weight.numel() for weight in experts.weights_of(0)]
    load = max(MINIMAL_LOAD, layer_shape(config, groups).tokens * transformer.moe_router_topk)
    profile = measure(
        groups.ep,
        node_size,
        passes=functools.partial(expert_passes, experts),
        tokens=[load // 8, load // 4, load // 2, load, 2 * load],
        device=device,
        dtype=transformer.params_dtype,
        shares=[size / sum(sizes) for size in sizes],
        sizes_bytes=LARGE_SIZES if device.type == "cuda" else SIZES,
        codecs=codecs,
    )
    if len(schedule_choices(config, groups)) == 1:
        return profile
    return dataclasses.replace(profile, parallel=measure_schedules(config, groups))


def measure_schedules(config: RunConfig, groups: ProcessGroupCollection) -> ParallelLines:
    """Measure the terms in which `schedule_choices` differ (Parm, section V-A); every rank of the job calls it."""
    transformer = config.transformer
    shape = layer_shape(config, groups)
    overlaps = "s2" in schedule_choices(config, groups)
    saa_group = new_twin(groups.tp, config.launch.distributed_timeout_minutes) if overlaps else None
    direct, gathering = (
        ParallelDispatch(SCHEDULES[name], groups, transformer.sequence_parallel, saa_group)
        for name in ("s1" if saa_group is None else "s2", "megatron")
    )
    device = torch.device(torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    rows = {"hidden": transformer.hidden_size, "dtype": transformer.params_dtype, "device": device}

    def call(line: str, num_bytes: int) -> Call:
        return schedule_call(gathering if line == "gathered" else direct, line, num_bytes, **rows)

    try:
        return measure_parallel(
            Stopwatch(groups.tp_ep, device, REPEATS),
            mp=shape.mp,
            esp=shape.esp,
            calls=call,
            ranges=ranges(shape, transformer.params_dtype.itemsize),
        )
    finally:
        if saa_group is not None:
            dist.destroy_process_group(saa_group)
