"""Plans for the exact load of one microbatch, alone or on top of the placement of an iteration.

The placement of the iteration is for a predicted load, so its hosts have some tokens too many or too few:

1. Nodes with too many tokens leave some to the other hosts of an expert on other nodes. No weights are sent for that,
   and tokens that stay on a node still do.
2. Every host may give tokens of its experts to guests of this microbatch. To the policy that chooses these guests, each
   host of an expert is an expert of its own that belongs to the host's rank.

In shapes, P counts the physical experts of the iteration's placement, N those in use, S those of a rank, and V nodes.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.device.compiled import compiled
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import HostRules, tokens_of
from megatron_balance.placement.trans_plan import TransPlan
from megatron_balance.planning.manager import Manager, PolicyFailure
from megatron_balance.planning.policies.interface import Policy, owners_host

BY_RANK, BY_NODE = 0, 1
"""First turns of `level_hosts`. Tokens leave ranks above their capacity for ranks below it, if the same holds for their
nodes; then they leave nodes above their capacity for nodes below it."""

WITHIN = 6
"""Last turn, in which tokens shift within nodes. In the turns before it, they leave any node for a node with fewer."""


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
    problem = None
    try:
        found = manager.exact_plan(counts_DE)
    except PolicyFailure as failure:
        found = owners_host(placement)
        problem = str(failure)
    return PassPlan(found, manager.cost.transport.plan(found), problem)


class _Excess(NamedTuple):
    """Tokens above the capacity, which is proportional to speed. Negative numbers are room for more tokens."""

    rank_D: np.ndarray
    node_V: np.ndarray
    visiting_VE: np.ndarray
    """Tokens of each expert that hosts on a node compute, above those of the node's own ranks."""


