"""Plans that level the ranks of each node for the exact load of one microbatch.

They are made on top of a placement for a whole iteration, which has spread the experts over nodes. Every host of an
expert may give tokens to guests on its node, so no copy of a microbatch crosses nodes.

In shapes, P counts the physical experts of the placement for the iteration, S those of a rank, and M guests.
"""

from typing import NamedTuple

import numpy as np

from megatron_balance.cost.messages import fastest_sending
from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import HostRules, tokens_of
from megatron_balance.placement.text import EMPTY
from megatron_balance.placement.trans_plan import EMPTY_PLAN, ExpertPiece, TransPlan
from megatron_balance.planning.fit import FILLING, WHOLE, Overload, TokenMoves, fit

TARGETS = ((1.0, FILLING), (1.01, WHOLE), (1.05, WHOLE), (1.2, WHOLE))
"""Tokens of a node's busiest rank over the node's mean, and the order of moves, that are tried."""


class PassPlan(NamedTuple):
    """The placement of one pass, and the messages that bring its own guests."""

    placement: Placement
    plan: TransPlan


def level_nodes(counts_DE: np.ndarray, placement: Placement, cost: CostModel, slots: int) -> PassPlan:
    """Return the fastest of some plans, by the cost model.

    Args:
        counts_DE: int64, the load of the microbatch.
        placement: the iteration's placement; its guest slots are followed by those of the pass.
        cost: prices a Trans and an Agg for this microbatch (`CostModel.trans_each`).
        slots: number of guest slots of a rank for the pass.
    """
    ranks = placement.num_ranks
    node_size = cost.network.node_size
    rules = HostRules.of(placement, cost.split, node_size)
    tokens_DS = tokens_of(counts_DE, placement, rules).sum(0).reshape(ranks, -1)
    names_DS = np.arange(tokens_DS.size).reshape(tokens_DS.shape)
    loads_D = tokens_DS.sum(1)
    best: tuple[float, TokenMoves | None] = _seconds(loads_D, None, cost, tokens_DS), None
    for target, order in TARGETS:
        above_D = loads_D - _capacities(loads_D, target, cost)
        if (above_D <= 0).all():
            continue
        overload = Overload(tokens_DS.copy(), names_DS, above_D, np.full(ranks, slots), node_size, 0)
        moves = fit(overload, order).moves
        seconds = _seconds(loads_D, moves, cost, tokens_DS)
        if seconds < best[0]:
            best = seconds, moves
    return _pass_plan(placement, best[1], tokens_DS, cost, slots)


def _capacities(loads_D: np.ndarray, target: float, cost: CostModel) -> np.ndarray:
    """Return [D] int64: the most tokens of each rank, at least its share of its node's tokens."""
    network = cost.network
    tokens_N = np.add.reduceat(loads_D, network.first_N)
    mean_D = (tokens_N / np.add.reduceat(cost.rate_D, network.first_N))[network.node_D] * cost.rate_D
    return np.maximum(np.ceil(mean_D), np.floor(target * mean_D)).astype(np.int64)


def _seconds(loads_D: np.ndarray, moves: TokenMoves | None, cost: CostModel, tokens_DS: np.ndarray) -> float:
    """Return the seconds of the experts, Trans and Agg. The exchange between nodes is the same for all plans."""
    after_D = loads_D.astype(np.float64)
    trans = agg = 0.0
    if moves is not None:
        np.subtract.at(after_D, moves.source_M, moves.tokens_M)
        np.add.at(after_D, moves.target_M, moves.tokens_M)
        order_M = np.lexsort((moves.target_M, moves.expert_M))
        owner_P = np.arange(tokens_DS.size) // tokens_DS.shape[1]
        ends = moves.expert_M[order_M], moves.target_M[order_M], owner_P
        trans, agg, _, _ = fastest_sending(*ends, len(loads_D), cost.transport.messages_1)
    computed = float((after_D / cost.rate_D).max())
    trans, agg = cost.exposed(computed, trans, agg)
    return cost.forward_seconds(computed) + cost.backward_seconds(computed) + float(trans + agg)


def _pass_plan(
    placement: Placement, moves: TokenMoves | None, tokens_DS: np.ndarray, cost: CostModel, slots: int
) -> PassPlan:
    """Return the plan with these moves, which the split `proportional` executes. A host keeps its slot, so it keeps a
    token if it gives away all of them."""
    expert_P = placement.tables.expert_P
    guests: list[list[int]] = [[] for _ in placement.home]
    messages = []
    quotas = {} if cost.split == "proportional" else _quotas(placement, tokens_DS)
    columns = () if moves is None else zip(*(column_M.tolist() for column_M in moves), strict=True)
    for physical, source, target, tokens in columns:
        expert = int(expert_P[physical])
        own = quotas.setdefault(expert, _quotas_of(expert, placement, tokens_DS))
        if target not in own and target != placement.owner(expert):
            guests[target].append(expert)
            messages.append(ExpertPiece(expert, source, target, 0))
        own[source] -= tokens
        own[target] = own.get(target, 0) + tokens
    hosts = [*placement.hosts]
    shares = [*placement.quotas] or [()] * placement.num_experts
    for expert, own in quotas.items():
        ranks = sorted(own)
        hosts[expert] = (*ranks,)
        shares[expert] = (*(max(1, own[rank]) for rank in ranks),)
    rows = ((*row, *more, *[EMPTY] * (slots - len(more))) for row, more in zip(placement.guests, guests, strict=True))
    changed = Placement(
        num_experts=placement.num_experts,
        home=placement.home,
        guests=tuple(rows),
        hosts=tuple(hosts),
        primary=placement.primary,
        quotas=tuple(shares) if any(shares) else (),
    )
    return PassPlan(changed, TransPlan.of([sorted(messages)]) if messages else EMPTY_PLAN)


def _quotas(placement: Placement, tokens_DS: np.ndarray) -> dict[int, dict[int, int]]:
    """Return, by expert and host, the tokens of experts with several hosts."""
    shared = (expert for expert, hosts in enumerate(placement.hosts) if len({*hosts}) > 1)
    return {expert: _quotas_of(expert, placement, tokens_DS) for expert in shared}


def _quotas_of(expert: int, placement: Placement, tokens_DS: np.ndarray) -> dict[int, int]:
    hosts = dict.fromkeys(placement.hosts[expert])
    return {rank: int(tokens_DS[rank, placement.slot(rank, expert)]) for rank in hosts}
