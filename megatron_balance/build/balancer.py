"""Builds the Balancer, which keeps a built model's experts where the policy wants them."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_balance.build.profiles import microbatch_tokens
from megatron_balance.build.wiring import Wiring
from megatron_balance.comm.alltoall import connect
from megatron_balance.comm.ownership_transfer import ExpertMover, Place
from megatron_balance.comm.trans_agg import TransAgg
from megatron_balance.config.run_config import RunConfig
from megatron_balance.cost.model import CostModel, Overlap
from megatron_balance.device.versions import number_of
from megatron_balance.flow.chunks.choice import find_degrees
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.flow.plan import Split, plan_loop
from megatron_balance.job.groups import new_group_by_value, new_twin, world
from megatron_balance.observe.calibration_log import CalibrationRecord, Job, read_record
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.manager import Manager
from megatron_balance.planning.policies import policy_options, split_of
from megatron_balance.planning.policies.interface import Policy
from megatron_balance.planning.policy_process import PolicyProcess, start_policy
from megatron_balance.planning.predictor import Predictor
from megatron_balance.profile.cluster_profile import ClusterProfile
from megatron_balance.profile.flops import non_expert_seconds
from megatron_balance.timeline import hooks
from megatron_balance.timeline.actions import Schedule
from megatron_balance.timeline.layer_state import LayerState
from megatron_balance.timeline.lower import lower
from megatron_balance.timeline.planner import Planner
from megatron_balance.timeline.runtime import Balancer
from megatron_balance.training.logging import moe_layer_pattern
from megatron_balance.training.optimizer_state import expert_fields, state_bytes


def build_balancer(
    wiring: Wiring,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer | None,
    *,
    microbatches: Callable[[], int],
    policy: Policy | None = None,
) -> Balancer | None:
    """Return the balancer of this rank's layers; None without a policy. Every rank of the job calls it.

    It allocates the guest slots. `finalize_model_grads_func` of the transformer config must be set before, because
    gradients of guests are aggregated before gradients are finalized.

    Args:
        optimizer: steps experts that change their owners; None: no expert changes its owner.
        microbatches: returns the number of microbatches of the iteration in progress.
        policy: the result of `start_policy` for the flags, if it was called before.

    Raises:
        ValueError: the policy cannot be made, or the profile or `--balance-calibrate` cannot be read, or does not fit.
    """
    config = wiring.config
    groups = wiring.groups
    settings = wiring.config.balance
    if settings.balance_policy == "none":
        return None
    by_chunk = [_moe_layers(chunk) for chunk in model]
    layers = {number: layer for chunk in by_chunk for number, layer in chunk.items()}
    owners = _owners(config, groups)
    guest_bytes = sum(layer.experts.allocate_guests(owners.guest_slots) for layer in layers.values())
    policy, planner = _planning(config, policy)
    # Collective, so ranks without MoE layers take part
    profile = wiring.profiles.experts
    sharers = groups.expt_dp.size() if config.ddp.use_distributed_optimizer else 1
    states = {}
    for number, layer in layers.items():
        parameters = list(layer.experts.parameters())
        state = 0.0
        fields = tuple
        if optimizer is not None:
            fields = functools.partial(expert_fields, optimizer, parameters, config.ddp.overlap_param_gather)
            state = state_bytes(optimizer, parameters, sharers) / owners.home_slots
        overlap = _overlap(config, profile, model, number)
        manager = _manager(
            wiring, policy, layer, owners=owners, profile=profile, overlap=overlap, state_bytes_per_expert=state
        )
        states[number] = LayerState(manager, layer.experts, overlap, fields)
    balancer = Balancer(
        group=groups.ep,
        trans_agg=_trans_agg(config, groups),
        layers=states,
        schedule=_schedule(config, groups, by_chunk),
        microbatches=microbatches,
        guest_bytes=guest_bytes,
        mover=_expert_mover(config, groups) if settings.balance_ownership == "transfer" else None,
        explain=settings.balance_explain,
        shards=groups.tp_ep,
        planner=planner,
        shares=not isinstance(policy, PolicyProcess),
        calibrates=settings.balance_calibrate != "off",
        record=_record(config),
    )
    hooks.install(balancer, layers, model, config.transformer)
    return balancer


def calibrated_job(config: RunConfig) -> Job:
    """Return what a record of `--balance-calibrate` must have in common with a run."""
    return Job(world().size(), sum(moe_layer_pattern(config.transformer)))


def _record(config: RunConfig) -> CalibrationRecord | None:
    """Return the calibration to repeat, if `--balance-calibrate` names one."""
    path = config.balance.balance_calibrate
    return None if path in ("off", "on") else read_record(path, calibrated_job(config))


def _owners(config: RunConfig, groups: ProcessGroupCollection) -> Placement:
    """Return the placement with every expert on its owner alone, and no more guest slots than there are experts."""
    num_ranks = groups.ep.size()
    num_experts = config.transformer.num_moe_experts
    assert num_experts is not None
    slots = min(config.balance.balance_guest_slots, num_experts - num_experts // num_ranks)
    return Placement.identity(num_experts, num_ranks, slots)


def _schedule(
    config: RunConfig, groups: ProcessGroupCollection, by_chunk: Sequence[Iterable[int]]
) -> Callable[[int], Schedule]:
    """Return a cached function from the number of microbatches to this pipeline stage's schedule.

    Args:
        by_chunk: numbers of the MoE layers of each model chunk.
    """

    @functools.cache
    def schedule(microbatches: int) -> Schedule:
        return lower(
            hooks.stage_passes(config.transformer, groups.pp.rank(), microbatches),
            [list(chunk) for chunk in by_chunk],
            config.balance.balance_overlap,
            exact=config.balance.balance_load == "exact",
            late=config.balance.moe_flex_rows == "bound",
            reduce_early=config.ddp.overlap_grad_reduce,
        )

    return schedule


def _trans_agg(config: RunConfig, groups: ProcessGroupCollection) -> TransAgg:
    twin = new_twin(groups.ep, world(), config.launch.distributed_timeout_minutes)
    connect(twin)
    return TransAgg(twin)


def _expert_mover(config: RunConfig, groups: ProcessGroupCollection) -> ExpertMover:
    minutes = config.launch.distributed_timeout_minutes
    stage = new_group_by_value(groups.pp.rank(), minutes, "PIPELINE_STAGE")
    connect(stage)
    return ExpertMover(stage, Place(groups.ep.rank(), groups.expt_dp.rank()))


def _planning(config: RunConfig, policy: Policy | None) -> tuple[Policy, Planner]:
    """Return the policy, ready to plan, and the planner that calls it."""
    name = config.balance.balance_policy
    seconds = patience(config.launch.distributed_timeout_minutes)
    policy = policy or start_policy(name, **policy_options(name, vars(config.balance)))
    if not isinstance(policy, PolicyProcess):
        return policy, Planner(seconds, name=name)
    policy.ready(seconds)
    return policy, Planner(seconds, policy.stop, name)


def patience(timeout_minutes: float) -> float:
    """Return how many seconds to wait for a helper, such as a policy, before giving it up.

    It is half of the timeout, so that a stalled helper is named before the ranks that wait for it are.
    """
    return timeout_minutes * 60 / 2


def _manager(
    wiring: Wiring,
    policy: Policy,
    layer: BalancedMoELayer,
    *,
    owners: Placement,
    profile: ClusterProfile,
    overlap: Overlap,
    state_bytes_per_expert: float,
) -> Manager:
    """Return a layer's manager, and set how the layer's hosts share tokens.

    Args:
        state_bytes_per_expert: parameters and optimizer state on one rank.
    """
    config = wiring.config
    exchange = wiring.exchange
    settings = config.balance
    transformer = config.transformer
    codec = profile.codec(config.comm.moe_comm_codec)
    split = settings.balance_token_split
    layer.split = cast(Split, split_of(policy)) if split == "policy" else split
    layer.node_size = profile.node_size
    parameters = list(layer.experts.parameters())
    cost = CostModel(
        profile=profile,
        token_bytes=exchange.bytes_per_row(transformer.hidden_size, transformer.params_dtype),
        param_bytes=sum(parameter.nbytes for parameter in parameters) / owners.home_slots,
        grad_bytes=sum(parameter.main_grad.nbytes for parameter in parameters) / owners.home_slots,
        state_bytes=state_bytes_per_expert,
        coding=exchange.compressed_share * (codec.encode.seconds_per_token + codec.decode.seconds_per_token),
        split=layer.split,
        degrees=find_degrees(config.comm.moe_comm_chunks),
        overlap=overlap if settings.balance_overlap == "blockwise" else None,
    )
    if owners.guest_slots:
        cost.prepare()
        plan_loop.prepare()
    return Manager(
        policy=policy,
        cost=cost,
        predictor=Predictor(settings.balance_predictor),
        owners=owners,
        interval=settings.balance_interval,
        transfers=settings.balance_ownership == "transfer",
    )


def _moe_layers(chunk: torch.nn.Module) -> dict[int, BalancedMoELayer]:
    """Return a model chunk's MoE layers by layer number, ascending."""
    found: dict[int, BalancedMoELayer] = {}
    for layer in (module for module in chunk.modules() if isinstance(module, BalancedMoELayer)):
        found[number_of(layer)] = layer
    return found


def _overlap(config: RunConfig, profile: ClusterProfile, model: Sequence[torch.nn.Module], number: int) -> Overlap:
    """Return the computation between an MoE layer and the previous one, which can hide the layer's Trans and Agg."""
    index, chunk = next((index, chunk) for index, chunk in enumerate(model) if number in _moe_layers(chunk))
    before = [other for other in _moe_layers(chunk) if other < number]
    numbers = [number_of(module) for module in chunk.modules() if isinstance(module, TransformerLayer)]
    dense = sum(max(before, default=0) < other < number for other in numbers)
    length = config.model.seq_length
    assert length is not None
    seconds = non_expert_seconds(profile, config.transformer, microbatch_tokens(config), length, dense)
    return Overlap(*seconds, experts=bool(before) or any(map(_moe_layers, model[:index])))
