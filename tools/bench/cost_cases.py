"""The cases that cost_model.py runs on its ranks: everything that the cost model predicts, with different sizes."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.build.profiles import measure_cluster
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.comm.alltoall import default_all_to_all
from megatron_balance.comm.trans_agg import TransAgg
from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.cost.model import CostModel
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.job.layout import build_groups
from megatron_balance.measure.operations import Call, slot_passes
from megatron_balance.measure.stopwatch import Stopwatch
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import TransPlan, hops, plan_hops
from megatron_balance.workloads.synthetic import load_matrix

WORKLOADS = ("balanced", "hot_experts", "ragged_sources")

EXCHANGED_TOKENS = (24, 160, 700, 3000, 12000)
"""Tokens per source rank, about; on a CPU, links are fitted to sizes from 8 KiB to 8 MiB."""

COMPUTED_TOKENS = (100, 200, 370, 720, 1500)
"""Tokens per source rank, about; with balanced load each rank computes twice as many. Experts are fitted to 256 to
4096."""

EXPERT_WIDTHS = (12, 120, 720, 3000, 9000)
"""--moe-ffn-hidden-size of the experts that move, about."""

GUESTS = (1, 2, 4)
"""Numbers of guests per rank."""

GUEST_SLOTS = max(GUESTS)

PIECES = 4
"""Number of pieces of each part of an expert along `exchanged` in many batches."""


class Trial(NamedTuple):
    """An operation whose time the model predicts, and which all ranks can run together."""

    run: Call
    predict: Callable[[CostModel], float]


class Case(NamedTuple):
    """A kind of operation with one size."""

    kind: str
    label: str
    trial: Callable[[CostModel], Trial]
    """Returns the operation with the routes that the model chooses."""


def measure(task: dict, machine: Machine) -> dict:
    """Return kind and label of every case, and the predicted and measured seconds [rounds][cases]."""
    config = parse_args(task["flags"].split(), machine).config
    groups = build_groups(config.transformer, config.train.seed)
    transformer = copy.copy(config.transformer)
    # Random initialization takes time and has no effect on the results
    transformer.perform_initialization = False
    experts = _experts(transformer, groups)
    device = experts.linear_fc1.weight.device
    dtype = transformer.params_dtype
    seed = task["seed"]
    apart = [*exchanges(transformer, groups, device, seed), *transfers(transformer, groups, seed)]
    pairs = [*computations(experts, groups, seed)]
    cases = [*apart, *pairs]
    stopwatch = Stopwatch(groups.ep, device, task["repeats"], task["patience"])

    def model() -> CostModel:
        profile = measure_cluster(config, groups, task["node_size"])
        return CostModel(profile, token_bytes=transformer.hidden_size * dtype.itemsize, param_bytes=0, grad_bytes=0)

    seconds = []
    before = model()
    for _ in range(task["rounds"]):
        trials = [case.trial(before) for case in cases]
        runs = [trial.run for trial in trials]
        measured = [*stopwatch.typical(runs[: len(apart)]), *stopwatch.typical(runs[len(apart) :], 2)]
        after = model()
        predicted = [(trial.predict(before) + trial.predict(after)) / 2 for trial in trials]
        seconds.append([*zip(predicted, measured, strict=True)])
        before = after
    return {"cases": [(case.kind, case.label) for case in cases], "seconds": seconds}


def _experts(config: TransformerConfig, groups: ProcessGroupCollection) -> GroupedExperts:
    """Build this rank's experts with nonzero weights, because some processors multiply zeros faster."""
    experts = GroupedExperts(range(_num_experts(config) // groups.ep.size()), config, groups)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=config.init_method_std)
    return experts


def _num_experts(config: TransformerConfig) -> int:
    assert config.num_moe_experts is not None
    return config.num_moe_experts


def _drawn(sizes: tuple[int, ...], seed: int) -> list[int]:
    """Return sizes that differ from the given ones by a factor of up to the root of 2."""
    factors = 2 ** np.random.default_rng(seed).uniform(-0.5, 0.5, len(sizes))
    return [round(size * factor) for size, factor in zip(sizes, factors.tolist(), strict=True)]


def _loads(
    config: TransformerConfig, num_ranks: int, sizes: tuple[int, ...], seed: int
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a label and a load matrix [D, E] for every size and workload."""
    for tokens, workload in itertools.product(_drawn(sizes, seed), WORKLOADS):
        shape = (num_ranks, _num_experts(config), config.moe_router_topk)
        yield f"{tokens} tokens a rank, {workload}", load_matrix(workload, *shape, tokens, seed=seed, step=0)


def exchanges(
    config: TransformerConfig, groups: ProcessGroupCollection, device: torch.device, seed: int
) -> Iterator[Case]:
    """Yield a layer's first exchange for uneven loads, with each expert on its owner; own rows are included."""
    rank = groups.ep.rank()
    num_ranks = groups.ep.size()
    all_to_all = default_all_to_all(groups.ep)
    for label, counts_DE in _loads(config, num_ranks, EXCHANGED_TOKENS, seed):
        traffic_DD = counts_DE.reshape(num_ranks, num_ranks, -1).sum(2)
        bytes_DD = traffic_DD * config.hidden_size * config.params_dtype.itemsize
        splits_DD = torch.from_numpy(traffic_DD)
        rows = torch.zeros(int(splits_DD[rank].sum()), config.hidden_size, dtype=config.params_dtype, device=device)
        yield Case(
            "all_to_all",
            f"{label}: {1e-6 * bytes_DD.sum():.2f} MB",
            lambda _, rows=rows, splits_DD=splits_DD, bytes_DD=bytes_DD: Trial(
                lambda: all_to_all.start(rows, splits_DD).wait(),
                lambda cost: ExchangeModel.of(cost.profile).seconds(bytes_DD),
            ),
        )


def random_placement(num_experts: int, num_ranks: int, guests: int, seed: int) -> Placement:
    """Return a placement with owners in order and `guests` random guests on every rank, if there are enough experts."""
    generator = np.random.default_rng((seed, guests))
    owners = Placement.identity(num_experts, num_ranks, GUEST_SLOTS)
    additions = []
    for rank in range(num_ranks):
        strangers = [expert for expert in range(num_experts) if owners.owner(expert) != rank]
        additions += [(int(expert), rank) for expert in generator.permutation(strangers)[:guests]]
    return owners.with_hosts(additions)


def transfers(config: TransformerConfig, groups: ProcessGroupCollection, seed: int) -> Iterator[Case]:
    """Yield Trans and Agg of placements with guests, for experts of several widths.

    Each is executed along the routes that a run would choose by the profile, and along `exchanged` in many batches.
    """
    transfer = TransAgg(groups.ep)
    for width, guests in itertools.product(_drawn(EXPERT_WIDTHS, seed), GUESTS):
        shape = copy.copy(config)
        shape.moe_ffn_hidden_size = width
        experts = _experts(shape, groups)
        for parameter in experts.parameters():
            # Like DDP, which accumulates gradients in float32
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # pyright: ignore
        experts.allocate_guests(GUEST_SLOTS)
        placement = random_placement(_num_experts(config), groups.ep.size(), guests, seed)
        many = plan_hops(hops(placement, groups.ep.size(), "exchanged"), PIECES)
        param_bytes, grad_bytes = (
            sum(tensor.nbytes for tensor in tensors) for tensors in (experts.weights_of(0), experts.gradients_of(0))
        )
        label = f"{1e-6 * param_bytes:.2f} MB, {many.experts_sent:.0f} experts"
        model = functools.partial(replace, param_bytes=param_bytes, grad_bytes=grad_bytes)
        for name, plan_of in (
            ("", lambda cost, model=model, placement=placement: model(cost).trans_plan(placement)),
            ("_in_many_batches", lambda cost, many=many: many),
        ):
            for index, (kind, execute) in enumerate((("trans", transfer.trans), ("agg", transfer.agg))):
                yield Case(
                    kind + name,
                    label if not name else f"{label} in {len(many.rounds)} rounds",
                    lambda cost, each=(index, model, execute, plan_of, placement, experts): _transfer(cost, *each),
                )


def _transfer(
    cost: CostModel,
    index: int,
    model: Callable[[CostModel], CostModel],
    execute: Callable[..., object],
    plan_of: Callable[[CostModel], TransPlan],
    placement: Placement,
    experts: GroupedExperts,
) -> Trial:
    plan = plan_of(cost)
    return Trial(
        functools.partial(execute, plan, placement, experts), lambda cost: model(cost).plan_seconds(plan)[index]
    )


def computations(experts: GroupedExperts, groups: ProcessGroupCollection, seed: int) -> Iterator[Case]:
    """Yield forward and backward passes for loads that are uneven over ranks and over their slots."""
    rank = groups.ep.rank()
    num_ranks = groups.ep.size()
    for label, counts_DE in _loads(experts.config, num_ranks, COMPUTED_TOKENS, seed):
        tokens_by_rank = counts_DE.sum(0).reshape(num_ranks, -1)
        passes = slot_passes(experts, torch.from_numpy(tokens_by_rank[rank]))
        tokens_D = tokens_by_rank.sum(1)
        label = f"{label}: {tokens_D.max()} rows"
        yield Case(
            "forward",
            label,
            lambda _, passes=passes, tokens_D=tokens_D: Trial(
                passes.forward, lambda cost: cost.forward_seconds(_longest(cost, tokens_D))
            ),
        )
        yield Case(
            "backward",
            label,
            lambda _, passes=passes, tokens_D=tokens_D: Trial(
                passes.backward, lambda cost: cost.backward_seconds(_longest(cost, tokens_D))
            ),
        )


def _longest(cost: CostModel, tokens_D: np.ndarray) -> float:
    """Return the tokens of the rank that computes longest, at the mean rate."""
    return float((tokens_D / cost.profile.rate_D).max())
