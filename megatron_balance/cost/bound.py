"""A lower bound of a layer's seconds under all plans with the same owners and number of guest slots.

It proves how far a plan is at most from the best one. It holds for all splits of tokens among hosts:

- Computation: some rank has at least the mean. If all ranks are within a limit, each rank above it needs guests that
  take the excess, and a guest takes at most its expert's tokens, or a rank's limit. All these guests need slots.
- Exchanges: the tokens of a rank or node for experts without a slot there leave it. At best, its slots hold the experts
  with the most such tokens.
- Trans and Agg: a plan with any guest sends one expert at least, at best over both kinds of links at the same time.
"""

import numpy as np

from megatron_balance.cost.loads import by_microbatch
from megatron_balance.cost.model import CostModel, owners
from megatron_balance.cost.sending import BatchModel
from megatron_balance.placement.placement import Placement

HALVINGS = 40
"""Number of steps of the search for the lowest limit of a rank's tokens."""


def least_seconds(counts: np.ndarray, placement: Placement, cost: CostModel) -> float:
    """Return a lower bound of `CostModel.layer_seconds` for loads [D, E] or [B, D, E], over all placements with the
    owners and the number of guest slots of this one."""
    counts_BDE = by_microbatch(counts)
    owner_E = owners(placement)
    alone = placement.rehost([(owner,) for owner in placement.owners], placement.owners)
    alone_seconds = cost.layer_seconds(counts, alone)
    slots = placement.guest_slots
    if not slots:
        return alone_seconds
    computed = sum(least_tokens(tokens_E, owner_E, slots, cost.rate_D) for tokens_E in counts_BDE.sum(1))
    exchanging = sum(_least_exchange(counts_DE, owner_E, slots, cost) for counts_DE in counts_BDE)
    sent = (_least_message(model) for model in cost.transport.batches)
    return min(alone_seconds, float(cost.time_of(exchanging, computed, *sent).total))


def least_tokens(tokens_E: np.ndarray, owner_E: np.ndarray, slots: int, rate_D: np.ndarray) -> float:
    """Return a lower bound of the most tokens of a rank, over its relative speed, with any guests."""
    ranks = len(rate_D)
    homes = len(owner_E) // ranks
    tokens_DS = -np.sort(-tokens_E[np.argsort(owner_E, kind="stable")].reshape(ranks, homes), axis=1)
    loads_D = tokens_DS.sum(1)
    most_DS = tokens_DS.cumsum(1)
    low = float(loads_D.sum() / rate_D.sum())
    high = float((loads_D / rate_D).max())
    for _ in range(HALVINGS):
        limit = (low + high) / 2
        above_D = np.maximum(loads_D - limit * rate_D, 0.0)
        # The largest experts take an excess with the fewest guests
        guests_D = np.where(above_D > 0, 1 + (most_DS < above_D[:, None]).sum(1), 0)
        guests_D = np.maximum(guests_D, np.ceil(above_D / (limit * rate_D.max()) - 1e-9) if limit else guests_D)
        if guests_D.sum() > ranks * slots or guests_D.max() > (ranks - 1) * slots:
            low = limit
        else:
            high = limit
    return low


def _least_exchange(counts_DE: np.ndarray, owner_E: np.ndarray, slots: int, cost: CostModel) -> float:
    """Return a lower bound of a microbatch's `exchanging` (`CostModel.time_of`)."""
    network = cost.network
    ranks = np.arange(network.num_ranks)
    sent = float(_leaving(counts_DE, owner_E[None] == ranks[:, None], slots).max())
    links = cost.exchange.links(cost.token_bytes)
    found = cost.coding * sent
    if len(network.first_N) == 1:
        # If links share their bandwidth, so do ranks: see `core.take_turns`
        return found + (links.near * links.near_copies * sent if links.near_one_way == 1 else 0.0)
    counts_NE = np.add.reduceat(counts_DE, network.first_N, axis=0)
    is_home_NE = network.node_D[owner_E][None] == np.arange(len(counts_NE))[:, None]
    left = float(_leaving(counts_NE, is_home_NE, slots * network.node_size).max())
    return found + links.far_one_way * links.far * links.far_copies / links.adapters * left


def _leaving(counts_NE: np.ndarray, is_home_NE: np.ndarray, slots: int) -> np.ndarray:
    """Return [N] tokens that leave a rank or node whose slots hold the experts with the most tokens there."""
    counts_NE = -np.sort(-np.where(is_home_NE, 0, counts_NE), axis=1)
    return counts_NE[:, slots:].sum(1)


def _least_message(model: BatchModel) -> float:
    """Return a lower bound of the seconds of Trans or Agg for any guest."""
    network = model.network
    lines = model.lines
    near = lines.near_beta * network.near.one_way
    if len(network.first_N) == 1:
        return lines.start + near * lines.expert_bytes
    if network.node_size == 1:
        return lines.start + lines.far_beta * lines.expert_bytes
    both = near * lines.far_beta / (near + lines.far_beta) if near + lines.far_beta else 0.0
    return lines.start + both * lines.expert_bytes
