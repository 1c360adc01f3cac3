"""Training runs with a balancing policy, and their comparison with runs without a policy."""

from pathlib import Path

from tests.distributed import runs
from tests.distributed.runs import deviation

TOLERANCE = 1e-5
"""Relative, in float32, for every loss and gradient norm."""

MODES = {
    "predicted": "--balance-load predicted",
    "exact": "--balance-load exact --balance-overlap blockwise",
    "two scales": "--balance-inner-policy quota --balance-overlap blockwise",
    "blocking exact": "--balance-load exact",
    "blockwise": "--balance-overlap blockwise",
}


def with_policy(flags: str, policy: str, mode: str, profiles: dict[int, Path]) -> str:
    profile = profiles[4 if "--expert-model-parallel-size 4" in flags else 2]
    slots = "--balance-guest-slots 3" if policy == "top3" else ""
    return f"{flags} --balance-policy {policy} {slots} {MODES[mode]} --balance-profile {profile}"


def check_follows(ranks, curve_of, plain: str, balanced: str, iterations: int, world_size: int = 4) -> None:
    outcomes = ranks(world_size).run(runs.train_hosts, balanced, iterations)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    curve, hosts = outcomes[0]
    assert sum(added > 0 for added in hosts) >= iterations / 2, f"balancing hardly acted: {hosts}"
    assert deviation(curve, curve_of(plain, iterations, world_size)) <= TOLERANCE
    assert curve[-1][0] < curve[0][0] - 0.01, "it learns"
