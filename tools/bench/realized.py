"""Compares plans for predicted, exact and both loads: what they realize when tokens of a sequence are alike.

    OMP_NUM_THREADS=1 python tools/bench/realized.py

Every rank's microbatch draws its own popularity of the experts around a common one, which drifts between iterations.
Each cell has max/mean of the ranks' tokens without a plan, and as realized; then the modeled seconds of the layer, as
a multiple of those with even routing. All plans are those of `quota`, with two guest slots a rank.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.flex import Routing
from megatron_balance.cost.model import CostModel, Overlap, balance_ratio, slowed_by
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies import load_policy
from megatron_balance.planning.within import plan_within
from megatron_balance.profile.cluster import Ranks, profile_of, read

CLUSTERS = Path(__file__).parents[2] / "configs/clusters"
EXPERTS = 256
TOPK = 8
TOKENS = 4096
HIDDEN = 7168
FFN = 2048
SLOTS = 2
HIDDEN_SECONDS = Overlap(1e-3, 2e-3)
"""The non-MoE computation between two MoE layers."""

ALIKE = 400.0
"""Concentration of the Dirichlet distribution of a microbatch's popularity; large: all microbatches are alike."""

ITERATIONS = 6
SEEDS = 3


class Outcome(NamedTuple):
    """Max/mean, and seconds over those of even routing, averaged over iterations."""

    ratio: float
    seconds: float


def loads_of(popularity: str, drift: float, ranks: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the load [D, E] of one microbatch in each iteration."""
    generator = np.random.default_rng([seed, ranks])
    popular_E = np.arange(1, EXPERTS + 1) ** -0.7
    if popularity == "lognormal:0.5":
        popular_E = generator.lognormal(0, 0.5, EXPERTS)
    popular_E = generator.permutation(popular_E / popular_E.sum())
    for _ in range(ITERATIONS):
        shares_DE = generator.dirichlet(ALIKE * popular_E, ranks)
        yield np.stack([generator.multinomial(TOKENS * TOPK, share_E) for share_E in shares_DE]).astype(np.int64)
        popular_E = popular_E * generator.lognormal(0, drift, EXPERTS)
        popular_E /= popular_E.sum()


def cost_of(cluster: str, ranks: int, trans_each: int) -> CostModel:
    """Return the cost model of DeepSeek-V3's MoE layer; nodes are as large as the cluster's."""
    found = read(CLUSTERS / f"{cluster}.yaml")
    node = min(ranks, int(found.gpus_per_node.value))
    parameters = 3 * HIDDEN * FFN
    profile = profile_of(found, Ranks(ranks, node, node), HIDDEN, 3 * FFN // 2, 2)
    return CostModel(
        profile,
        token_bytes=2 * HIDDEN,
        param_bytes=2 * parameters,
        grad_bytes=4 * parameters,
        split="proportional",
        overlap=HIDDEN_SECONDS._replace(slowed=slowed_by(profile)),
        trans_each=trans_each,
        routing=Routing(EXPERTS, TOPK, 1, 1),
    )


def outcomes(cluster: str, ranks: int, popularity: str, drift: float) -> dict[str, Outcome]:
    """Return the outcome of each way to plan."""
    policy = load_policy("quota")
    ahead, each = cost_of(cluster, ranks, 0), cost_of(cluster, ranks, 2)
    owners = Placement.identity(EXPERTS, ranks, SLOTS)
    found: dict[str, list[Outcome]] = {name: [] for name in ("none", "predicted", "exact", "both")}
    for seed in range(SEEDS):
        latest = None
        for counts_DE in loads_of(popularity, drift, ranks, seed):
            if latest is not None:
                total = np.full_like(counts_DE, TOKENS * TOPK // EXPERTS)
                even = ahead.layer_seconds(total, owners)

                def add(name: str, placement: Placement, *sendings: float, load=counts_DE, even=even) -> None:
                    ratio = balance_ratio(ahead.traffic(load, placement).sum(1))
                    time = ahead.time_of(*ahead.work(load, placement), 0.0, 0.0).total
                    found[name].append(Outcome(ratio, float(time + sum(sendings)) / even))

                add("none", owners)
                predicted = policy.plan(latest, owners, ahead)
                time = ahead.layer_time(counts_DE, predicted)
                add("predicted", predicted, time.trans, time.agg)
                exact = policy.plan(counts_DE, owners, each)
                time = each.layer_time(counts_DE, exact)
                add("exact", exact, time.trans, time.agg)
                both = plan_within(counts_DE, predicted, policy=policy, split="proportional", slots=SLOTS, cost=each)
                sent = ahead.sending(predicted)
                own = [float(one.max(initial=0.0)) for one in each.transport.rank_seconds(both.plan)]
                computed = ahead.work(counts_DE, both.placement)[1]
                sendings = ahead.charged(computed, sent.trans, sent.agg), each.charged(computed, *own)
                add("both", both.placement, *sendings[0], *sendings[1])
            latest = counts_DE
    return {name: Outcome(*np.mean(values, axis=0)) for name, values in found.items()}


def main() -> None:
    print("| cluster | ranks | load | drift | none | predicted | exact | both |")
    print("|---|---|---|---|---|---|---|---|")
    for cluster, ranks in (("h100_measured", 8), ("h100_measured", 64), ("gb200_measured", 64)):
        for popularity in ("zipf:0.7", "lognormal:0.5"):
            for drift in (0.0, 0.02, 0.1):
                cells = (
                    f"{one.ratio:.3f}, {one.seconds:.3f}"
                    for one in outcomes(cluster, ranks, popularity, drift).values()
                )
                print(f"| {cluster} | {ranks} | {popularity} | {drift:.0%} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
