"""Compares modeled layer times of the policy `quota` with those of other systems' planners and of `flexmoe`.

    OMP_NUM_THREADS=1 python tools/bench/quota_planners.py [--ranks 16 64] [--slots 2] [--hidden 0 all]

The planners are written from their descriptions, slow and plain. They even out tokens alone and know no prices:

    ultraep      UltraEP (arXiv 2606.04101): fills receivers donor by donor, for the lowest target that its search finds
    interleaved  like ultraep, but the heaviest rank gives anew at each move, and targets are tried upward
    alias        MoonEP: Walker's alias method, with one donor for each receiver; left out where it lacks slots

The layer has DeepSeek-V3's experts: 256, of which a token takes 8. The cluster has nodes of eight H100s. Experts have
the popularity of a Zipf or of a log-normal distribution, in random order, and the experts of each rank's tokens are a
sample of it. One cost model gives the seconds of all plans, and charges what hidden Trans and Agg slow down. Columns:
quota's time over the least time of the others, the mean over loads and the worst load; then the mean over the time of
each other; milliseconds of quota's planning.
`hidden`: milliseconds of other computation in the forward pass that hide Trans; twice as much hides Agg.

A target is a number of times the mean that no rank may exceed. Without slots left, a planner's move fails; the next
higher target is then tried. Planning time is the time of this thread, the fastest of several runs, median over loads.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np

from megatron_balance.cost.model import CostModel, Overlap, owners, slowed_by
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies import load_policy
from megatron_balance.profile.cluster import Ranks, profile_of, read

EXPERTS = 256
TOPK = 8
TOKENS = 4096
HIDDEN = 7168
FFN = 2048
WEIGHT_BYTES = 2
GRAD_BYTES = 4
NODE = 8
CLUSTER = Path(__file__).parents[2] / "configs/clusters/h100.yaml"

SHAPES = tuple((kind, width) for kind in ("zipf", "lognormal") for width in (0.4, 0.7, 1.0))
"""(distribution, exponent or deviation of the logarithm) of the experts' popularity."""

HELD_OUT = 4000
"""First seed of the loads; quota's constants were chosen with other seeds."""

ALL = 1e3
"""Seconds that hide every Trans and Agg."""

START = Fraction(101, 100)
STEP = Fraction(1, 100)
"""First target, and the distance between targets."""

RUNS = 5


def loads_of(num_ranks: int, first: int, seeds: int = 2) -> Iterator[np.ndarray]:
    """Yield loads [D, E]: `seeds` of each shape, from the first one on."""
    for index, (kind, width) in enumerate(SHAPES):
        for seed in range(first, first + seeds):
            generator = np.random.default_rng([seed, num_ranks, index])
            popular_E = np.arange(1, EXPERTS + 1) ** -width
            if kind == "lognormal":
                popular_E = generator.lognormal(0, width, EXPERTS)
            share_E = generator.permutation(popular_E / popular_E.sum())
            yield generator.multinomial(TOKENS * TOPK, share_E, num_ranks)


