"""Draws the Pareto curve of balance against bytes and fan-out: planners of other systems, and the policies.

    python tools/bench/pareto.py [--slots 1 2 4] [--seeds 2] [--part plans bounds small] [--picture PNG]

Loads: for each expert-parallel size and seed, experts in random order have the popularity of a Zipf distribution or of
a log-normal one, with several exponents and deviations, and the tokens of every rank are a multinomial sample of it.

Plans are made by `quota_planners` and by all registered policies, which see links that cost nothing and so plan for
balance alone. The columns: tokens of the heaviest rank over the mean (mean, 95% quantile and worst of all loads);
guests of all ranks, the gigabytes of their weights and gradients, the guests of the expert with the most, the guests
of the experts of one rank, which it sends if there are no relays, and the guests of one rank, which it receives, at
most; CPU time of planning. Each is a mean over loads. `floor` is a lower bound of any plan (`quota_planners.floor_of`).

`bounds` lists the copies that planners need for a bound of max/mean, and the share of loads in which they keep it.
`small` compares the floor and the planners with the least max/mean of any plan, by the solver of `oracle`.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.model import CostModel, owners
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.planning.policies import load_policy, registered
from megatron_balance.profile.cluster_profile import ClusterProfile, Fit, Throughput, builtin
from oracle import least_seconds
from quota_planners import BOUNDED, PLANNERS, fewest_copies, floor_of, guests_of

EXPERTS, TOPK, TOKENS = 256, 8, 4096
RANKS = (8, 16, 32, 64, 128, 256)
SHAPES = (
    *(("zipf", exponent) for exponent in (0.3, 0.5, 0.7, 0.9)),
    *(("lognormal", sigma) for sigma in (0.3, 0.5, 0.8, 1.0)),
)
"""(distribution, exponent or deviation of the logarithm) of the experts' popularity."""

HIDDEN, FFN, DTYPE_BYTES, GRAD_BYTES, NODE = 7168, 2048, 2, 4, 8
"""DeepSeek-V3's experts: gated, weights in bfloat16, gradients in float32."""

GATED_FFN = 3 * FFN // 2
"""Inner width of an expert without gates that has as many parameters."""

TARGETS = (1.005, 1.01, 1.02, 1.05)
CURVE = (1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2)
"""Targets of the picture's lines."""

LOOSE = (1.35, 1.5, 2.0, 3.0, 4.0, 5.0)
"""Further targets of the fewest copies."""

SMALL = ((3, 6, 1), (4, 4, 1), (4, 8, 1), (3, 12, 1), (3, 12, 2), (4, 16, 1))
"""(D, E, slots) of the cases whose optimum is known."""

HOTTER = 16
"""Popularity of the first rank's experts over that of others in these cases, so that slots do not suffice."""

SMALL_LOADS = 12
PARTS = ("plans", "bounds", "small")
FREE = Fit(0.0, 0.0, 0.0, 0.0)


class Load(NamedTuple):
    """Tokens of one layer."""

    label: str
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
    copies: int
    fanout: int
    sent: int
    received: int
    milliseconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, default=2, help="loads of each distribution and expert-parallel size")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="expert-parallel sizes")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--picture", type=Path, help="file to draw the curves to")
    args = parser.parse_args()
    loads = [load for num_ranks in args.ranks for load in loads_of(num_ranks, args.seeds)]
    print(f"{len(loads)} loads, E={EXPERTS}, EP {' '.join(map(str, args.ranks))}")
    tables = {slots: table(loads, slots) for slots in args.slots} if {"plans"} & {*args.part} or args.picture else {}
    for slots, scores in tables.items():
        _print_plans(loads, slots, scores)
    if "bounds" in args.part:
        for slots in args.slots:
            _print_bounds(loads, slots)
    if "small" in args.part:
        _print_small()
    if args.picture:
        _draw(args.picture, loads, tables)
    return 0


