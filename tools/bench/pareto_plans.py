"""Loads, plans and their scores for tools/bench/pareto.py.

The layer has DeepSeek-V3's experts: 256, of which a token takes 8, gated, 7168 wide, with an inner width of 2048.
Weights are in bfloat16, gradients in float32, and a rank has 4096 tokens. For each expert-parallel size and seed,
experts in random order have the popularity of a Zipf distribution or of a log-normal one, with several exponents and
deviations. The experts of each rank's tokens are a sample of it.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.model import CostModel, LayerTime, owners
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.planning.fit import ORDERS, Overload, fit
from megatron_balance.planning.policies import load_policy
from megatron_balance.profile.cluster import Cluster, Ranks, profile_of
from megatron_balance.profile.cluster_profile import ClusterProfile, Fit, Throughput, builtin
from oracle import least_seconds
from quota_planners import PLANNERS, TARGET, fewest_copies, floor_of, guests_of, limit_of

EXPERTS = 256
TOPK = 8
TOKENS = 4096
HIDDEN = 7168
FFN = 2048
DTYPE_BYTES = 2
GRAD_BYTES = 4
NODE = 8
RANKS = (8, 16, 32, 64, 128, 256)
SHAPES = (
    *(("zipf", exponent) for exponent in (0.3, 0.5, 0.7, 0.9)),
    *(("lognormal", sigma) for sigma in (0.3, 0.5, 0.8, 1.0)),
)
"""(distribution, exponent or deviation of the logarithm) of the experts' popularity."""

PARAMETERS, GATED_FFN = 3 * HIDDEN * FFN, 3 * FFN // 2
"""Parameters of an expert, and the inner width of one without gates that has as many."""

FREE = Fit(0.0, 0.0, 0.0, 0.0)

RUNS = 5
"""Runs of which the fastest counts for a planning time, because other processes share the machine."""


def fitted(tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, slots: int, target: float = TARGET) -> np.ndarray:
    """Return the quotas [E, D] of the policy `quota`'s fits, with the fewest moves."""
    experts_DS = np.argsort(owner_E, kind="stable").reshape(num_ranks, -1)
    loads_D = tokens_E[experts_DS].sum(1)
    limits_D = np.full(num_ranks, limit_of(int(tokens_E.sum()), num_ranks, target))
    overload = Overload(tokens_E[experts_DS], experts_DS, loads_D - limits_D, np.full(num_ranks, slots), num_ranks, 0)
    fits = (fit(overload, order) for order in ORDERS)
    found = min(fits, key=lambda found: (max(0, found.excess[-1]), len(found.moves.expert_M)))
    quotas_ED = np.zeros((len(tokens_E), num_ranks), dtype=np.int64)
    quotas_ED[np.arange(len(tokens_E)), owner_E] = tokens_E
    for expert, source, rank, tokens in zip(*found.moves, strict=True):
        quotas_ED[expert, [source, rank]] += [-tokens, tokens]
    return quotas_ED


class Load(NamedTuple):
    """Tokens of one layer, of which each rank has equally many experts."""

    counts_DE: np.ndarray

    @property
    def num_ranks(self) -> int:
        return len(self.counts_DE)

    @property
    def tokens_E(self) -> np.ndarray:
        return self.counts_DE.sum(0)

    @property
    def owner_E(self) -> np.ndarray:
        return owners(self.placement(0))

    def placement(self, slots: int) -> Placement:
        """Return the placement without guests."""
        return Placement.identity(self.counts_DE.shape[1], self.num_ranks, slots)


class Score(NamedTuple):
    """What a plan reaches and costs."""

    ratio: float
    """Tokens of the heaviest rank over the mean."""

    copies: int
    """Guests of all ranks."""

    fanout: int
    """Guests of the expert with the most."""

    sent: int
    """Guests of the experts of one rank, at most: so many copies it sends if no guest sends its own on."""

    received: int
    """Guests of one rank, at most."""

    milliseconds: float
    """CPU time of planning."""


