"""All routes at once keep links as busy as one route after another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.placement.links import link_lines
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import routes
from tests.unit.link_loads import LinkLoads
from tests.unit.placements import placements

CROWDED = st.builds(
    lambda ranks, owners: Placement.identity(2 * ranks, ranks, len(owners)).with_hosts(
        (owner % (2 * ranks), rank) for owner in owners for rank in range(ranks) if rank != owner % (2 * ranks) // 2
    ),
    st.integers(2, 20),
    st.sets(st.integers(0, 3), min_size=1, max_size=3),
)
"""A few experts on all ranks."""


@given(
    st.data(),
    placements() | CROWDED,
    st.integers(1, 8),
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from([0.5, 1.0, 1.3, 8.0]),
    st.sampled_from([1.0, 2.5, 64.0]),
)
def test_lines_are_those_of_single_routes(
    data: st.DataObject, placement: Placement, node_size: int, fanout: int, far: float, adapters: float
) -> None:
    found = routes(placement, node_size, fanout, far).values()
    if not found:
        return
    loads, received = LinkLoads(placement.num_ranks, node_size, adapters), np.zeros(placement.num_ranks)
    for route in found:
        loads.add(route)
        for link in route:
            received[link.target] += link.time
    owner_M, expert_M, rank_M = placement.tables.guests_3M[:, data.draw(st.permutations(range(placement.added_hosts)))]
    lines, most = link_lines(
        owner_M,
        expert_M,
        rank_M,
        num_ranks=placement.num_ranks,
        node_size=node_size,
        adapters=adapters,
        fanout=fanout,
        far=far,
    )
    assert most == pytest.approx(received.max())
    # Pairs that differ by rounding are one; of those with the same first number, the largest counts
    merged = [dict(sorted((round(busy, 9), extra) for busy, extra in pairs)) for pairs in (lines.tolist(), loads.lines)]
    assert merged[0] == pytest.approx(merged[1])
