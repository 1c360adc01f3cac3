"""Builds the Balancer, which keeps a built model's experts where the policy wants them."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_balance.build.profiles import even_rows, microbatch_tokens, routing_of
from megatron_balance.build.wiring import Wiring
from megatron_balance.comm.alltoall import connect
from megatron_balance.comm.dedup import DedupAllToAll
from megatron_balance.comm.ownership_transfer import ExpertMover, Place
from megatron_balance.comm.trans_agg import TransAgg
from megatron_balance.config.run_config import RunConfig
from megatron_balance.cost.model import CostModel, Overlap, slowed_by
from megatron_balance.device.versions import number_of
from megatron_balance.flow.chunks.choice import find_degrees
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.layer import BalancedMoELayer, moe_layers
from megatron_balance.flow.plan import certified_rows
from megatron_balance.job.groups import gather, new_group, new_twin
from megatron_balance.observe.calibration_log import Job, read_record
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SplitName, tokens_loop
from megatron_balance.planning.manager import Manager
from megatron_balance.planning.policies import load_policy, policy_options, split_of
from megatron_balance.planning.policies.interface import Policy
from megatron_balance.planning.policy_process import PolicyProcess, start_policy
from megatron_balance.planning.predictor import Predictor
from megatron_balance.planning.within import level_hosts, plan_exactly, plan_within
from megatron_balance.profile.cluster_profile import ClusterProfile
from megatron_balance.profile.computation import non_expert_passes
from megatron_balance.timeline import hooks
from megatron_balance.timeline.actions import Operation, Schedule
from megatron_balance.timeline.guest_ring import GuestRing
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

    It allocates the guest slots. The transformer config's `finalize_model_grads_func` must be set before, because the
    balancer aggregates the gradients of guests before it.

    Args:
        optimizer: its state moves with experts that change their owners; None: no expert changes its owner.
        microbatches: returns the number of microbatches of the iteration in progress.
        policy: the result of an earlier `start_policy` for the flags; None: start it now.

    Raises:
        ValueError: the policy cannot be made, or the profile or `--balance-calibrate` cannot be read, or does not fit.
    """
    config = wiring.config
    groups = wiring.groups
    settings = config.balance
    if settings.balance_policy == "none":
        return None
    minutes = config.launch.distributed_timeout_minutes
    by_chunk = [moe_layers([chunk]) for chunk in model]
    layers = {number: layer for chunk in by_chunk for number, layer in chunk.items()}
    num_experts = config.transformer.num_moe_experts
    assert num_experts is not None
    # A rank needs no more guest slots than there are experts that it does not own
    slots = min(settings.balance_guest_slots, num_experts - num_experts // groups.ep.size())
    owners = Placement.identity(num_experts, groups.ep.size(), slots)
    ahead = settings.balance_load == "predicted"
    each = not ahead or settings.balance_inner_policy != "none"
    ring = settings.balance_guest_ring if each else 0
    experts = [layers[number].experts for number in sorted(layers)]
    apart = each and config.transformer.overlap_moe_expert_parallel_comm
    guest_bytes = _allocate_guests(experts, slots, ahead, ring, apart)
    policy, planner = _planning(config, policy)
    # Measuring a profile is collective, so ranks without MoE layers take part
    profile = wiring.profiles.experts
    overlaps = _overlaps(config, profile, model)

    schedule = _schedules(config, by_chunk, groups.pp.rank(), ring, apart, ahead)
    # A number of microbatches that every schedule of the layout accepts
    usual = config.transformer.microbatch_group_size_per_vp_stage or config.transformer.pipeline_model_parallel_size
    trans_each = _trans_each(schedule(usual))
    states = {
        number: _layer_state(wiring, layer, overlaps[number], policy, owners, optimizer, trans_each.get(number, 0))
        for number, layer in layers.items()
    }
    twin = new_twin(groups.ep, minutes)
    connect(twin)
    calibration = settings.balance_calibrate
    balancer = Balancer(
        group=groups.ep,
        trans_agg=TransAgg(twin),
        layers=states,
        schedule=schedule,
        microbatches=microbatches,
        guest_bytes=guest_bytes,
        ring=GuestRing.of(experts, ring) if each else None,
        ahead=ahead,
        mover=_mover(groups, minutes) if settings.balance_ownership == "transfer" else None,
        explain=settings.balance_explain,
        shards=groups.tp_ep,
        planner=planner,
        shares=not isinstance(policy, PolicyProcess),
        calibrates=calibration != "off",
        record=None if calibration in ("off", "on") else read_record(calibration, calibrated_job(config)),
    )
    hooks.install(balancer, layers, model, config.transformer)
    return balancer


def _mover(groups: ProcessGroupCollection, minutes: float) -> ExpertMover:
    """Return what moves experts to other owners, among all ranks of the pipeline stage; every rank calls it."""
    own = groups.pp.rank()
    stage = new_group([rank for rank, other in enumerate(gather(own)) if other == own], minutes, "PIPELINE_STAGE")
    assert stage is not None
    connect(stage)
    return ExpertMover(stage, Place(groups.ep.rank(), groups.expt_dp.rank()))


def _schedules(
    config: RunConfig, by_chunk: Sequence[Iterable[int]], stage: int, ring: int, apart: bool, ahead: bool
) -> Callable[[int], Schedule]:
    """Return the function that gives `Balancer.schedule` for the layers in each chunk of a pipeline stage."""
    settings = config.balance

    @functools.cache
    def schedule(microbatches: int) -> Schedule:
        return lower(
            hooks.stage_passes(config.transformer, stage, microbatches),
            [list(chunk) for chunk in by_chunk],
            settings.balance_overlap,
            ring=ring,
            apart=apart,
            ahead=ahead,
            late=settings.moe_flex_rows == "bound",
            reduce_early=config.ddp.overlap_grad_reduce,
            on_device=torch.cuda.is_available(),
        )

    return schedule


def _allocate_guests(experts: Sequence[GroupedExperts], slots: int, ahead: bool, ring: int, apart: bool) -> int:
    """Allocate guest slots for the iteration, if there are plans `ahead`, and for microbatches, in a ring; return their
    bytes. The n-th layer has buffer n % ring; if these are `apart`, forward passes have others."""
    num_bytes = sum(one.allocate_guests(slots) for one in experts) if ahead else 0
    for number, one in enumerate(experts if ring else ()):
        num_bytes += one.allocate_guests(slots, experts[number - ring] if number >= ring else None, apart)
    return num_bytes


def calibrated_job(config: RunConfig) -> Job:
    """Return the properties that a record of `--balance-calibrate` must share with a run."""
    return Job(dist.get_world_size(), sum(moe_layer_pattern(config.transformer)))


def _planning(config: RunConfig, policy: Policy | None) -> tuple[Policy, Planner]:
    name = config.balance.balance_policy
    seconds = config.launch.patience
    policy = policy or start_policy(name, **policy_options(name, vars(config.balance)))
    if not isinstance(policy, PolicyProcess):
        return policy, Planner(seconds, name=name)
    policy.ready(seconds)
    return policy, Planner(seconds, policy.stop, name)


def _layer_state(
    wiring: Wiring,
    layer: BalancedMoELayer,
    overlap: Overlap,
    policy: Policy,
    owners: Placement,
    optimizer: MegatronOptimizer | None,
    trans_each: int,
) -> LayerState:
    """Return a layer's state with its manager; also set how the layer's hosts share tokens."""
    config = wiring.config
    exchange = wiring.exchange
    profile = wiring.profiles.experts
    settings = config.balance
    transformer = config.transformer
    codec = profile.codec(config.comm.moe_comm_codec)
    flex = transformer.moe_token_dispatcher_type == "flex"
    dedup = isinstance(exchange.probs, DedupAllToAll)
    split = settings.balance_token_split
    chosen = cast(SplitName, split_of(policy)) if split == "policy" else split
    # Exact plans set quotas
    layer.split = chosen if settings.balance_inner_policy == "none" else "proportional"
    layer.node_size = profile.node_size
    if settings.balance_certify is not None:
        layer.limit = certified_rows(even_rows(config, wiring.groups, wiring.dispatch), settings.balance_certify)
    parameters = list(layer.experts.parameters())
    fields = tuple
    state = 0.0
    if optimizer is not None:
        fields = functools.partial(expert_fields, optimizer, parameters, config.ddp.overlap_param_gather)
        sharers = wiring.groups.expt_dp.size() if config.ddp.use_distributed_optimizer else 1
        state = state_bytes(optimizer, parameters, sharers) / owners.home_slots
    cost = CostModel(
        profile=profile,
        token_bytes=exchange.bytes_per_row(transformer.hidden_size, transformer.params_dtype),
        param_bytes=sum(parameter.nbytes for parameter in parameters) / owners.home_slots,
        grad_bytes=sum(parameter.main_grad.nbytes for parameter in parameters) / owners.home_slots,
        state_bytes=state,
        coding=exchange.compressed_share * (codec.encode.seconds_per_token + codec.decode.seconds_per_token),
        split=chosen,
        degrees=find_degrees(config.comm.moe_comm_chunks),
        overlap=overlap if settings.balance_overlap == "blockwise" else None,
        trans_each=0 if settings.balance_load == "predicted" else trans_each,
        routing=routing_of(transformer) if flex or dedup else None,
        copied_by="dedup" if dedup else "flex",
    )
    if owners.guest_slots:
        cost.prepare()
        tokens_loop.prepare()
    manager = Manager(
        policy=policy,
        cost=cost,
        predictor=Predictor(settings.balance_predictor),
        owners=owners,
        interval=settings.balance_interval,
        transfers=settings.balance_ownership == "transfer",
    )
    within = None
    if settings.balance_load == "exact":
        within = functools.partial(plan_exactly, manager=manager)
    elif settings.balance_inner_policy != "none":
        inner = load_policy(settings.balance_inner_policy)
        each = replace(cost, trans_each=trans_each, split="proportional")
        level_hosts.prepare()
        within = functools.partial(plan_within, policy=inner, split=cost.split, slots=owners.guest_slots, cost=each)
    return LayerState(manager, layer.experts, overlap, fields, within, limit=layer.limit, split=layer.split)


def _trans_each(schedule: Schedule) -> dict[int, int]:
    """Return, by layer, `CostModel.trans_each` of microbatches that have their own Trans."""
    sent = [action for step in schedule for action in step.communication if action.microbatch is not None]
    again = {action.block for action in sent if action.operation is Operation.BTRANS}
    return {action.block: 1 + (action.block in again) for action in sent}


def _overlaps(config: RunConfig, profile: ClusterProfile, model: Sequence[torch.nn.Module]) -> dict[int, Overlap]:
    """Return, by number, the computation since the previous MoE layer; it can hide the layer's Trans and Agg."""
    overlaps: dict[int, Overlap] = {}
    tokens = microbatch_tokens(config)
    for chunk in model:
        moe = moe_layers([chunk])
        dense = 0
        numbers = {number_of(module) for module in chunk.modules() if isinstance(module, TransformerLayer)}
        for number in sorted(numbers | moe.keys()):
            if number in moe:
                seconds = non_expert_passes(profile, config.transformer, tokens, config.model.seq_length, dense)
                overlaps[number] = Overlap(*seconds, experts=bool(overlaps), slowed=slowed_by(profile))
            dense = 0 if number in moe else dense + 1
    return overlaps
