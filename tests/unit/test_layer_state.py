"""How a Trans or an Agg is divided among the computations that it overlaps with."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel, Overlap
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import TransPlan
from megatron_balance.planning.manager import Manager
from megatron_balance.planning.policies import load_policy
from megatron_balance.planning.predictor import Predictor
from megatron_balance.profile.cluster_profile import builtin
from megatron_balance.timeline.actions import Action, Operation
from megatron_balance.timeline.layer_state import LayerState, sent_bytes
from tests.unit.placements import placements

MIB = 2**20


def layer(placement: Placement, overlap: Overlap) -> LayerState:
    cost = CostModel(
        builtin(placement.num_ranks, 2, 64, 64),
        token_bytes=1,
        param_bytes=8 * MIB,
        grad_bytes=16 * MIB,
        overlap=overlap,
    )
    return LayerState(Manager(load_policy("none"), cost, Predictor("last"), placement), None, overlap)


def parts(state: LayerState, operation: Operation) -> list[TransPlan]:
    return [state.rounds.of(Action(1, operation, part, 2)) for part in (1, 2)]


@given(placements(), st.floats(0, 0.01), st.floats(0, 0.01))
def test_parts_are_the_whole_and_fit(placement: Placement, forward: float, backward: float) -> None:
    state = layer(placement, Overlap(forward, backward))
    transport = state.manager.cost.transport
    plan = state.rounds.plan
    rounds = plan.rounds
    trans, agg = (np.append(0.0, ends) for ends in transport.progress(plan))
    during_experts, during_others = parts(state, Operation.TRANS)
    assert during_experts.rounds + during_others.rounds == rounds
    first = len(during_experts.rounds)
    assert not during_others.rounds or trans[-1] - trans[first] <= forward
    assert not first or trans[-1] - trans[first - 1] > forward
    # Agg runs the rounds in reverse and overlaps with the non-MoE part first
    during_others, during_experts = parts(state, Operation.AGG)
    assert during_experts.rounds + during_others.rounds == rounds
    count = len(during_others.rounds)
    assert agg[count] <= backward and (not during_experts.rounds or agg[count + 1] > backward)
    for operation in (Operation.TRANS, Operation.AGG):
        assert state.rounds.of(Action(1, operation)) == plan


@given(placements(), st.floats(0, 0.01), st.floats(0, 0.01))
def test_parts_are_those_that_the_planning_rank_has_counted(
    placement: Placement, forward: float, backward: float
) -> None:
    alone, told = (layer(placement, Overlap(forward, backward)) for _ in range(2))
    transport = alone.manager.cost.transport
    told.follow(transport.best(placement), transport.rounds_beside(alone.rounds.plan, (forward, backward)))
    for operation in (Operation.TRANS, Operation.AGG):
        assert parts(told, operation) == parts(alone, operation)


@given(placements())
def test_bytes_of_all_ranks_and_parts_are_those_of_the_experts(placement: Placement) -> None:
    state = layer(placement, Overlap(1e-3, 1e-3))
    for operation, size in ((Operation.TRANS, 8 * MIB), (Operation.AGG, 16 * MIB)):
        actions = [Action(1, operation, part, 2) for part in (1, 2)]
        sent = sum(
            sent_bytes(operation, state.rounds.of(action), state.manager.cost, rank)
            for action in actions
            for rank in range(placement.num_ranks)
        )
        assert sent == pytest.approx(placement.added_hosts * size, abs=2 * placement.num_ranks)
