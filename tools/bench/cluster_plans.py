"""Compares policies with the best plan known for large models on clusters that papers and vendors describe.

    python tools/bench/cluster_plans.py [--policy none pro_prophet flexmoe demi] [--steps 6000]

The best plan known is the best one that searches find from the policies' plans and from plans that put the hottest
experts on more and more ranks, with either split of tokens: simulated annealing, which adds, removes and moves hosts of
experts. Another search keeps one host for each expert, as in DEMI's paper. Policies start without guests, and nothing
hides Trans and Agg. Layer times are those of the cost model.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.loads import by_microbatch, expert_loads
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS
from megatron_balance.planning.policies import load_policy, registered
from megatron_balance.planning.policies.interface import owners_host
from megatron_balance.profile.cluster import Ranks, profile_of, read
from megatron_balance.workloads.synthetic import load_matrix

CLUSTERS = Path(__file__).parents[2] / "configs/clusters"
POLICIES = ("none", "pro_prophet", "flexmoe", "quota", "demi")
TOKENS = 4096
TOPK = 2
BURST_STEP = 9
NODE = 8
DTYPE_BYTES = 2
SLOTS = 2
HOTTEST = 4
"""Maximum number of experts that a search starts with on several ranks."""

STARTS = 2
"""Number of plans with each split from which a search continues."""

WARMTH = (0.02, 0.0002)
"""First and last temperature: the fraction of the layer's time by which a step may make it longer."""


class Case(NamedTuple):
    """A model and its loads on a cluster."""

    label: str
    cluster: str
    """A file of configs/clusters."""
    num_ranks: int
    num_experts: int
    hidden: int
    ffn: int
    """Inner width of an expert without gates; a gated expert has 3/2 of its own."""
    workload: str
    """A synthetic workload, or WARM."""


WARM = "warm"
"""Two experts of rank 0 receive WARMER times the mean tokens of a rank each, all others evenly many."""

WARMER = 1.75