@compiled(None)
def _shift(
    tokens_N: np.ndarray, excess: _Excess, rules: HostRules, expert: int, ends: tuple[int, int], most: int
) -> None:
    """Leave at most so many of a host's tokens to another host of the expert."""
    source, target = ends
    tokens = min(most, tokens_N[source])
    if tokens <= 0:
        return
    for end, more in ((source, -tokens), (target, tokens)):
        tokens_N[end] += more
        rank = rules.host_N[end]
        excess.rank_D[rank] += more
        excess.node_V[rank // rules.node_size] += more
        excess.visiting_VE[rank // rules.node_size, expert] += more


@compiled(None)
def _may_give(excess: _Excess, expert: int, rank: int, node: int, turn: int) -> bool:
    """Return whether a rank may leave an expert's tokens to other ranks in this turn."""
    if turn in (BY_RANK, WITHIN) and excess.rank_D[rank] <= 0:
        return False
    return turn == WITHIN or (excess.visiting_VE[node, expert] > 0 and (turn > BY_NODE or excess.node_V[node] > 0))


@compiled(None)
def _most(excess: _Excess, expert: int, giver: int, taker: int, nodes: tuple[int, int], turn: int) -> int:
    """Return how many of an expert's tokens a rank that may give them leaves to another one. `nodes`: their nodes."""
    of_ranks = min(excess.rank_D[giver], -excess.rank_D[taker])
    if turn == WITHIN:
        return of_ranks
    above = excess.node_V[nodes[0]]
    below = -excess.node_V[nodes[1]]
    most = min(above, below) if turn in (BY_RANK, BY_NODE) else (above + below) // 2
    most = min(most, excess.visiting_VE[nodes[0], expert])
    return min(most, of_ranks) if turn == BY_RANK else most


@compiled("void(int64[::1], int64[:, ::1], HostRules, float64[::1])", HostRules)
def level_hosts(tokens_N: np.ndarray, counts_DE: np.ndarray, rules: HostRules, rate_D: np.ndarray) -> None:
    """Shift tokens between the hosts of an expert, in place, until nodes have the tokens that their speeds suggest, as
    far as tokens from other nodes suffice; then do so between ranks of a node.

    Args:
        tokens_N: tokens that each host computes, in the order of `rules`.
        counts_DE: the load.
        rate_D: relative speed of each rank.
    """
    ranks, experts = counts_DE.shape
    size = rules.node_size
    nodes = (ranks - 1) // size + 1
    excess = _Excess(np.zeros(ranks, np.int64), np.zeros(nodes, np.int64), np.zeros((nodes, experts), np.int64))
    mean = counts_DE.sum() / rate_D.sum()
    for rank in range(ranks):
        capacity = np.int64(np.ceil(mean * rate_D[rank]))
        excess.rank_D[rank] -= capacity
        node = rank // size
        excess.node_V[node] -= capacity
        for expert in range(experts):
            excess.visiting_VE[node, expert] -= counts_DE[rank, expert]
    for expert in range(experts):
        for n in range(rules.first_E[expert], rules.first_E[expert + 1]):
            excess.rank_D[rules.host_N[n]] += tokens_N[n]
            excess.node_V[rules.host_N[n] // size] += tokens_N[n]
            excess.visiting_VE[rules.host_N[n] // size, expert] += tokens_N[n]
    node_N = rules.host_N // size
    for turn in range(WITHIN + 1):
        for expert in range(experts):
            first = rules.first_E[expert]
            after = rules.first_E[expert + 1]
            for source in range(first, after):
                giver = rules.host_N[source]
                if not _may_give(excess, expert, giver, node_N[source], turn):
                    continue
                for target in range(first, after):
                    if (node_N[source] == node_N[target]) == (turn == WITHIN):
                        nodes = node_N[source], node_N[target]
                        most = _most(excess, expert, giver, rules.host_N[target], nodes, turn)
                        _shift(tokens_N, excess, rules, expert, (source, target), most)


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
    planned_N = tokens_DP.sum(0)[tables.physical_N]
    tokens_N = planned_N.copy()
    # On one node, guests alone level the ranks, because a plan must not take longer
    if len(cost.network.first_N) > 1:
        level_hosts(tokens_N, counts_DE, rules, cost.rate_D)
        tokens_DP = tokens_of(counts_DE, placement, rules._replace(share_N=tokens_N, local_first=False))
    names_DS = np.arange(tokens_DP.shape[1]).reshape(placement.num_ranks, -1)
    rank_P = names_DS.ravel() // placement.slots_per_rank
    name_M, target_M, moved_M = policy.guests(tokens_DP, rank_P, names_DS, slots, cost)
    expert_M = tables.expert_P[name_M]
    source_M = rank_P[name_M]
    tokens_ED = np.zeros_like(tables.shares_ED)
    tokens_ED[tables.expert_N, tables.hosting.host_N] = tokens_N
    np.subtract.at(tokens_ED, (expert_M, source_M), moved_M)
    np.add.at(tokens_ED, (expert_M, target_M), moved_M)
    is_host_ED = tables.shares_ED > 0
    # Several hosts may give tokens to the same guest: the first one sends the weights
    _, first_X = np.unique(expert_M * placement.num_ranks + target_M, return_index=True)
    new_X = first_X[~is_host_ED[expert_M, target_M][first_X] & (owner_E[expert_M] != target_M)[first_X]]
    is_host_ED[expert_M, target_M] = True
    changed_E = np.zeros(placement.num_experts, bool) if split == "proportional" else is_host_ED.sum(1) > 1
    changed_E[expert_M] = True
    changed_E[tables.expert_N[tokens_N != planned_N]] = True
    expert_N, host_N = (is_host_ED & changed_E[:, None]).nonzero()
    # A host that gives away all of its tokens keeps one, because it keeps its slot
    quota_N = np.maximum(1, tokens_ED[expert_N, host_N])
    kept = placement.guest_slots
    found = placement.with_quotas(expert_N, host_N, quota_N, kept_slots=kept, guest_slots=kept + slots)
    return PassPlan(found, TransPlan.direct(expert_M[new_X], source_M[new_X], target_M[new_X]))
