"""Plans for the exact load of one microbatch, alone or on top of the placement of an iteration.

The placement of the iteration is for a predicted load, so its hosts have some tokens too many or too few. Every host
may give tokens of its experts to guests of this microbatch. To the policy that chooses these guests, each host of an
expert is an expert of its own that belongs to the host's rank.

In shapes, P counts the physical experts of the iteration's placement, and S those of a rank.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import HostRules, tokens_of
from megatron_balance.placement.trans_plan import TransPlan
from megatron_balance.planning.manager import Manager
from megatron_balance.planning.policies.interface import Policy, owners_host


class PassPlan(NamedTuple):
    """The placement of one pass, and the messages that bring its own guests."""

    placement: Placement
    plan: TransPlan
    problem: str | None = None
    """Why only owners compute; see `PolicyFailure`."""


PlanPass = Callable[[np.ndarray, Placement], PassPlan]
"""(the load [D, E] of a pass, the iteration's placement) -> the plan of the pass."""


def plan_exactly(counts_DE: np.ndarray, placement: Placement, *, manager: Manager) -> PassPlan:
    """Return the plan of the manager's policy. It does not depend on the iteration's placement."""
    decision = manager.exact_question(counts_DE).answer()
    found = decision.placement or owners_host(placement)
    return PassPlan(found, manager.cost.transport.plan(found), decision.problem)


def plan_within(
    counts_DE: np.ndarray, placement: Placement, *, policy: Policy, split: str, slots: int, cost: CostModel
) -> PassPlan:
    """Return the plan with the guests that a policy adds; the split `proportional` executes it.

    Args:
        counts_DE: int64, the load of the microbatch.
        placement: the iteration's placement; its guest slots are followed by those of the pass.
        split: how the hosts of the iteration's placement share tokens.
        slots: number of guest slots of a rank for the pass.
        cost: prices a Trans and an Agg for this microbatch (`CostModel.trans_each`).
    """
    tables = placement.tables
    owner_E = np.array(placement.owners)
    rules = HostRules.of(placement, split, cost.network.node_size)
    tokens_DP = tokens_of(counts_DE, placement, rules)
    tokens_P = tokens_DP.sum(0)
    names_DS = np.arange(len(tokens_P)).reshape(placement.num_ranks, -1)
    rank_P = names_DS.ravel() // placement.slots_per_rank
    name_M, target_M, moved_M = policy.guests(tokens_DP, rank_P, names_DS, slots, cost)
    expert_M = tables.expert_P[name_M]
    source_M = rank_P[name_M]
    tokens_ED = np.zeros_like(tables.shares_ED)
    tokens_ED[tables.expert_N, tables.hosting.host_N] = tokens_P[tables.physical_N]
    np.subtract.at(tokens_ED, (expert_M, source_M), moved_M)
    np.add.at(tokens_ED, (expert_M, target_M), moved_M)
    is_host_ED = tables.shares_ED > 0
    # Several hosts may give tokens to the same guest: the first one sends the weights
    _, first_X = np.unique(expert_M * placement.num_ranks + target_M, return_index=True)
    new_X = first_X[~is_host_ED[expert_M, target_M][first_X] & (owner_E[expert_M] != target_M)[first_X]]
    is_host_ED[expert_M, target_M] = True
    changed_E = np.zeros(placement.num_experts, bool) if split == "proportional" else is_host_ED.sum(1) > 1
    changed_E[expert_M] = True
    expert_N, host_N = (is_host_ED & changed_E[:, None]).nonzero()
    # A host that gives away all of its tokens keeps one, because it keeps its slot
    quota_N = np.maximum(1, tokens_ED[expert_N, host_N])
    kept = placement.guest_slots
    found = placement.with_quotas(expert_N, host_N, quota_N, kept_slots=kept, guest_slots=kept + slots)
    return PassPlan(found, TransPlan.direct(expert_M[new_X], source_M[new_X], target_M[new_X]))
