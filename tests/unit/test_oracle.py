"""The planner bench's oracle: exact if every placement can be tried, and never above a policy's time."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

import oracle
from megatron_balance.cost.model import LINKS, CostModel, Overlap
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS
from megatron_balance.planning.policies import load_policy, registered
from megatron_balance.profile.cluster_profile import builtin
from tests.unit.placements import random_placement

EXACT = 1e-4
"""Precision of the solver."""


def cost_model(num_ranks: int, **options: object) -> CostModel:
    """Return a model in which sending an expert takes about as long as computing a rank's tokens."""
    return CostModel(builtin(num_ranks, 2, 1024, 2048), token_bytes=2048, param_bytes=8e6, grad_bytes=24e6, **options)


def load(seed: int, num_ranks: int, num_experts: int) -> np.ndarray:
    """Return tokens [D, E]: a few experts have most, and some have none."""
    generator = np.random.default_rng(seed)
    counts_DE = (generator.lognormal(0, 1.5, (num_ranks, num_experts)) * generator.choice([100, 3000])).astype(np.int64)
    counts_DE[:, generator.random(num_experts) < 0.2] = 0
    return counts_DE


def every_placement(owners: Placement) -> Iterator[Placement]:
    """Yield all hosts within the guest slots, including lent experts."""
    ranks = range(owners.num_ranks)
    choices = [hosts for size in ranks for hosts in itertools.combinations(ranks, size + 1)]
    for hosts in itertools.product(choices, repeat=owners.num_experts):
        guests = [
            sum(rank in own for own in hosts) - sum(rank in hosts[e] for e in owners.home[rank]) for rank in ranks
        ]
        if max(guests) <= owners.guest_slots:
            yield owners.rehost(hosts)


def sending(placement: Placement, cost: CostModel) -> tuple[float, float]:
    """Return lower bounds of the seconds of Trans and Agg, from each expert's guests and each owner's sends."""
    guests = [[rank for rank in {*ranks} if rank != placement.owner(e)] for e, ranks in enumerate(placement.hosts)]
    into = [sum(rank in own for own in guests) for rank in range(placement.num_ranks)]
    out = [[len(guests[expert]) for expert in home if guests[expert]] for home in placement.home]
    if cost.links == "average":
        rounds = {1: sum(into) / placement.num_ranks}
    elif cost.links == "direct":
        rounds = {1: max(*into, *map(sum, out))}
    else:
        most, farthest = max(*into, *map(len, out)), max(map(len, guests))
        rounds = {c: max(most * c, c + farthest.bit_length() - 1) if farthest else 0 for c in range(1, 65)}
    return (
        min(cost.trans_seconds(count, chunks) for chunks, count in rounds.items()),
        min(cost.agg_seconds(count, chunks) for chunks, count in rounds.items()),
    )


def best_shares(counts_DE: np.ndarray, placement: Placement, cost: CostModel) -> float:
    """Return the minimum layer time of a placement.

    Variables are the tokens of each source and expert on each host, the exchanged and the computed tokens, and the
    exposed seconds of Trans and Agg.
    """
    ranks, unit = range(placement.num_ranks), 1000.0
    flows = [(d, e, m) for d in ranks for e, hosts in enumerate(placement.hosts) for m in {*hosts}]
    none, one = (np.array(cost.time_of(tokens, tokens, 0.0, 0.0)) for tokens in (0.0, unit))
    slope, overlap = one - none, cost.overlap or Overlap(0.0, 0.0, experts=False)
    share = overlap.experts / cost.microbatches
    rows, bounds = [], []
    for rank in ranks:
        computed, received, sent = (
            [float(matters(d, m)) for d, _, m in flows]
            for matters in (
                lambda d, m, own=rank: m == own,
                lambda d, m, own=rank: m == own != d,
                lambda d, m, own=rank: d == own != m,
            )
        )
        rows += [[*computed, 0, -1, 0, 0], [*received, -1, 0, 0, 0], [*sent, -1, 0, 0, 0]]
        bounds += [0, 0, 0]
    for index, seconds in enumerate(sending(placement, cost)):
        seen = [-1e6, 0] if index == 0 else [0, -1e6]
        rows.append([*[0] * len(flows), 0, -1e6 * share * slope[1 + index], *seen])
        bounds.append(1e6 * (share * none[1 + index] + overlap[index] - seconds))
    totals = [[float((d, e) == pair) for d, e, _ in flows] + [0] * 4 for pair in np.ndindex(counts_DE.shape)]
    objective = [*[0] * len(flows), slope[0], slope[1] + slope[2], 1.0, 1.0]
    found = linprog(1e6 * np.array(objective), rows, bounds, totals, counts_DE.ravel() / unit)
    assert found.status == 0
    return float(none.sum() + found.fun / 1e6)


