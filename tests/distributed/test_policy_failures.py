"""If a user's policy fails, the run continues; if a profile is wrong, every rank ends with one message."""

import logging
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_balance.planning.policy_process import PolicyProcess
from megatron_balance.profile.cluster_profile import builtin
from megatron_balance.training.loop import train_step
from tests.distributed import runs
from tests.distributed.failing_policies import (
    GOOD,
    LAYERS,
    RANK,
    ExitsOnRank1,
    LoopsOnRank1,
    OneRankRaises,
    OwnMind,
    Turning,
    TwoFaults,
)
from tests.distributed.jobs import Job
from tests.distributed.runs import BASE, Captured, deviation

TOLERANCE = 1e-5
"""Relative, for every loss and gradient norm."""

ITERATIONS = 5

STARTING = 60.0
"""Seconds within which a policy's process starts, even on a busy machine."""

FLAGS = "--expert-model-parallel-size 2 --moe-router-force-workload rotating_hotspot"


FAILURES: dict[type[Turning], tuple[str, int, set[str]]] = {
    TwoFaults: ("predicted", 0, {"raised ValueError: rank 0", "raised KeyError: "}),
    OwnMind: ("predicted", 0, {"plans differently on different ranks"}),
    OneRankRaises: ("predicted", 1, {"raised ZeroDivisionError: on this rank only"}),
}
"""Policy -> the load that it plans for, the rank that warns, and its warnings for each layer."""


def train_with(policy: str, load: str, flags: str = FLAGS) -> dict[str, list]:
    """Train a run; return its curve, added hosts and placements, and this rank's log lines."""
    captured = Captured()
    placements = []
    os.environ[RANK] = str(dist.get_rank())
    logger = logging.getLogger("megatron_balance")
    logger.addHandler(captured)
    process = PolicyProcess(policy, {})
    try:
        # Only its plans have to be made within the time limit of the flags
        process.ready(STARTING)
        run = runs.build(f"{flags} --balance-policy {policy} --balance-load {load}", policy=process)
        reports = []
        for _ in range(ITERATIONS):
            reports.append(train_step(run))
            placements.append([str(state.placement) for state in run.balancer.layers.values()])
    finally:
        logger.removeHandler(captured)
    return {
        "curve": [(report.losses["lm loss"], report.grad_norm) for report in reports],
        "hosts": [sum(layer.hosts_added for layer in report.balance.values()) for report in reports],
        "placements": placements,
        "lines": captured.lines,
    }


def name_of(policy: type) -> str:
    return f"{policy.__module__}:{policy.__name__}"


@pytest.fixture(scope="module")
def baseline(ranks) -> runs.Curve:
    return ranks(2).run(runs.train_curve, FLAGS, ITERATIONS)[0]


@pytest.mark.parametrize("policy", FAILURES, ids=lambda policy: policy.__name__)
def test_a_failing_policy_leaves_the_last_valid_placement(ranks, baseline, policy: type[Turning]) -> None:
    load, speaker, said = FAILURES[policy]
    outcomes = ranks(2).run(train_with, name_of(policy), load)
    for outcome in outcomes:
        assert deviation(outcome["curve"], baseline) <= TOLERANCE
        assert outcome["placements"] == outcomes[0]["placements"]
        last_valid = outcome["placements"][GOOD - 1]
        assert all(placements == last_valid for placements in outcome["placements"][GOOD:])
        assert all(hosts > 0 for hosts in outcome["hosts"][1:])
    for rank, outcome in enumerate(outcomes):
        expected = [(layer, text) for text in said for layer in range(1, LAYERS + 1)] if rank == speaker else []
        assert len(outcome["lines"]) == len(expected), outcome["lines"]
        for layer, text in expected:
            begins = f"layer {layer}: the policy {text}"
            assert sum(line.startswith(begins) for line in outcome["lines"]) == 1, outcome["lines"]
        assert all("its last placement stays" in line for line in outcome["lines"])


@pytest.mark.parametrize(
    ("policy", "limit", "said"),
    [
        pytest.param(
            LoopsOnRank1,
            "--distributed-timeout-minutes 0.5",
            "made no plan within 15 s, half of --distributed-timeout-minutes 0.5",
            marks=pytest.mark.slow,
        ),
        (ExitsOnRank1, "", "ended its process: exit status 0"),
    ],
    ids=["LoopsOnRank1", "ExitsOnRank1"],
)
def test_a_policy_that_ends_or_stalls_on_one_rank_is_given_up_on_all(
    ranks, policy: type[Turning], limit: str, said: str
) -> None:
    """All ranks keep the last common placement."""
    outcomes = ranks(2).run(train_with, name_of(policy), "predicted", f"{FLAGS} {limit}")
    assert [outcome["placements"] == outcomes[0]["placements"] for outcome in outcomes] == [True, True]
    placements = outcomes[0]["placements"]
    assert all(after == placements[GOOD - 1] for after in placements[GOOD:])
    assert all(hosts > 0 for hosts in outcomes[0]["hosts"][1:])
    assert outcomes[0]["lines"] == []
    *warnings, last = outcomes[1]["lines"]
    assert (
        f": --balance-policy {name_of(policy)} {said}; all placements stay, and the policy is not asked again" in last
    )
    assert len(warnings) <= LAYERS


def test_a_wrong_profile_ends_every_rank(tmp_path: Path) -> None:
    """Every rank ends soon with code 1 and reports why in one sentence."""
    path = tmp_path / "profile.json"
    builtin(4, 4, 32, 64).save(path)
    flags = f"--num-layers 1 --expert-model-parallel-size 2 --balance-policy top2 --balance-profile {path}"
    ended = Job(2, f"{BASE} {flags}", tmp_path / "logs").wait()
    assert ended.codes == [1, 1], ended.text
    said = f"error: --balance-profile {path}: is for 4 expert-parallel ranks in nodes of 4, but this job has 2"
    for output in ended.output:
        assert output.count(said) == len(output.splitlines()) == 1, output
