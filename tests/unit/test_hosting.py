"""What hosts and alternatives make ranks compute, exchange and send: compiled loops against arrays."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel, Overlap
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.hosting import Hosting, LayerLoad
from megatron_balance.profile.cluster_profile import Fit, Throughput, from_links
from tests.unit.placements import rank_seconds
from tests.unit.slow_splits import SPLITS, within_nodes


def cost_model(num_ranks: int, node_size: int, generator: np.random.Generator, **options: Any) -> CostModel:
    """Return a model with two kinds of links, shared adapters or not, and ranks of any speed."""
    both = Fit(3.0, 2.0, 0.0, 0.0)
    shared = Fit(3.0, float(generator.choice([2.0, 3.0])), 0.0, 0.0)
    profile = from_links(
        *(num_ranks, node_size, Fit(1.0, 0.5, 0.0, 0.0), both),
        shared=shared,
        forward=Throughput(1.0, 0.25, 0.0, 0.0),
        backward=Throughput(2.0, 0.5, 0.0, 0.0),
        rates=tuple(generator.choice([0.5, 1.0, 1.5], num_ranks).tolist()),
    )
    split = str(generator.choice(sorted(SPLITS)))
    coding = float(generator.choice([0.0, 0.1]))
    overlap = Overlap(1.0, 2.0) if generator.random() < 0.5 else None
    return CostModel(
        profile,
        token_bytes=4,
        param_bytes=float(generator.choice([6, 500])),
        grad_bytes=12,
        split=split,
        coding=coding,
        microbatches=int(generator.integers(1, 3)),
        overlap=overlap,
    )


class Case:
    """A layer, any hosts, and alternatives."""

    def __init__(self, seed: int, ranks: int, home: int, node_size: int) -> None:
        self.generator = generator = np.random.default_rng(seed)
        self.cost = cost_model(ranks, node_size, generator)
        self.ranks = ranks
        self.placement = Placement.identity(ranks * home, ranks, ranks * home)
        counts_BDE = generator.integers(0, 100, (self.cost.microbatches, ranks, ranks * home))
        counts_BDE[:, :, generator.random(ranks * home) < 0.3] = 0
        self.hosting = Hosting.of(LayerLoad(counts_BDE, self.placement, self.cost))
        expert_A, shares_AD, primary_A = self.hosts(ranks * home)
        self.hosting = self.hosting.changed(expert_A, shares_AD, primary_A)

    def hosts(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return any hosts for different experts."""
        generator = self.generator
        expert_A = generator.permutation(len(self.hosting.primary_E))[:number]
        shares_AD = generator.integers(0, 4, (len(expert_A), self.ranks)) // 2
        shares_AD[np.arange(len(expert_A)), generator.integers(0, self.ranks, len(expert_A))] += 1
        return expert_A, shares_AD, generator.integers(0, self.ranks, len(expert_A))

    def loads(self, hosting: Hosting) -> np.ndarray:
        """Return [E, 5, B, D], by numpy."""
        layer = hosting.layer
        row_E = np.arange(len(hosting.primary_E))
        owner_E = layer.owner_E
        primary_E = hosting.primary_E
        shares_ED = hosting.shares_ED
        first_E = np.where(shares_ED[row_E, owner_E], owner_E, (shares_ED > 0).argmax(1))
        primary_E = np.where(shares_ED[row_E, primary_E], primary_E, first_E)
        return slow_loads(self.cost, layer.counts_EBD, shares_ED, primary_E)

    def check(self, hosting: Hosting) -> None:
        """Compare hosts with numpy and with the cost model."""
        cost = self.cost
        loads_FBD = self.loads(hosting).sum(0)
        assert hosting.loads_FBD == pytest.approx(loads_FBD, abs=1e-9)
        assert hosting.work_BD == pytest.approx(rank_seconds(cost, loads_FBD), abs=1e-9)
        work = hosting._now.exchanging_A[0], hosting._now.computed_A[0]
        assert work == pytest.approx([float(part) for part in cost.work_of(loads_FBD)], abs=1e-9)
        times_ED, extra_E = cost.transport.link_times(hosting.layer.owner_E, hosting.guests_ED)
        assert hosting.sent_D == pytest.approx(times_ED.sum(0), abs=1e-9)
        assert hosting.extra_E == pytest.approx(extra_E, abs=1e-9)
        sent = cost.transport.seconds_of(float(times_ED.sum(0).max()), float(extra_E.max()))
        assert hosting.seconds == pytest.approx(float(cost.time_of(*work, *sent).total))


