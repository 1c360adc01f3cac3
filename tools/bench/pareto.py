"""Draws the Pareto curve of balance against bytes and fan-out: planners of other systems, and the policies.

    python tools/bench/pareto.py --cluster configs/clusters/h100.yaml --picture docs/balance_pareto.png
    python tools/bench/pareto.py [--policy none quota] [--slots 1 2 4] [--ranks 8 64] [--seeds 2] [--part plans small]

Plans are made for the loads of `pareto_plans`, by `quota_planners` and by registered policies, all by default.

plans   Policies see links that take no time, and so plan for balance alone. The columns: tokens of the heaviest rank
        over the mean (mean, 95% quantile and worst of all loads); means of the guests, the gigabytes of their weights
        and gradients, and the other fields of `pareto_plans.Score`. `floor` is a lower bound of all plans.
bounds  The copies that planners need for a bound of max/mean, and the share of loads in which they keep it; `floor` is
        a lower bound for any number of slots.
small   The floor and the planners next to the least max/mean of all plans, which the solver of `oracle` finds.
time    With `--cluster`: policies plan for the links of that cluster. The modeled time of a layer over that without
        balancing, by expert-parallel size (mean), and of all loads (mean and worst); milliseconds of the experts, the
        exchanges, and Trans and Agg, which nothing hides.
planning  With `--cluster`: milliseconds of a core (thread time, the best of several) to make a plan, with links that
        take no time and with those of the cluster, and to arrange its transfers; median and maximum of all loads.

In the picture, the lines of planners that take a target are drawn by target, and those of policies by the price of
sending an expert.
"""

import argparse
import functools
import sys
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import numpy as np

from megatron_balance.planning.policies import registered
from megatron_balance.profile.cluster import Cluster, read
from pareto_plans import (
    EXPERTS,
    RANKS,
    TOKENS,
    Load,
    Score,
    Timed,
    fewest,
    fitted,
    floors,
    gigabytes,
    least_ratio,
    loads_of,
    planning_ms,
    policy,
    reference,
    timed,
)
from quota_planners import BOUNDED, PLANNERS

OURS = "quota, fit"
TARGETED = {**BOUNDED, OURS: fitted}
"""Planners that take a target, by name."""

TARGETS = (1.005, 1.01, 1.02, 1.05)
CURVE = (1.002, 1.005, 1.01, 1.02, 1.05, 1.1, 1.2)
"""Targets of the picture's lines."""

LOOSE = (1.35, 1.5, 2.0, 3.0, 4.0, 5.0)
"""Further targets of the fewest copies."""

PRICED = ("flexmoe", "pro_prophet", "quota")
"""Policies that weigh copies against seconds."""

PRICES = (0.0, 0.01, 0.03, 0.1, 0.3)
"""Prices of the picture's lines, as in `pareto_plans.priced`."""

SMALL = ((3, 6, 1), (4, 4, 1), (4, 8, 1), (3, 12, 1), (3, 12, 2), (4, 16, 1))
"""(D, E, slots) of the cases whose optimum is known."""

HOTTER = 16
"""Popularity of the first rank's experts over that of others in these cases, so that slots do not suffice."""

SMALL_LOADS = 12
PARTS = ("plans", "bounds", "small", "time", "planning")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", nargs="*", choices=registered(), default=list(registered()))
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, default=2, help="loads of each distribution and expert-parallel size")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="expert-parallel sizes")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cluster", type=Path, help="file of configs/clusters, for the part `time`")
    parser.add_argument("--picture", type=Path, help="file to draw the curves to")
    args = parser.parse_args()
    loads = [load for num_ranks in args.ranks for load in loads_of(num_ranks, args.seeds)]
    print(f"{len(loads)} loads, E={EXPERTS}, EP {' '.join(map(str, args.ranks))}")
    tables = {}
    if "plans" in args.part or args.picture:
        tables = {slots: table(loads, slots, args.policy) for slots in args.slots}
    for slots in args.slots:
        if "plans" in args.part:
            _print_plans(loads, slots, tables[slots])
        if "bounds" in args.part:
            _print_bounds(loads, slots)
        if "time" in args.part and args.cluster:
            _print_time(loads, slots, args.policy, read(args.cluster))
        if "planning" in args.part and args.cluster:
            _print_planning(args.ranks, args.seeds, slots, args.policy, read(args.cluster))
    if "small" in args.part:
        _print_small()
    if args.picture:
        _draw(args.picture, loads, tables)
    return 0


def table(loads: Sequence[Load], slots: int, names: Sequence[str]) -> dict[str, list[Score]]:
    """Return the scores of all planners, and of policies by name."""
    planners = {name: functools.partial(reference, planner) for name, planner in PLANNERS.items()}
    policies = {name: functools.partial(policy, name) for name in names}
    return {name: [score(load, slots) for load in loads] for name, score in {**planners, **policies}.items()}


def _draw(path: Path, loads: Sequence[Load], tables: Mapping[int, Mapping[str, Sequence[Score]]]) -> None:
    """Draw what the tables have, and lines for planners that take a target and policies that weigh prices."""
    from pareto_picture import draw  # the tables do not need matplotlib

    points = {slots: {name: _point(scores) for name, scores in rows.items()} for slots, rows in tables.items()}
    fewest_of = [(gigabytes(fewest(loads, target)), 100 * (target - 1)) for target in (1.0, *CURVE, *LOOSE)]
    most_even = {slots: 100 * (floors(loads, slots).mean() - 1) for slots in tables}
    draw(path, points, {slots: _lines(loads, slots, rows) for slots, rows in tables.items()}, most_even, fewest_of)


