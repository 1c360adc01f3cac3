"""Wires balancing: RunConfig and a built model -> the Balancer that keeps its experts where the policy wants them."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_balance.comm.alltoall import connect
from megatron_balance.comm.moves import OwnershipTransfer, Place
from megatron_balance.comm.transfer import ExpertTransfer
from megatron_balance.config.run_config import RunConfig
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.job import groups as device_groups
from megatron_balance.placement.cost_model import CostModel, Overlap
from megatron_balance.placement.manager import Manager
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.policies import policy_options, split_of
from megatron_balance.placement.policies.interface import Policy
from megatron_balance.placement.policy_process import PolicyProcess, start_policy
from megatron_balance.placement.predictor import Predictor
from megatron_balance.profile.cluster_profile import ClusterProfile
from megatron_balance.profile.flops import non_expert_seconds
from megatron_balance.timeline import hooks
from megatron_balance.timeline.actions import Schedule
from megatron_balance.timeline.layer_state import LayerState
from megatron_balance.timeline.lower import lower
from megatron_balance.timeline.planner import Planner
from megatron_balance.timeline.runtime import Balancer
from megatron_balance.training.optimizer_state import expert_fields, state_bytes


def build_balancer(
    config: RunConfig,
    groups: ProcessGroupCollection,
    model: list[torch.nn.Module],
    optimizer: MegatronOptimizer | None,
    microbatches: Callable[[], int],
    profile: Callable[[], ClusterProfile],
    policy: Policy | None = None,
) -> Balancer | None:
    """The balancer of this rank's layers; None without a policy. Every rank of the job calls it.

    Allocates the guest slots. `connect_hooks` comes before: gradients are aggregated before they are finalized.
    `optimizer` is that of experts which change their owners; None: they do not.
    `policy` is what `start_policy` returned for the flags, if it has been called before.

    Raises:
        ValueError: the policy cannot be made.
    """
    settings, transformer = config.balance, config.transformer
    if settings.balance_policy == "none":
        return None
    by_chunk = [_moe_layers(chunk) for chunk in model]
    layers = {number: layer for chunk in by_chunk for number, layer in chunk.items()}
    num_ranks, num_experts = groups.ep.size(), transformer.num_moe_experts
    slots = min(settings.balance_guest_slots, num_experts - num_experts // num_ranks)
    owners = Placement.identity(num_experts, num_ranks, slots)
    guest_bytes = sum(layer.experts.allocate_guests(slots) for layer in layers.values())
    policy, planner = _planning(config, policy)
    sharers = groups.expt_dp.size() if config.ddp.use_distributed_optimizer else 1
    states = {}
    for number, layer in layers.items():
        parameters, moved, fields = list(layer.experts.parameters()), 0.0, tuple
        if optimizer is not None:
            fields = functools.partial(expert_fields, optimizer, parameters, config.ddp.overlap_param_gather)
            moved = state_bytes(optimizer, parameters, sharers) / owners.home_slots
        beside = _beside(config, profile(), model, number)
        manager = _manager(config, policy, layer, owners, profile(), beside, moved)
        states[number] = LayerState(manager, layer.experts, beside, fields)
    minutes = config.launch.distributed_timeout_minutes
    twin = device_groups.new_twin(groups.ep, dist.group.WORLD, minutes)
    connect(twin)
    ownership = _ownership(groups, minutes) if settings.balance_ownership == "transfer" else None

    @functools.cache
    def schedule(microbatches: int) -> Schedule:
        return lower(
            hooks.stage_passes(transformer, groups.pp.rank(), microbatches),
            [list(chunk) for chunk in by_chunk],
            settings.balance_overlap,
            exact=settings.balance_load == "exact",
            reduce_early=config.ddp.overlap_grad_reduce,
        )

    explain, transfer = settings.balance_explain, ExpertTransfer(twin)
    balancer = Balancer(
        groups.ep, transfer, states, schedule, microbatches, guest_bytes, ownership, explain, groups.tp_ep, planner
    )
    hooks.install(balancer, layers, model, transformer)
    return balancer


def _ownership(groups: ProcessGroupCollection, timeout_minutes: float) -> OwnershipTransfer:
    stage = device_groups.new_group_of_like(groups.pp.rank(), dist.group.WORLD, timeout_minutes, "PIPELINE_STAGE")
    connect(stage)
    return OwnershipTransfer(stage, Place(groups.ep.rank(), groups.expt_dp.rank()))


def _planning(config: RunConfig, policy: Policy | None) -> tuple[Policy, Planner]:
    """The policy, ready to plan, and what asks it."""
    name, minutes = config.balance.balance_policy, config.launch.distributed_timeout_minutes
    policy = policy or start_policy(name, **policy_options(name, vars(config.balance)))
    if not isinstance(policy, PolicyProcess):
        return policy, Planner(planning_patience(minutes), name=name)
    policy.ready(planning_patience(minutes))
    return policy, Planner(planning_patience(minutes), policy.stop, name)


def planning_patience(timeout_minutes: float) -> float:
    """Seconds to wait for a policy: one that stalls is to be given up before the ranks that wait for it are named."""
    return timeout_minutes * 60 / 2


def _manager(
    config: RunConfig,
    policy: Policy,
    layer: BalancedMoELayer,
    owners: Placement,
    profile: ClusterProfile,
    beside: Overlap,
    state_bytes: float,
) -> Manager:
    """What tells the policy about a layer and what things cost there; the layer is told how hosts share tokens.

    Args:
        state_bytes: one expert's parameters and optimizer state on one rank.
    """
    settings, transformer = config.balance, config.transformer
    layer.split = settings.balance_token_split
    if layer.split == "policy":
        layer.split = split_of(policy)
    parameters = list(layer.experts.parameters())
    cost = CostModel(
        profile,
        token_bytes=transformer.hidden_size * transformer.params_dtype.itemsize,
        param_bytes=sum(parameter.nbytes for parameter in parameters) / owners.home_slots,
        grad_bytes=sum(parameter.main_grad.nbytes for parameter in parameters) / owners.home_slots,
        state_bytes=state_bytes,
        split=layer.split,
        overlap=beside if settings.balance_overlap == "blockwise" else None,
    )
    return Manager(
        policy,
        cost,
        Predictor(settings.balance_predictor),
        owners,
        interval=settings.balance_interval,
        transfers=settings.balance_ownership == "transfer",
    )


def _moe_layers(chunk: torch.nn.Module) -> dict[int, BalancedMoELayer]:
    """By layer number, ascending."""
    found = (module for module in chunk.modules() if isinstance(module, BalancedMoELayer))
    return {layer.layer_number: layer for layer in found}


def _beside(config: RunConfig, profile: ClusterProfile, model: list[torch.nn.Module], number: int) -> Overlap:
    """What is computed between an MoE layer and the one before it, for its Trans and Agg to hide under."""
    transformer = config.transformer
    chunk = next(chunk for chunk in model if number in _moe_layers(chunk))
    before = [other for other in _moe_layers(chunk) if other < number]
    ahead = [module.layer_number for module in chunk.modules() if isinstance(module, TransformerLayer)]
    dense = sum(max(before, default=0) < other < number for other in ahead)
    tokens = config.train.micro_batch_size * config.model.seq_length // transformer.context_parallel_size
    seconds = non_expert_seconds(profile, transformer, tokens, config.model.seq_length, dense)
    return Overlap(*seconds, experts=bool(before) or chunk is not model[0])