def loads_of(num_ranks: int, seeds: int) -> Iterator[Load]:
    """Yield the loads of one expert-parallel size."""
    for index, (kind, width) in enumerate(SHAPES):
        for seed in range(seeds):
            generator = np.random.default_rng([seed, num_ranks, index])
            popular_E = np.arange(1, EXPERTS + 1) ** -width
            if kind == "lognormal":
                popular_E = generator.lognormal(0, width, EXPERTS)
            share_E = generator.permutation(popular_E / popular_E.sum())
            yield Load(f"{kind} {width}", generator.multinomial(TOKENS * TOPK, share_E, num_ranks))


def table(loads: Sequence[Load], slots: int) -> dict[str, list[Score]]:
    """Return the scores of all planners and policies."""
    planners = {name: functools.partial(reference, planner) for name, planner in PLANNERS.items()}
    policies = {name: functools.partial(policy, name) for name in registered()}
    return {name: [score(load, slots) for load in loads] for name, score in {**planners, **policies}.items()}


def reference(planner: Callable[..., np.ndarray], load: Load, slots: int, **options: float) -> Score:
    """Return the score of a function of `quota_planners`."""
    tokens_E, owner_E = load.tokens_E, load.owner_E
    start = time.process_time()
    quotas_ED = planner(tokens_E, owner_E, load.num_ranks, slots, **options)
    seconds = time.process_time() - start
    return _score(quotas_ED.sum(0), guests_of(quotas_ED, owner_E), owner_E, seconds)


def policy(name: str, load: Load, slots: int) -> Score:
    """Return the score of a registered policy that sees links without costs."""
    planner = load_policy(name)
    cost = model(free(builtin(load.num_ranks, load.num_ranks, HIDDEN, GATED_FFN, DTYPE_BYTES)), planner.split)
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
    parameters = 3 * HIDDEN * FFN
    return CostModel(
        profile,
        token_bytes=HIDDEN * DTYPE_BYTES,
        param_bytes=parameters * DTYPE_BYTES,
        grad_bytes=parameters * GRAD_BYTES,
        split=split,
    )


def gigabytes(copies: float) -> float:
    """Return the gigabytes that guests receive and send: weights and gradients."""
    return copies * 3 * HIDDEN * FFN * (DTYPE_BYTES + GRAD_BYTES) / 1e9


def floors(loads: Sequence[Load], slots: int) -> np.ndarray:
    """Return the lower bound of each load's max/mean."""
    return np.array(
        [
            floor_of(load.tokens_E, load.owner_E, load.num_ranks, slots) * load.num_ranks / load.counts_DE.sum()
            for load in loads
        ]
    )


def _draw(path: Path, loads: Sequence[Load], tables: Mapping[int, Mapping[str, Sequence[Score]]]) -> None:
    """Draw what the tables have, and the planners that take a target with several of them."""
    from pareto_picture import draw  # the tables do not need matplotlib

    lines = {
        slots: {
            name: [_point([reference(planner, load, slots, target=target) for load in loads]) for target in CURVE]
            for name, planner in BOUNDED.items()
        }
        for slots in tables
    }
    draw(
        path,
        {slots: {name: _point(scores) for name, scores in rows.items()} for slots, rows in tables.items()},
        lines,
        {slots: 100 * (floors(loads, slots).mean() - 1) for slots in tables},
        [(gigabytes(fewest(loads, target)), 100 * (target - 1)) for target in (1.0, *CURVE, *LOOSE)],
    )


def _point(scores: Sequence[Score]) -> tuple[float, float, float]:
    """Return mean gigabytes, copies that a rank sends, and percent of the heaviest rank above the mean."""
    means = Score(*np.mean(scores, axis=0))
    return gigabytes(means.copies), means.sent, 100 * (means.ratio - 1)