def slow_loads(cost: CostModel, counts_ABD: np.ndarray, shares_AD: np.ndarray, primary_A: np.ndarray) -> np.ndarray:
    """Return [A, 5, B, D]: the load of each expert, in numpy."""
    found = []
    for b in range(counts_ABD.shape[1]):
        counts_AD = counts_ABD[:, b]
        quotas_AD = SPLITS[cost.split](counts_AD, shares_AD, primary_A)
        moved_2AD = np.stack([counts_AD, quotas_AD]) - np.minimum(counts_AD, quotas_AD)
        near_2AD = within_nodes(moved_2AD, cost.network.node_size)
        found.append(np.concatenate([quotas_AD[None], near_2AD, moved_2AD - near_2AD]))
    return np.stack(found, axis=2).swapaxes(0, 1)


drawn = st.builds(Case, st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 3), st.integers(1, 10))


@given(drawn)
def test_hosts_that_change(case: Case) -> None:
    case.check(case.hosting)
    case.check(case.hosting.changed(*case.hosts(3)))


@given(drawn, st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_alternatives_are_as_hosts_that_change(case: Case, ways: int, number: int, one_after_the_other: bool) -> None:
    hosting = case.hosting
    number = min(number, len(case.hosting.primary_E))
    hosts = [case.hosts(number) for _ in range(ways)]
    if one_after_the_other:
        # An expert is changed once
        number = 1
        order = case.generator.permutation(len(hosting.primary_E))[:ways]
        hosts = [(order[[place]], *(part[:1] for part in hosts[place][1:])) for place in range(len(order))]
    expert_KA, shares_KAD, primary_KA = (np.stack(part, axis=1) for part in zip(*hosts, strict=True))
    is_none = expert_KA.shape[1] > 1 and not one_after_the_other
    if is_none:
        expert_KA[-1, 0] = -1
    begins_A = np.array([True, *[not one_after_the_other] * (len(hosts) - 1)])
    found = hosting.under(expert_KA, shares_KAD, primary_KA, begins_A)
    after = hosting
    extra = float(hosting.extra_E.max())
    for a, arrays in enumerate(hosts):
        kept = number - 1 if is_none and a == 0 else number
        after = (after if one_after_the_other else hosting).changed(*(each[:kept] for each in arrays))
        extra = max(extra if one_after_the_other else float(hosting.extra_E.max()), float(after.extra_E.max()))
        assert found.work_ABD[a] == pytest.approx(after.work_BD, abs=1e-9)
        assert found.exchanging_A[a] == pytest.approx(after._now.exchanging_A[0], abs=1e-9)
        assert found.computed_A[a] == pytest.approx(after._now.computed_A[0], abs=1e-9)
        assert found.more_A[a] == pytest.approx((after.sent_D - hosting.sent_D).sum(), abs=1e-9)
        sent = case.cost.transport.seconds_of(after.sent_D.max(), extra)
        assert (found.trans_A[a], found.agg_A[a]) == pytest.approx(sent, rel=1e-9)


@given(drawn)
def test_ranks_that_are_not_involved_count_with_the_mean(case: Case) -> None:
    hosting = case.hosting
    cost = case.cost
    expert = int(case.generator.integers(len(hosting.primary_E)))
    rank = int(case.generator.integers(case.ranks))
    _, shares_AD, primary_A = case.hosts(4)
    involved_AD = case.generator.random(shares_AD.shape) < 0.6
    involved_AD[:, rank] = True
    found = hosting.under(np.full((1, len(primary_A)), expert), shares_AD[None], primary_A[None])
    work_ABD = found.work_ABD.copy()
    mean_B1 = hosting.work_BD.mean(-1, keepdims=True)
    others_BD = rank_seconds(cost, hosting.loads_FBD - case.loads(hosting)[expert])
    work_ABD[..., rank] -= np.maximum(others_BD[:, rank] - mean_B1[:, 0], 0)
    seconds_A = np.where(involved_AD[:, None], work_ABD, mean_B1).max(-1).sum(-1)
    seconds_A += sum(cost.charged(hosting.layer.mean, found.trans_A, found.agg_A))
    assert hosting.involved_seconds(found, expert, rank, involved_AD) == pytest.approx(seconds_A, abs=1e-9)
    assert found.work_ABD == pytest.approx(work_ABD, abs=1e-9)
