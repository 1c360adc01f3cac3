"""Small training runs as tasks for ranks: from a command line to every iteration's losses and gradient norm."""

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model

from megatron_balance.build.run import build_run
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.planning.policies import load_policy
from megatron_balance.planning.policies.interface import Policy
from megatron_balance.planning.policies.none import NoPolicy
from megatron_balance.profile import cluster_profile
from megatron_balance.profile.cluster_profile import ClusterProfile, Fit, Throughput
from megatron_balance.training.loop import train_step
from megatron_balance.training.progress import StepReport
from megatron_balance.training.run import Run

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--num-experts 8 --moe-ffn-hidden-size 64 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --lr 1e-3 --train-iters 20 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 --attention-dropout 0 --hidden-dropout 0"
)
"""A model that trains 20 iterations in seconds; later flags override these."""

Curve = list[tuple[float, float]]
"""(lm loss, gradient norm) of every iteration."""

Hosts = list[float]
"""Hosts added in all layers, in every iteration."""


def build(flags: str, base: str = BASE, policy: Policy | None = None) -> Run:
    """Build the run of `base` and `flags` on this rank; `policy` is that of the flags, if it is started already."""
    config = parse_args(f"{base} {flags}".split(), Machine.here(dist.get_world_size())).config
    if policy is None and config.balance.balance_policy.startswith("tests."):
        # Starting a process for the policy of each rank would take longer than the run
        policy = load_policy(config.balance.balance_policy)
    return build_run(config, policy=policy)


def train_curve(flags: str, iterations: int = 20, mutate: Callable[[Run], None] | None = None) -> Curve:
    """Return losses and gradient norms of a run; `mutate` changes the built run before it trains."""
    return curve_of(train(flags, iterations, mutate))


def train_hosts(flags: str, iterations: int = 20, mutate: Callable[[Run], None] | None = None) -> tuple[Curve, Hosts]:
    """Return `train_curve`, and the number of hosts added in each iteration."""
    reports = train(flags, iterations, mutate)
    hosts = [sum(layer.hosts_added for layer in report.balance.values()) for report in reports]
    return curve_of(reports), hosts


def train(flags: str, iterations: int, mutate: Callable[[Run], None] | None = None) -> list[StepReport]:
    """Build and train a run on this rank."""
    run = build(flags)
    if mutate is not None:
        mutate(run)
    return [train_step(run) for _ in range(iterations)]


def curve_of(reports: list[StepReport]) -> Curve:
    """Return losses and gradient norms, the same on every rank."""
    # Only the last pipeline stage has the loss; the last rank belongs to it
    losses = [[report.losses.get("lm loss") for report in reports]]
    dist.broadcast_object_list(losses, src=dist.get_world_size() - 1)
    return [(loss, report.grad_norm) for loss, report in zip(losses[0], reports, strict=True)]


def perturb_one_expert(run: Run) -> None:
    """Change one expert of rank 0 by a thousandth."""
    if dist.get_rank() == 0:
        experts = next(module for module in run.model[0].modules() if isinstance(module, GroupedExperts))
        experts.linear_fc1.weight.data[0].mul_(1.001)
    run.optimizer.reload_model_params()


def drop_one_token(run: Run) -> None:
    """Drop one of the first token's experts, on rank 0, in the first layer."""

    def drop(router: TopKRouter, inputs: object, output: tuple[torch.Tensor, torch.Tensor]):
        probs, routing_map = output
        routing_map = routing_map.clone()
        routing_map[0, routing_map[0].nonzero()[0]] = False
        return probs * routing_map, routing_map

    if dist.get_rank() == 0:
        router = next(module for module in run.model[0].modules() if isinstance(module, TopKRouter))
        router.register_forward_hook(drop)


def deviation(one: Curve, other: Curve) -> float:
    """Return the largest relative difference of a loss or gradient norm."""
    pairs = [(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


class Captured(logging.Handler):
    """Keeps logged messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def modules(run: Run, name: str) -> list[torch.nn.Module]:
    """Return this rank's modules with names that end in `name`, first layer first."""
    chunks = unwrap_model(run.model)
    return [module for chunk in chunks for own, module in chunk.named_modules() if own.endswith(name)]


def plan_apart(run: Run) -> None:
    """Let even and odd replicas balance complementary sets of layers."""
    for number, state in run.balancer.layers.items():
        if (number + run.groups.expt_dp.rank()) % 2:
            state.manager.policy = NoPolicy()


def fast_links(ranks: int, node_size: int | None = None) -> ClusterProfile:
    """Return the profile of a cluster with slow computation and fast links, on which every policy acts."""
    links = {
        kind: dict.fromkeys(cluster_profile.GROUPS, Fit(1e-9, 1e-12, 0, 0)) for kind in cluster_profile.COLLECTIVES
    }
    return ClusterProfile(
        num_ranks=ranks,
        node_size=node_size or ranks,
        links=links,
        messages=dict.fromkeys(cluster_profile.LEVELS, Fit(1e-9, 0, 0, 0)),
        launches=dict.fromkeys(cluster_profile.ROUNDS, dict.fromkeys(cluster_profile.LEVELS, Fit(1e-9, 0, 0, 0))),
        forward=Throughput(1e-4, 0, 0, 0),
        backward=Throughput(2e-4, 0, 0, 0),
    )