def _print_plans(loads: Sequence[Load], slots: int, scores: Mapping[str, Sequence[Score]]) -> None:
    print(f"\n{slots} guest slot{'s' if slots > 1 else ''}\n")
    print("| planner | max/mean: mean / 95% / worst | copies | GB | per expert | a rank sends | receives | ms |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| floor | {_spread(floors(loads, slots))} | | | | | | |")
    for name, plans in scores.items():
        rows = np.array(plans)
        _, copies, fanout, sent, received, milliseconds = rows.mean(0)
        print(
            f"| `{name}` | {_spread(rows[:, 0])} | {copies:.1f} | {gigabytes(copies):.1f} | {fanout:.1f} | {sent:.1f} "
            f"| {received:.1f} | {milliseconds:.1f} |",
            flush=True,
        )


def _spread(ratios: np.ndarray) -> str:
    return f"{ratios.mean():.3f} / {np.quantile(ratios, 0.95):.3f} / {ratios.max():.3f}"


def _print_bounds(loads: Sequence[Load], slots: int) -> None:
    sizes = sorted({load.num_ranks for load in loads})
    print(f"\ncopies for a bound of max/mean, {slots} guest slot{'s' if slots > 1 else ''}\n")
    print(f"| planner | bound | {' | '.join(f'EP {size}' for size in sizes)} | all |")
    print(f"|---|---|{'---|' * (len(sizes) + 1)}")
    groups = [*([load for load in loads if load.num_ranks == size] for size in sizes), loads]
    for target in TARGETS:
        print(f"| floor | {target} | {' | '.join(f'{fewest(group, target):.1f}' for group in groups)} |")
        for name, planner in BOUNDED.items():
            cells = [
                _kept([reference(planner, load, slots, target=target) for load in part], target) for part in groups
            ]
            print(f"| `{name}` | {target} | {' | '.join(cells)} |", flush=True)


def fewest(loads: Sequence[Load], target: float) -> float:
    """Return the mean of the loads' lower bounds of copies for a bound of max/mean."""
    return float(np.mean([fewest_copies(load.tokens_E, load.owner_E, load.num_ranks, target) for load in loads]))


def _kept(plans: Sequence[Score], target: float) -> str:
    """Return the mean number of copies, and the share of plans within the target unless it is 100%."""
    copies, kept = np.mean([plan.copies for plan in plans]), np.mean([plan.ratio <= target for plan in plans])
    return f"{copies:.1f}" if kept == 1 else f"{copies:.1f} ({kept:.0%})"


def _print_small() -> None:
    print("\nmeans of max/mean where the optimum is known\n")
    print(f"| D, E, slots | floor | optimum | {' | '.join(f'`{name}`' for name in PLANNERS)} |")
    print(f"|---|---|---|{'---|' * len(PLANNERS)}")
    for num_ranks, experts, slots in SMALL:
        generator = np.random.default_rng([num_ranks, experts, slots])
        rows = []
        for _ in range(SMALL_LOADS):
            weights_E = generator.lognormal(0, 0.5, experts)
            weights_E[: experts // num_ranks] *= HOTTER
            load = Load("", generator.multinomial(TOKENS, weights_E / weights_E.sum(), num_ranks))
            scores = [reference(planner, load, slots).ratio for planner in PLANNERS.values()]
            rows.append((floors([load], slots)[0], least_ratio(load, slots), *scores))
        cells = " | ".join(f"{mean:.3f}" for mean in np.mean(rows, axis=0))
        print(f"| {num_ranks}, {experts}, {slots} | {cells} |", flush=True)


def least_ratio(load: Load, slots: int) -> float:
    """Return the least max/mean of all plans, with fractions of tokens: the time of computation alone."""
    profile = free(builtin(load.num_ranks, load.num_ranks, HIDDEN, GATED_FFN))
    profile = dataclasses.replace(
        profile, forward=Throughput(1.0, 0.0, 0.0, 0.0), backward=Throughput(0.0, 0.0, 0.0, 0.0)
    )
    seconds = least_seconds(load.counts_DE, load.placement(slots), model(profile, "proportional"))
    return seconds * load.num_ranks / float(load.counts_DE.sum())


if __name__ == "__main__":
    sys.exit(main())
