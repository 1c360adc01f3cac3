"""The planning benches: counts over time, and measures of one plan."""

import argparse

import numpy as np
import pytest

import placement_history as history
import planner
from megatron_balance.planning.policies import load_policy
from megatron_balance.planning.policies.flexmoe import FlexMoE

ARGS = argparse.Namespace(guest_slots=2, predictor="last")
EXPERT_BYTES = 2 * planner.HIDDEN * planner.FFN * planner.DTYPE_BYTES


def test_every_change_is_counted_once() -> None:
    # The two hottest experts are on all four ranks: the same pair for three iterations, then another
    counts_NDE = np.ones((6, 4, 8), dtype=np.int64)
    counts_NDE[:3, :, [0, 7]] = 100
    counts_NDE[3:, :, [3, 7]] = 100
    steps = history.play(load_policy("top2"), counts_NDE, ARGS)
    assert [step.changes for step in steps] == [0, 6, 0, 0, 6, 0]
    assert [step.new_bytes for step in steps] == [count * EXPERT_BYTES for count in (0, 6, 0, 0, 3, 0)]
    assert [step.moved_bytes for step in steps] == [count * 2 * EXPERT_BYTES for count in (0, 6, 6, 6, 6, 6)]
    # Tokens of the heaviest rank over the mean; iteration 4 is planned for the previous load
    assert [step.ratio * 206 for step in steps] == pytest.approx([404, 208, 208, 505, 208, 208])
    rarely = history.play(load_policy("top2"), counts_NDE, ARGS, interval=4)
    assert [step.changes for step in rarely] == [0, 6, 0, 0, 0, 6]
    assert not any(step.changes for step in history.play(load_policy("none"), counts_NDE, ARGS))


def test_flexmoe_follows_a_drifting_router() -> None:
    counts_NDE = history.sequence(history.DRIFTING, 8, 32, 4096, 20)
    assert (counts_NDE.sum(2) == planner.TOPK * 4096).all()
    assert (counts_NDE == history.sequence(history.DRIFTING, 8, 32, 4096, 20)).all()
    # Near iterations are similar, distant ones less so
    near, far = (np.abs(counts_NDE[gap:] - counts_NDE[:-gap]).sum() / len(counts_NDE[gap:]) for gap in (1, 10))
    assert 0 < 2 * near < far
    seconds = {
        name: sum(step.seconds for step in history.play(policy, counts_NDE, ARGS))
        for name, policy in {"none": load_policy("none"), "flexmoe": FlexMoE(), "never": FlexMoE(threshold=99)}.items()
    }
    assert seconds["flexmoe"] < 0.9 * seconds["none"] == 0.9 * seconds["never"]


def test_degree_of_imbalance() -> None:
    assert planner.imbalance_degree(np.array([3, 4, 0])) == pytest.approx(5 / 7)
    assert planner.imbalance_degree(np.full(16, 9)) == pytest.approx(1 / 4)
    assert planner.imbalance_degree(np.zeros(2)) == 0