@pytest.mark.parametrize("size", [(2, 4, 1), (3, 3, 1)])
@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("overlap", [None, Overlap(1e-4, 4e-4), Overlap(0.0, 0.0)])
def test_it_is_the_least_of_all_placements(size: tuple[int, int, int], links: str, overlap: Overlap | None) -> None:
    num_ranks, num_experts, slots = size
    owners = Placement.identity(num_experts, num_ranks, slots)
    cost = cost_model(num_ranks, links=links, overlap=overlap, microbatches=1 + 2 * (overlap is not None))
    counts_DE = load(slots + len(links), num_ranks, num_experts)
    least = min(best_shares(counts_DE, placement, cost) for placement in every_placement(owners))
    assert oracle.least_seconds(counts_DE, owners, cost) == pytest.approx(least, rel=EXACT)


@settings(max_examples=60)
@given(st.data(), st.integers(0, 2**32 - 1))
def test_no_policy_and_no_split_is_faster(data: st.DataObject, seed: int) -> None:
    num_ranks, num_experts, slots = data.draw(st.sampled_from([(2, 4, 2), (3, 6, 2), (4, 4, 1), (4, 8, 1)]))
    owners, counts_DE = Placement.identity(num_experts, num_ranks, slots), load(seed, num_ranks, num_experts)
    overlap = data.draw(st.sampled_from([None, Overlap(1e-4, 2e-4)]))
    cost = cost_model(num_ranks, links=data.draw(st.sampled_from(LINKS)), overlap=overlap)
    least = oracle.least_seconds(counts_DE, owners, cost) * (1 - EXACT)
    assert least > 0
    assert least <= oracle.best_seconds(counts_DE, owners, cost)
    for split in SPLITS:
        judged = dataclasses.replace(cost, split=split)
        lending = random_placement(num_experts, num_ranks, slots, seed)
        assert least <= judged.layer_seconds(counts_DE, lending)
        for name in registered():
            assert least <= judged.layer_seconds(counts_DE, load_policy(name).plan(counts_DE, owners, judged))


def test_guests_may_compute_in_place_of_the_owner() -> None:
    # Rank 0 owns both hot experts. Lending one moves all its tokens; a copy would take only its host's own tokens
    counts_DE = np.array([[9000, 9000, 0, 0]] * 2)
    owners, cost = Placement.identity(4, 2, 1), dataclasses.replace(cost_model(2), param_bytes=1.0, grad_bytes=1.0)
    lent = owners.rehost([[0], [1], [1], [1]])
    assert oracle.least_seconds(counts_DE, owners, cost) == pytest.approx(cost.layer_seconds(counts_DE, lent), rel=1e-3)
    assert oracle.best_seconds(counts_DE, owners, cost) > 1.3 * cost.layer_seconds(counts_DE, lent)


def test_no_tokens_take_latencies_only() -> None:
    owners, cost = Placement.identity(4, 2, 1), cost_model(2)
    counts_DE = np.zeros((2, 4), dtype=np.int64)
    assert oracle.least_seconds(counts_DE, owners, cost) == pytest.approx(cost.layer_seconds(counts_DE, owners))