def loads_of(num_ranks: int, seeds: int) -> Iterator[Load]:
    """Yield the loads of one expert-parallel size."""
    for index, (kind, width) in enumerate(SHAPES):
        for seed in range(seeds):
            generator = np.random.default_rng([seed, num_ranks, index])
            popular_E = np.arange(1, EXPERTS + 1) ** -width
            if kind == "lognormal":
                popular_E = generator.lognormal(0, width, EXPERTS)
            share_E = generator.permutation(popular_E / popular_E.sum())
            yield Load(generator.multinomial(TOKENS * TOPK, share_E, num_ranks))


def reference(planner: Callable[..., np.ndarray], load: Load, slots: int, **options: float) -> Score:
    """Return the score of a function of `quota_planners`."""
    tokens_E = load.tokens_E
    owner_E = load.owner_E
    start = time.process_time()
    quotas_ED = planner(tokens_E, owner_E, load.num_ranks, slots, **options)
    seconds = time.process_time() - start
    return _score(quotas_ED.sum(0), guests_of(quotas_ED, owner_E), owner_E, seconds)


def policy(name: str, load: Load, slots: int, price: float = 0.0) -> Score:
    """Return the score of a registered policy; see `priced`."""
    planner = load_policy(name)
    cost = model(priced(load.num_ranks, price), planner.split)
    current = load.placement(slots)
    start = time.process_time()
    placement = planner.plan(load.counts_DE, current, cost)
    seconds = time.process_time() - start
    guests_ED = np.zeros((placement.num_experts, placement.num_ranks), dtype=bool)
    for rank, row in enumerate(placement.guests):
        guests_ED[[expert for expert in row if expert != EMPTY], rank] = True
    return _score(cost.traffic(load.counts_DE, placement).sum((0, 1)), guests_ED, load.owner_E, seconds)


def _score(load_D: np.ndarray, guests_ED: np.ndarray, owner_E: np.ndarray, seconds: float) -> Score:
    sent_D = np.bincount(owner_E, weights=guests_ED.sum(1), minlength=len(load_D))
    return Score(
        ratio=float(load_D.max() / load_D.mean()),
        copies=int(guests_ED.sum()),
        fanout=int(guests_ED.sum(1).max()),
        sent=int(sent_D.max()),
        received=int(guests_ED.sum(0).max()),
        milliseconds=1e3 * seconds,
    )


def free(profile: ClusterProfile) -> ClusterProfile:
    """Return the profile of ranks whose links take no time."""
    links = {kind: dict.fromkeys(groups, FREE) for kind, groups in profile.links.items()}
    return dataclasses.replace(profile, links=links, messages=dict.fromkeys(profile.messages, FREE))


def model(profile: ClusterProfile, split: str) -> CostModel:
    """Return the cost model of DeepSeek-V3's experts."""
    return CostModel(
        profile,
        token_bytes=HIDDEN * DTYPE_BYTES,
        param_bytes=PARAMETERS * DTYPE_BYTES,
        grad_bytes=PARAMETERS * GRAD_BYTES,
        split=split,
    )


def priced(num_ranks: int, price: float) -> ClusterProfile:
    """Return the profile of ranks whose links take no time, except for the experts of a plan.

    Args:
        price: seconds to send an expert's weights and to return its gradients, over those to compute a rank's tokens.
    """
    profile = free(builtin(num_ranks, num_ranks, HIDDEN, GATED_FFN, DTYPE_BYTES))
    computing = TOPK * TOKENS * (profile.forward.seconds_per_token + profile.backward.seconds_per_token)
    line = FREE._replace(beta=price * computing / (PARAMETERS * (DTYPE_BYTES + GRAD_BYTES)))
    experts = {kind: dict.fromkeys(profile.links[kind], line) for kind in ("trans", "agg")}
    return dataclasses.replace(profile, links={**profile.links, **experts})


class Timed(NamedTuple):
    """Modeled seconds of a layer with a plan on a cluster."""

    time: LayerTime
    copies: int
    milliseconds: float
    """CPU time of planning."""