def _lines(loads: Sequence[Load], slots: int, names: Container[str]) -> dict[str, list[tuple[float, float, float]]]:
    lines = {
        name: [_point([reference(planner, load, slots, target=target) for load in loads]) for target in CURVE]
        for name, planner in TARGETED.items()
    }
    for name in (name for name in PRICED if name in names):
        lines[name] = [_point([policy(name, load, slots, price) for load in loads]) for price in PRICES]
    return lines


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
    lines = []
    for target in TARGETS:
        found = {
            name: [reference(planner, load, slots, target=target) for load in loads]
            for name, planner in TARGETED.items()
        }
        lines.append(_by_load(found, target))
        print(f"| floor | {target} | {' | '.join(f'{fewest(group, target):.1f}' for group in groups)} |")
        for name, plans in found.items():
            parts = [
                [plan for plan, load in zip(plans, loads, strict=True) if load.num_ranks == size] for size in sizes
            ]
            cells = [_kept(part, target) for part in (*parts, plans)]
            print(f"| `{name}` | {target} | {' | '.join(cells)} |", flush=True)
    print("", *lines, sep="\n")


def _by_load(found: Mapping[str, Sequence[Score]], target: float) -> str:
    """Return how the copies of our fit compare with the fewest of references that keep the bound, load by load."""
    more = []
    for ours, *others in zip(found[OURS], *(plans for name, plans in found.items() if name != OURS), strict=True):
        copies = [plan.copies for plan in others if plan.ratio <= target]
        if copies and ours.ratio <= target:
            more.append(ours.copies - min(copies))
    missed = sum(plan.ratio > target for plan in found[OURS])
    worse = [number for number in more if number > 0]
    return (
        f"bound {target}: `{OURS}` misses it on {missed} of {len(found[OURS])} loads; of {len(more)} loads on which a "
        f"reference keeps it, too, it has fewer copies than the best on {sum(number < 0 for number in more)} and more "
        f"on {len(worse)} (by {max(worse, default=0)} at most)"
    )


def _kept(plans: Sequence[Score], target: float) -> str:
    """Return the mean number of copies, and the share of plans within the target unless it is 100%."""
    copies = np.mean([plan.copies for plan in plans])
    kept = np.mean([plan.ratio <= target for plan in plans])
    return f"{copies:.1f}" if kept == 1 else f"{copies:.1f} ({kept:.0%})"


def _print_time(loads: Sequence[Load], slots: int, names: Sequence[str], cluster: Cluster) -> None:
    sizes = sorted({load.num_ranks for load in loads})
    print(f"\nlayer time over that without balancing, {cluster.name}, {slots} guest slot{'s' if slots > 1 else ''}\n")
    print(
        f"| planner | {' | '.join(f'EP {size}' for size in sizes)} | all: mean / worst | experts ms | exchanges ms | "
        "Trans and Agg ms | copies | plan ms |"
    )
    print(f"|---|{'---|' * (len(sizes) + 6)}")
    plain = [timed("none", load, slots, cluster).time.total for load in loads]
    for name in (*PLANNERS, *names):
        plans = [timed(name, load, slots, cluster) for load in loads]
        over = np.array([plan.time.total for plan in plans]) / plain
        means = [over[[load.num_ranks == size for load in loads]].mean() for size in sizes]
        print(
            f"| `{name}` | {' | '.join(f'{mean:.3f}' for mean in means)} | {over.mean():.3f} / {over.max():.3f} | "
            f"{_parts(plans)} |",
            flush=True,
        )


def _parts(plans: Sequence[Timed]) -> str:
    """Return the means of seconds by part, of copies and of planning time."""
    rows = [
        (
            *(1e3 * (plan.time.forward + plan.time.backward), 1e3 * plan.time.all_to_all),
            *(1e3 * (plan.time.trans + plan.time.agg), plan.copies, plan.milliseconds),
        )
        for plan in plans
    ]
    return " | ".join(f"{mean:.1f}" for mean in np.mean(rows, axis=0))


def _print_planning(sizes: Sequence[int], seeds: int, slots: int, names: Sequence[str], cluster: Cluster) -> None:
    print(f"\nms of a plan: median / maximum, {slots} guest slot{'s' if slots > 1 else ''}\n")
    print(f"| policy | EP | links that take no time | {cluster.name} | transfers |\n|---|---|---|---|---|")
    for name in (name for name in names if name != "none"):
        for num_ranks in sizes:
            rows = [planning_ms(name, load, slots, cluster) for load in loads_of(num_ranks, seeds)]
            cells = [f"{np.median(times):.2f} / {max(times):.2f}" for times in zip(*rows, strict=True)]
            print(f"| `{name}` | {num_ranks} | {' | '.join(cells)} |", flush=True)


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
            load = Load(generator.multinomial(TOKENS, weights_E / weights_E.sum(), num_ranks))
            scores = [reference(planner, load, slots).ratio for planner in PLANNERS.values()]
            rows.append((floors([load], slots)[0], least_ratio(load, slots), *scores))
        cells = " | ".join(f"{mean:.3f}" for mean in np.mean(rows, axis=0))
        print(f"| {num_ranks}, {experts}, {slots} | {cells} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
