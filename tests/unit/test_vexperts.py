"""FlexMoE's vExperts: they add up to what the cost model counts, and move where that saves messages."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.planning.policies.flexmoe import _migrate
from megatron_balance.planning.vexperts import Expand, Migrate, Modification, Shrink, VExperts, gaining, modify
from tests.unit.flexmoe_cases import cost_model, layers
from tests.unit.placements import UNSHRUNK


def random_modification(start: Placement, generator: np.random.Generator) -> Modification:
    """Return any modification, whether there is room for it or not."""
    expert, partner = generator.permutation(np.append(np.arange(start.num_experts), EMPTY))[:2].tolist()
    source, target = generator.integers(0, start.num_ranks, 2).tolist()
    expert = max(expert, 0)
    choices = (Expand(expert, target), Shrink(expert, target), Migrate(expert, source, target, partner))
    return choices[generator.integers(3)]


@UNSHRUNK
@given(layers(), st.integers(0, 2**32 - 1))
def test_vexperts_count_as_the_model_does(layer: tuple[np.ndarray, Placement, CostModel], seed: int) -> None:
    counts_BDE, start, cost = layer
    generator = np.random.default_rng(seed)
    state = VExperts.start(counts_BDE, start, cost, limit=100)
    target = start
    for modification in [random_modification(start, generator) for _ in range(20)]:
        try:
            target = modify(target, [modification])
        except ValueError:
            continue
        state = state.after([modification])
    # A primary host that left and came back is primary again
    target = start.rehost(target.hosts)
    assert [float(part) for part in cost.work_of(state.loads_FBD)] == pytest.approx(cost.work(counts_BDE, target))
    traffic_BDD = cost.traffic(counts_BDE, target)
    assert state.tokens_BD == pytest.approx(traffic_BDD.sum(1), abs=1e-6)
    sent_D, extra = sending_of(target, cost)
    assert state.sent_D == pytest.approx(sent_D, abs=1e-9)
    assert state.extra_E.max() == pytest.approx(extra, abs=1e-9)
    sent = cost.transport.seconds_of(sent_D.max(), extra)
    assert state.seconds == pytest.approx(float(cost.time_of(*cost.work(counts_BDE, target), *sent).total))
    used = Counter(rank for ranks in target.hosts for rank in ranks)
    assert state.free_vexperts_D.tolist() == [100 - used[rank] for rank in range(start.num_ranks)]
    assert state.free_slots_D.tolist() == [row.count(EMPTY) for row in target.guests]
    expert = int(generator.integers(start.num_experts))
    rank = int(generator.integers(start.num_ranks))
    after = state.after([Expand(expert, rank)])
    tried = state.tried_with((np.array([expert]), gaining(np.array([rank]), 1, start.num_ranks)))
    assert tried.work_ABD[0] == pytest.approx(after.work_BD, abs=1e-12)
    assert tried.more_A[0] == pytest.approx((after.sent_D - state.sent_D).sum(), abs=1e-9)
    # An expert that stops having the longest chain is not noticed before it has happened
    assert float(tried.seconds_A[0]) >= after.seconds * (1 - 1e-9)


def sending_of(placement: Placement, cost: CostModel) -> tuple[np.ndarray, float]:
    """Return [D] the time in which each rank receives its guests and sends its experts once, and the longest chain."""
    sent_D = np.zeros(placement.num_ranks)
    extras = [0.0]
    node_size = cost.profile.node_size
    for expert, owner in enumerate(placement.owners):
        guests = [rank for rank, row in enumerate(placement.guests) if expert in row]
        nodes = -(-placement.num_ranks // node_size)
        guests.sort(key=lambda rank: ((rank // node_size - owner // node_size) % nodes, (rank - owner) % node_size))
        places = [owner // node_size, *(rank // node_size for rank in guests)]
        times = [1.0 if node == before else cost.transport.far for before, node in itertools.pairwise(places)]
        for rank, time in zip(guests, times, strict=True):
            sent_D[rank] += time
        sent_D[owner] += sum(times[:1])
        extras.append(sum(times) - max(times, default=0.0))
    return sent_D, max(extras)


def migrated(counts: list[list[int]], current: str, limit: int, node_size: int) -> list[str]:
    placement = Placement.parse(current)
    cost = cost_model(placement.num_ranks, node_size)
    return list(map(str, _migrate(VExperts.start(1000 * np.array(counts), placement, cost, limit))))


def test_migrate_makes_synchronization_cheaper() -> None:
    assert migrated([[4, 4]] * 2, "0x0 + 1! | 1x0 + 0!", limit=1, node_size=2) == ["Migrate 0@1 <-> 1@0"]
    assert migrated([[4, 4]] * 2, "0x0 + . | 1 + 0!", limit=2, node_size=2) == ["Migrate 0@1 <->@0"]
    assert migrated([[4, 4]] * 2, "0 + . | 1 + .", limit=2, node_size=2) == []
    # Rank 2 is on a different node from the owner and the tokens
    far = "0 + . | 1 + . | 2 + 0 | 3 + ."
    counts = [[8, 1, 1, 1], [8, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]
    assert migrated(counts, far, limit=2, node_size=2) == ["Migrate 0@2 <->@1"]
    assert migrated(counts, far, limit=2, node_size=4) == []
    # Rank 3 is the slowest anyway. Rank 1 would save more than the owner, but the expert would have to be sent
    counts = [[10, 1, 1, 12], [10, 1, 1, 12], [0, 1, 1, 12], [0, 1, 1, 12]]
    assert migrated(counts, far, limit=2, node_size=2) == ["Migrate 0@2 <->@0"]
    # Rank 1 would be the slowest, as the owner would have been in the first case
    counts = [[8, 9, 1, 1], [8, 9, 1, 1], [0, 9, 1, 1], [0, 9, 1, 1]]
    assert migrated(counts, far, limit=2, node_size=2) == ["Migrate 0@2 <->@0"]
