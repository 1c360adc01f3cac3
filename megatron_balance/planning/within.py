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
from megatron_balance.placement.text import EMPTY
from megatron_balance.placement.trans_plan import EMPTY_PLAN, ExpertPiece, TransPlan
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
    rules = HostRules.of(placement, split, cost.network.node_size)
    tokens_DP = tokens_of(counts_DE, placement, rules)
    names_DS = np.arange(tokens_DP.shape[1]).reshape(placement.num_ranks, -1)
    rank_P = names_DS.ravel() // placement.slots_per_rank
    added = policy.guests(tokens_DP, rank_P, names_DS, slots, cost)
    tokens_P = tokens_DP.sum(0)
    quotas = {} if split == "proportional" else _shared(placement, tokens_P)
    guests: list[list[int]] = [[] for _ in placement.home]
    messages = []
    for name, target, tokens in zip(*(column_M.tolist() for column_M in added), strict=True):
        expert = int(placement.tables.expert_P[name])
        source = int(rank_P[name])
        own = quotas.setdefault(expert, _quotas(expert, placement, tokens_P))
        if target not in own and target != placement.owner(expert):
            guests[target].append(expert)
            messages.append(ExpertPiece(expert, source, target, 0))
        own[source] -= tokens
        own[target] = own.get(target, 0) + tokens
    plan = TransPlan.of([sorted(messages)]) if messages else EMPTY_PLAN
    return PassPlan(_with_guests(placement, guests, quotas, slots), plan)


def _with_guests(
    placement: Placement, guests: list[list[int]], quotas: dict[int, dict[int, int]], slots: int
) -> Placement:
    """Return the placement with more guest slots, guests and quotas. A host that gives away all of its tokens keeps
    one, because it keeps its slot."""
    hosts = [*placement.hosts]
    shares = [*placement.quotas] or [()] * placement.num_experts
    for expert, own in quotas.items():
        ranks = sorted(own)
        hosts[expert] = (*ranks,)
        shares[expert] = (*(max(1, own[rank]) for rank in ranks),)
    rows = ((*row, *more, *[EMPTY] * (slots - len(more))) for row, more in zip(placement.guests, guests, strict=True))
    return Placement(
        num_experts=placement.num_experts,
        home=placement.home,
        guests=tuple(rows),
        hosts=tuple(hosts),
        primary=placement.primary,
        quotas=tuple(shares) if any(shares) else (),
    )


def _shared(placement: Placement, tokens_P: np.ndarray) -> dict[int, dict[int, int]]:
    """Return, by expert and host, the tokens of experts with several hosts."""
    shared = (expert for expert, hosts in enumerate(placement.hosts) if len({*hosts}) > 1)
    return {expert: _quotas(expert, placement, tokens_P) for expert in shared}


def _quotas(expert: int, placement: Placement, tokens_P: np.ndarray) -> dict[int, int]:
    """Return the tokens of each host of an expert."""
    hosts = dict.fromkeys(placement.hosts[expert])
    return {rank: int(tokens_P[placement.physical(rank, expert)]) for rank in hosts}
