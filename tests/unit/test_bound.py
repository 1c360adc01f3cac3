"""The lower bound of a layer's seconds: no placement is below it, and it is reached where nothing stands in the way."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.bound import least_seconds, least_tokens
from megatron_balance.cost.flex import Routing
from megatron_balance.cost.model import CostModel, Overlap, owners
from megatron_balance.observe.layer_report import explanation
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS
from megatron_balance.planning.policies import load_policy
from megatron_balance.profile.cluster_profile import Fit, Throughput, from_links
from tests.unit.placements import UNSHRUNK, loads, placements


@st.composite
def models(draw: st.DrawFn, placement: Placement) -> CostModel:
    """Draw prices of all kinds for a placement's ranks."""
    number = st.sampled_from([0.0, 1e-6, 1e-3, 1.0])
    line = st.builds(Fit, number, number, st.just(0.0), st.just(0.0))
    ranks = placement.num_ranks
    profile = from_links(
        ranks,
        draw(st.integers(1, ranks)),
        draw(line),
        draw(line),
        shared=draw(line),
        forward=Throughput(*draw(st.tuples(number, number)), 0.0, 0.0),
        backward=Throughput(*draw(st.tuples(number, number)), 0.0, 0.0),
    )
    one_way = {kind: draw(line) for kind in ("intra", "inter")}
    profile = dataclasses.replace(
        profile,
        links={**profile.links, "one_way": one_way},
        rates=tuple(draw(st.sampled_from([(1.0,) * ranks, (0.5, *(1.0,) * (ranks - 1))]))),
    )
    return CostModel(
        profile,
        token_bytes=draw(number),
        param_bytes=draw(number),
        grad_bytes=draw(number),
        coding=draw(number),
        split=draw(st.sampled_from([*SPLITS])),
        degrees=draw(st.sampled_from([(1,), (1, 2)])),
        overlap=draw(st.sampled_from([None, Overlap(1e-3, 1.0), Overlap(0.0, 0.0, experts=False)])),
        routing=draw(st.sampled_from([None, Routing(placement.num_experts, 1), Routing(4 * placement.num_experts, 8)])),
    )


@UNSHRUNK
@given(st.data(), placements(), st.integers(1, 3))
def test_no_placement_is_faster(data: st.DataObject, placement: Placement, microbatches: int) -> None:
    counts_BDE = np.stack([data.draw(loads(placement, 1000)).numpy() for _ in range(microbatches)])
    cost = dataclasses.replace(data.draw(models(placement)), microbatches=microbatches)
    least = least_seconds(counts_BDE, placement, cost)
    assert least <= cost.layer_seconds(counts_BDE, placement) * (1 + 1e-9) + 1e-12
    planned = load_policy("quota").plan(counts_BDE, placement, dataclasses.replace(cost, split="proportional"))
    exact = dataclasses.replace(cost, split="proportional")
    assert least_seconds(counts_BDE, placement, exact) <= exact.layer_seconds(counts_BDE, planned) * (1 + 1e-9) + 1e-12


def least_by_search(tokens_E: np.ndarray, owner_E: np.ndarray, slots: int, ranks: int) -> float:
    """Return the least load of the busiest rank over all choices of guests, in whole tokens.

    Tokens that only the ranks of a set may compute are on one of these; by Hall's theorem nothing else binds.
    """
    best = np.inf
    subsets = [np.array([mask >> rank & 1 for rank in range(ranks)], bool) for mask in range(1, 2**ranks)]
    is_owner_ED = owner_E[:, None] == np.arange(ranks)
    # An expert may be a guest of any ranks but its owner
    choices = [[guest_D for guest_D in np.ndindex(*(2,) * ranks) if not guest_D[owner]] for owner in owner_E.tolist()]
    for choice in itertools.product(*choices):
        guest_ED = np.array(choice, bool)
        if guest_ED.sum(0).max() > slots:
            continue
        may_ED = guest_ED | is_owner_ED
        loads = [tokens_E[~may_ED[:, ~subset].any(1)].sum() / subset.sum() for subset in subsets]
        best = min(best, max(loads))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_a_bound_of_all_guests(seed: int) -> None:
    generator = np.random.default_rng(seed)
    owner_E = np.repeat([0, 1, 2], 1 + seed % 2)
    tokens_E = generator.integers(0, 100, len(owner_E)) * generator.choice([1, 10], len(owner_E))
    for slots in (1, 2):
        least = least_tokens(tokens_E, owner_E, slots, np.ones(3))
        assert least <= least_by_search(tokens_E, owner_E, slots, 3) + 1e-6


def test_slots_bind() -> None:
    # Rank 0 has ten equal experts; the other rank's slot takes one of them
    tokens_E = np.array([10] * 10 + [0] * 10)
    owner_E = np.repeat([0, 1], 10)
    assert least_tokens(tokens_E, owner_E, 1, np.ones(2)) == pytest.approx(90, rel=1e-6)
    assert least_tokens(tokens_E, owner_E, 5, np.ones(2)) == pytest.approx(50)


def test_the_bound_is_reached_if_links_are_free() -> None:
    counts_DE = np.array([[70, 20, 30, 0]] * 2)
    free = Fit(0.0, 0.0, 0.0, 0.0)
    second = Throughput(1.0, 0.0, 0.0, 0.0)
    profile = from_links(2, 2, free, free, shared=free, forward=second, backward=second)
    cost = CostModel(profile, token_bytes=0, param_bytes=0, grad_bytes=0, split="proportional")
    current = Placement.identity(4, 2, 2)
    planned = load_policy("quota").plan(counts_DE, current, cost)
    assert owners(planned).tolist() == [0, 0, 1, 1]
    assert least_seconds(counts_DE, current, cost) == pytest.approx(cost.layer_seconds(counts_DE, planned), rel=0.005)
    assert "360 -> 240 ms expected, at most 0.0% above any placement's (" in explanation(
        0, milliseconds(cost), counts_DE[None], current, planned
    )


def milliseconds(cost: CostModel) -> CostModel:
    """Return the model of ranks that take 1 ms, not 1 s, for a token."""
    line = Throughput(1e-3, 0.0, 0.0, 0.0)
    return dataclasses.replace(cost, profile=dataclasses.replace(cost.profile, forward=line, backward=line))