def timed(name: str, load: Load, slots: int, cluster: Cluster) -> Timed:
    """Return the times with a registered policy or a planner of `quota_planners`; nothing hides Trans and Agg."""
    profile = profile_of(cluster, Ranks(load.num_ranks, NODE, NODE), HIDDEN, GATED_FFN, DTYPE_BYTES)
    planner = None if name in PLANNERS else load_policy(name)
    cost = model(profile, planner.split if planner else "proportional")
    current = load.placement(slots)
    start = time.process_time()
    if planner is None:
        quotas_ED = PLANNERS[name](load.tokens_E, load.owner_E, load.num_ranks, slots)
        placement = placement_of(quotas_ED, current)
    else:
        placement = planner.plan(load.counts_DE, current, cost)
    seconds = time.process_time() - start
    return Timed(cost.layer_time(load.counts_DE, placement), placement.added_hosts, 1e3 * seconds)


def planning_ms(name: str, load: Load, slots: int, cluster: Cluster) -> tuple[float, float, float]:
    """Return the milliseconds of a plan with links that take no time, with those of a cluster, and of its transfers."""
    planner = load_policy(name)
    current = load.placement(slots)
    real = profile_of(cluster, Ranks(load.num_ranks, NODE, NODE), HIDDEN, GATED_FFN, DTYPE_BYTES)
    costs = [model(profile, planner.split) for profile in (priced(load.num_ranks, 0.0), real)]
    planned = planner.plan(load.counts_DE, current, costs[1])
    return (
        *(_fastest(lambda cost=cost: planner.plan(load.counts_DE, current, cost)) for cost in costs),
        # A model keeps the messages that it has chosen
        _fastest(lambda: dataclasses.replace(costs[1].transport).plan(planned)),
    )


def _fastest(work: Callable[[], object]) -> float:
    """Return the milliseconds of this thread for the fastest of several runs."""
    times = []
    for _ in range(RUNS):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


def placement_of(quotas_ED: np.ndarray, current: Placement) -> Placement:
    """Return the placement in which each rank computes so many tokens of each expert, with the split `proportional`."""
    hosts = [np.flatnonzero(row_D).tolist() for row_D in quotas_ED]
    quotas = [row_D[ranks].tolist() if len(ranks) > 1 else [] for row_D, ranks in zip(quotas_ED, hosts, strict=True)]
    return current.rehost([ranks or [owner] for ranks, owner in zip(hosts, current.owners, strict=True)], quotas=quotas)


def gigabytes(copies: float) -> float:
    """Return the gigabytes that guests receive and send: weights and gradients."""
    return copies * PARAMETERS * (DTYPE_BYTES + GRAD_BYTES) / 1e9


def floors(loads: Sequence[Load], slots: int) -> np.ndarray:
    """Return the lower bound of each load's max/mean."""
    return np.array(
        [
            floor_of(load.tokens_E, load.owner_E, load.num_ranks, slots) * load.num_ranks / load.counts_DE.sum()
            for load in loads
        ]
    )


def fewest(loads: Sequence[Load], target: float) -> float:
    """Return the mean of the loads' lower bounds of copies for a bound of max/mean."""
    return float(np.mean([fewest_copies(load.tokens_E, load.owner_E, load.num_ranks, target) for load in loads]))


def least_ratio(load: Load, slots: int) -> float:
    """Return the least max/mean of all plans, with fractions of tokens: the time of computation alone."""
    profile = free(builtin(load.num_ranks, load.num_ranks, HIDDEN, GATED_FFN))
    profile = dataclasses.replace(
        profile, forward=Throughput(1.0, 0.0, 0.0, 0.0), backward=Throughput(0.0, 0.0, 0.0, 0.0)
    )
    seconds = least_seconds(load.counts_DE, load.placement(slots), model(profile, "proportional"))
    return seconds * load.num_ranks / float(load.counts_DE.sum())