CASES = (
    Case("Mixtral, two warm experts of one rank", "h100.yaml", 16, 32, 4096, 21504, WARM),
    Case("GPT-MoE-L, two warm experts of one rank", "flexmoe.yaml", 32, 64, 2048, 8192, WARM),
    Case("Mixtral, two hot experts of one rank", "h100.yaml", 16, 32, 4096, 21504, "hot_rank"),
    Case("Mixtral, two hot experts of two ranks", "h100.yaml", 16, 16, 4096, 21504, "hot_rank"),
    Case("Mixtral, one hot expert, another half as hot", "h100.yaml", 16, 32, 4096, 21504, "hot_experts"),
    Case("GPT-MoE-L, four hot experts of two ranks", "flexmoe.yaml", 32, 64, 2048, 8192, "hot_rank"),
    Case("GPT-MoE-L, four hot experts, each half as hot", "flexmoe.yaml", 32, 64, 2048, 8192, "hot_experts"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="+", choices=registered(), default=list(POLICIES))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens per rank")
    parser.add_argument("--steps", type=int, default=6000, help="steps of each search")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for case in CASES:
        _table(case, args)
    return 0


def loads_of(case: Case, tokens: int, seed: int) -> np.ndarray:
    """Return the loads [D, E] of a case."""
    if case.workload != WARM:
        return load_matrix(
            case.workload,
            num_ranks=case.num_ranks,
            num_experts=case.num_experts,
            topk=TOPK,
            tokens_per_rank=tokens,
            seed=seed,
            step=BURST_STEP,
        )
    warm = int(WARMER * TOPK * tokens / case.num_ranks)
    counts_DE = np.full((case.num_ranks, case.num_experts), (TOPK * tokens - 2 * warm) // (case.num_experts - 2))
    counts_DE[:, :2] = warm
    return counts_DE


def cost_model(case: Case) -> CostModel:
    """Return the cost model of bfloat16 experts with float32 gradients."""
    cluster = read(CLUSTERS / case.cluster)
    profile = profile_of(cluster, Ranks(case.num_ranks, NODE, NODE), case.hidden, case.ffn, DTYPE_BYTES)
    expert = 2 * case.hidden * case.ffn * DTYPE_BYTES
    return CostModel(profile, token_bytes=case.hidden * DTYPE_BYTES, param_bytes=expert, grad_bytes=2 * expert)


def _table(case: Case, args: argparse.Namespace) -> None:
    cost = cost_model(case)
    current = Placement.identity(case.num_experts, case.num_ranks, SLOTS)
    counts_DE = loads_of(case, args.tokens, args.seed)
    print(f"\n{case.label}: D={case.num_ranks} E={case.num_experts}, {case.cluster}")
    print("policy            layer ms  over best  guests  exchanges  experts  Trans+Agg ms")
    plans: dict[str, tuple[CostModel, Placement]] = {}
    for name in args.policy:
        policy = load_policy(name)
        judge = replace(cost, split=policy.split)
        plans[name] = judge, policy.plan(counts_DE, current, judge)
    known = [plan for _, plan in plans.values()]
    for split in SPLITS:
        judge = replace(cost, split=split)
        starts = [*known, *simple_plans(counts_DE, current)]
        plans[f"best {split}"] = judge, best_known(counts_DE, starts, judge, args.steps)
    starts = [current, load_policy("demi", hosts=1).plan(counts_DE, current, cost)]
    plans["best one host"] = cost, best_known(counts_DE, starts, cost, args.steps, copies=False)
    best = min(judge.layer_seconds(counts_DE, plan) for judge, plan in plans.values())
    for name, (judge, plan) in plans.items():
        time = judge.layer_time(counts_DE, plan)
        experts = time.forward + time.backward
        sending = time.trans + time.agg
        print(
            f"{name:17s} {1e3 * time.total:8.2f} {time.total / best:10.3f} {plan.added_hosts:7d} "
            f"{1e3 * time.all_to_all:10.2f} {1e3 * experts:8.2f} {1e3 * sending:13.2f}",
            flush=True,
        )


def best_known(
    counts: np.ndarray, starts: Sequence[Placement], cost: CostModel, steps: int, *, copies: bool = True
) -> Placement:
    """Return the best plan that searches of so many steps find from the best of the starts.

    Args:
        copies: whether an expert may have several hosts.
    """
    fastest = sorted(starts, key=lambda placement: cost.layer_seconds(counts, placement))[:STARTS]
    found = [Annealing(counts, start, cost, seed, copies=copies).run(steps) for seed, start in enumerate(fastest)]
    return min(found, key=lambda placement: cost.layer_seconds(counts, placement))


def simple_plans(counts: np.ndarray, current: Placement) -> Iterator[Placement]:
    """Yield plans with the hottest experts on the ranks that follow their owners, or on one rank of each node first."""
    hottest_E = np.argsort(-by_microbatch(counts).sum((0, 1)), kind="stable")[:HOTTEST]
    ranks = np.arange(current.num_ranks)
    for size in (1, NODE):
        order = ranks.reshape(-1, size).T.ravel() if size > 1 else ranks
        for experts in range(1, HOTTEST + 1):
            for copies in range(1, current.num_ranks):
                free_D = np.full(current.num_ranks, current.guest_slots)
                additions = []
                for expert in hottest_E[:experts].tolist():
                    owner = current.owner(expert)
                    others = np.roll(order, -1 - np.flatnonzero(order == owner)[0])[:-1]
                    chosen = others[free_D[others] > 0][:copies]
                    free_D[chosen] -= 1
                    additions += [(expert, rank) for rank in chosen.tolist()]
                yield owners_host(current, additions)


class Annealing:
    """Simulated annealing over the hosts of experts."""

    def __init__(self, counts: np.ndarray, start: Placement, cost: CostModel, seed: int, *, copies: bool) -> None:
        self.start, self.cost, self.generator = start, cost, np.random.default_rng(seed)
        self.kinds = np.arange(6) if copies else np.array([2, 5])
        self.counts_EBD = by_microbatch(counts).transpose(2, 0, 1).astype(np.float64)
        self.owner_E, self.hosts_ED, self.primary_E = owners(start), start.tables.shares_ED, np.array(start.primary)
        tokens_E = self.counts_EBD.sum((1, 2))
        self.chance_E = 0.5 * tokens_E / max(1.0, tokens_E.sum()) + 0.5 / len(tokens_E)
        self.loads_EFBD = self._loads(np.arange(start.num_experts), self.hosts_ED, self.primary_E)
        self.total_FBD = self.loads_EFBD.sum(0)

    def run(self, steps: int) -> Placement:
        """Return the best plan of all steps."""
        now = best = self._seconds(self.total_FBD, self.hosts_ED, self.primary_E, math.inf)
        found = self.hosts_ED, self.primary_E
        for warmth in np.geomspace(*WARMTH, steps):
            rows = self._proposal()
            hosts_ED = self.hosts_ED.copy()
            primary_E = self.primary_E.copy()
            if not rows:
                continue
            experts_A = np.array([*rows])
            hosts_ED[experts_A] = [*rows.values()]
            if not self._fits(hosts_ED):
                continue
            for favorite_E in (self.owner_E, hosts_ED.argmax(1)):
                hosted_E = np.take_along_axis(hosts_ED, primary_E[:, None], 1)[:, 0] > 0
                primary_E = np.where(hosted_E, primary_E, favorite_E)
            loads_AFBD = self._loads(experts_A, hosts_ED[experts_A], primary_E[experts_A])
            total_FBD = self.total_FBD + (loads_AFBD - self.loads_EFBD[experts_A]).sum(0)
            limit = now * (1 - warmth * math.log(self.generator.random()))
            seconds = self._seconds(total_FBD, hosts_ED, primary_E, limit)
            if seconds > limit:
                continue
            now = seconds
            self.total_FBD = total_FBD
            self.hosts_ED = hosts_ED
            self.primary_E = primary_E
            self.loads_EFBD[experts_A] = loads_AFBD
            if now < best:
                best = now
                found = (hosts_ED, primary_E)
        return self._placement(*found)

    def _proposal(self) -> dict[int, np.ndarray]:
        """Return new vExperts [D] of one expert or two."""
        generator = self.generator
        ranks = len(self.hosts_ED[0])
        expert = int(generator.choice(len(self.chance_E), p=self.chance_E))
        row_D = self.hosts_ED[expert].copy()
        hosts = np.flatnonzero(row_D)
        rank = int(generator.integers(ranks))
        kind = generator.choice(self.kinds)
        # Kinds 2 and 5 keep the number of vExperts
        if kind == 0:
            row_D[rank] += 1
        elif kind == 1:
            row_D[generator.choice(hosts)] -= 1
        elif kind == 2:
            gone = generator.choice(hosts)
            row_D[rank] += row_D[gone]
            row_D[gone] = 0
        elif kind == 3:
            # Several neighbors at once
            size = int(generator.integers(2, NODE + 1))
            row_D[(rank // size * size + np.arange(size)) % ranks] = int(generator.integers(2))
        elif kind == 4:
            row_D[:] = 0
            row_D[generator.choice([rank, self.owner_E[expert]])] = 1
        else:
            # Exchange a guest with one of another expert
            other = int(generator.choice(len(self.chance_E), p=self.chance_E))
            theirs_D = self.hosts_ED[other].copy()
            gone = generator.choice(hosts)
            if other == expert or not theirs_D[rank]:
                return {}
            row_D[[gone, rank]] += [-row_D[gone], row_D[gone]]
            theirs_D[[gone, rank]] += [theirs_D[rank], -theirs_D[rank]]
            return {expert: row_D, other: theirs_D} if row_D.any() and theirs_D.any() else {}
        return {expert: row_D} if row_D.any() else {}

    def _fits(self, hosts_ED: np.ndarray) -> bool:
        guests_ED = hosts_ED > 0
        guests_ED[np.arange(len(hosts_ED)), self.owner_E] = False
        return bool(guests_ED.sum(0).max() <= self.start.guest_slots)

    def _loads(self, experts_A: np.ndarray, rows_AD: np.ndarray, primary_A: np.ndarray) -> np.ndarray:
        return expert_loads(self.cost.network, self.cost.split, self.counts_EBD[experts_A], rows_AD, primary_A)

    def _placement(self, hosts_ED: np.ndarray, primary_E: np.ndarray) -> Placement:
        hosts = [np.repeat(np.arange(len(row_D)), row_D).tolist() for row_D in hosts_ED]
        return self.start.rehost(hosts, primary_E.tolist())

    def _seconds(self, total_FBD: np.ndarray, hosts_ED: np.ndarray, primary_E: np.ndarray, limit: float) -> float:
        """Return the layer's seconds, or infinity if they exceed `limit` without Trans and Agg."""
        (exchanging,), (computed,) = self.cost.work_of(total_FBD[None])
        if self.cost.time_of(exchanging, computed, 0.0, 0.0).total > limit:
            return math.inf
        sending = self.cost.sending(self._placement(hosts_ED, primary_E))
        return float(self.cost.time_of(exchanging, computed, sending.trans, sending.agg).total)


if __name__ == "__main__":
    sys.exit(main())