def cost_of(num_ranks: int, hidden: float) -> CostModel:
    """Return the cost model, given the seconds of the forward pass that hide Trans; 0: nothing is hidden."""
    parameters = 3 * HIDDEN * FFN
    # An expert without gates that has as many parameters
    profile = profile_of(read(CLUSTER), Ranks(num_ranks, NODE, NODE), HIDDEN, 3 * FFN // 2, WEIGHT_BYTES)
    return CostModel(
        profile,
        token_bytes=HIDDEN * WEIGHT_BYTES,
        param_bytes=parameters * WEIGHT_BYTES,
        grad_bytes=parameters * GRAD_BYTES,
        split="proportional",
        overlap=Overlap(hidden, 2 * hidden, slowed=slowed_by(profile)) if hidden else None,
    )


class Draft:
    """Tokens of experts on ranks [E, D], while a planner moves them from owners to guests."""

    def __init__(self, tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, slots: int) -> None:
        self.owner_E = owner_E
        self.quotas_ED = np.zeros((len(tokens_E), num_ranks), np.int64)
        self.quotas_ED[np.arange(len(tokens_E)), owner_E] = tokens_E
        self.load_D = self.quotas_ED.sum(0)
        self.mean = Fraction(int(tokens_E.sum()), num_ranks)
        self.free_D = np.full(num_ranks, slots)

    def limit(self, target: Fraction) -> int:
        """Return the most tokens of a rank: the target rounded down, but at least the mean rounded up."""
        return max(math.floor(target * self.mean), math.ceil(self.mean))

    def by_load(self, rank: int) -> list[int]:
        """Return the rank's experts with tokens left, largest first."""
        own_A = np.flatnonzero(self.owner_E == rank)
        left_A = self.quotas_ED[own_A, rank]
        order_A = np.argsort(-left_A, kind="stable")
        return own_A[order_A[left_A[order_A] > 0]].tolist()

    def give_part(self, expert: int, limit: int) -> bool:
        """Let the least loaded rank take over tokens above the limit; return whether there is such a rank."""
        able_D = (self.free_D > 0) & (self.load_D < limit) & (self.quotas_ED[expert] == 0)
        if not able_D.any():
            return False
        owner = self.owner_E[expert]
        rank = int(np.where(able_D, self.load_D, np.iinfo(np.int64).max).argmin())
        left = int(self.quotas_ED[expert, owner])
        self.give(expert, rank, min(int(self.load_D[owner]) - limit, left, limit - int(self.load_D[rank])))
        return True

    def give(self, expert: int, rank: int, tokens: int) -> None:
        """Make the expert a new guest of a rank, which takes so many tokens from its owner."""
        ends = [self.owner_E[expert], rank]
        self.quotas_ED[expert, ends] += [-tokens, tokens]
        self.load_D[ends] += [-tokens, tokens]
        self.free_D[rank] -= 1


def donor_by_donor(draft: Draft, target: Fraction) -> bool:
    """Move tokens until all loads are within the target; return whether they are."""
    limit = draft.limit(target)
    for donor in np.argsort(-draft.load_D, kind="stable").tolist():
        for expert in draft.by_load(donor):
            while draft.load_D[donor] > limit and draft.quotas_ED[expert, donor]:
                if not draft.give_part(expert, limit):
                    return False
    return True


def heaviest_first(draft: Draft, target: Fraction) -> bool:
    """Do the same, but the heaviest rank gives its largest expert at each move."""
    limit = draft.limit(target)
    while draft.load_D.max() > limit:
        expert = draft.by_load(int(draft.load_D.argmax()))[0]
        if not draft.give_part(expert, limit):
            return False
    return True


def ultraep(empty: Callable[[], Draft]) -> np.ndarray:
    """Try the first three targets, then bisect up to the load without guests, to a hundredth of the mean."""
    high = Fraction(int(empty().load_D.max())) / empty().mean
    low = START
    best = empty()
    for target in (START, START + STEP, START + 2 * STEP):
        draft = empty()
        if donor_by_donor(draft, target):
            return draft.quotas_ED
        low = target
    while high - low > STEP:
        middle = (low + high) / 2
        draft = empty()
        if donor_by_donor(draft, middle):
            best = draft
            high = middle
        else:
            low = middle
    return best.quotas_ED


def interleaved(empty: Callable[[], Draft]) -> np.ndarray:
    """Try targets upward, because a plan may fit a target and not a higher one."""
    target = START
    while not heaviest_first(draft := empty(), target):
        target += STEP
    return draft.quotas_ED


def alias(empty: Callable[[], Draft]) -> np.ndarray | None:
    """Let the heaviest rank close the gap of the lightest one, again and again. A donor may end below its share, and
    receive later; a rank that has received neither gives nor receives any more. None if slots do not suffice."""
    draft = empty()
    ranks = len(draft.load_D)
    tokens = int(draft.load_D.sum())
    share_D = tokens // ranks + (np.arange(ranks) < tokens % ranks)
    done_D = np.zeros(ranks, bool)
    while True:
        excess_D = draft.load_D - share_D
        gap_D = np.where(done_D, 0, -excess_D)
        donor = int(excess_D.argmax())
        receiver = int(gap_D.argmax())
        if excess_D[donor] <= 0 or gap_D[receiver] <= 0:
            return draft.quotas_ED if draft.free_D.min() >= 0 else None
        for expert in draft.by_load(donor):
            if (gap := int(share_D[receiver] - draft.load_D[receiver])) > 0:
                draft.give(expert, receiver, min(gap, int(draft.quotas_ED[expert, donor])))
        done_D[receiver] = True


PLANNERS: Mapping[str, Callable[[Callable[[], Draft]], np.ndarray | None]] = {
    "ultraep": ultraep,
    "interleaved": interleaved,
    "alias": alias,
}


def planned(name: str, counts_DE: np.ndarray, current: Placement) -> Placement | None:
    """Return the plan of a planner; None if it does not fit the slots."""
    quotas_ED = PLANNERS[name](lambda: Draft(counts_DE.sum(0), owners(current), current.num_ranks, current.guest_slots))
    if quotas_ED is None:
        return None
    ranks_E = [
        np.flatnonzero(row_D).tolist() or [owner] for row_D, owner in zip(quotas_ED, current.owners, strict=True)
    ]
    quotas_E = [
        row_D[ranks].tolist() if len(ranks) > 1 else [] for row_D, ranks in zip(quotas_ED, ranks_E, strict=True)
    ]
    return current.rehost(ranks_E, quotas=quotas_E)


def milliseconds(counts_DE: np.ndarray, current: Placement, cost: CostModel) -> float:
    """Return quota's planning time."""
    policy = load_policy("quota")
    times = []
    for _ in range(RUNS):
        start = time.thread_time()
        policy.plan(counts_DE, current, cost)
        times.append(time.thread_time() - start)
    return 1e3 * min(times)


def compare(num_ranks: int, slots: int, hidden: Sequence[float], seed: int) -> None:
    """Print the rows of one number of ranks and of slots."""
    current = Placement.identity(EXPERTS, num_ranks, slots)
    costs = [cost_of(num_ranks, seconds) for seconds in hidden]
    names = (*PLANNERS, "flexmoe", "quota")
    seconds_HLN = np.full((len(costs), 0, len(names)), np.inf)
    plan_ms = [list[float]() for _ in costs]
    for counts_DE in loads_of(num_ranks, seed):
        fixed = [planned(name, counts_DE, current) for name in PLANNERS]
        found_HN = np.full((len(costs), len(names)), np.inf)
        for row_N, cost, times in zip(found_HN, costs, plan_ms, strict=True):
            plans = [*fixed, *(load_policy(name).plan(counts_DE, current, cost) for name in names[-2:])]
            row_N[:] = [np.inf if plan is None else cost.layer_seconds(counts_DE, plan) for plan in plans]
            times.append(milliseconds(counts_DE, current, cost))
        seconds_HLN = np.concatenate([seconds_HLN, found_HN[:, None]], axis=1)
    for seconds, seconds_LN, times in zip(hidden, seconds_HLN, plan_ms, strict=True):
        over_LN = seconds_LN[:, -1:] / seconds_LN[:, :-1]
        over_L = over_LN.max(1)
        # A plan that does not fit takes infinitely long
        means = [float(row_L[row_L > 0].mean()) if row_L.any() else math.nan for row_L in over_LN.T]
        label = "all" if seconds == ALL else f"{1e3 * seconds:g}"
        cells = f"{over_L.mean():8.3f} {over_L.max():8.3f}  " + " ".join(f"{mean:11.3f}" for mean in means)
        print(f"{num_ranks:4d} {slots:5d} {label:>6s} {cells} {statistics.median(times):8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--hidden", nargs="+", default=["0", "1", "2", "all"], help="milliseconds, or all")
    parser.add_argument("--seed", type=int, default=HELD_OUT, help="first seed of the loads")
    args = parser.parse_args()
    hidden = [ALL if text == "all" else float(text) / 1e3 for text in args.hidden]
    columns = "".join(f" {name:>11s}" for name in (*PLANNERS, "flexmoe"))
    print(f"{'EP':>4s} {'slots':>5s} {'hidden':>6s} {'mean':>8s} {'worst':>8s} {columns}  plan ms")
    for num_ranks in args.ranks:
        for slots in args.slots:
            compare(num_ranks, slots, hidden, args.seed)


if __name__ == "__main__":
    main()
