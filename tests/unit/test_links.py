"""All routes at once keep links as busy as one route after another."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.placement.links import find_links, link_lines
from megatron_balance.placement.placement import Placement
from tests.unit.link_loads import LinkLoads
from tests.unit.placements import CROWDED, placements
from tests.unit.slow_routes import routes


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
    loads = LinkLoads(placement.num_ranks, node_size, adapters)
    received = np.zeros(placement.num_ranks)
    for route in found:
        loads.add(route)
        for link in route:
            received[link.target] += link.time
    owner_M, expert_M, rank_M = placement.tables.guests_3M[:, data.draw(st.permutations(range(placement.added_hosts)))]
    ranks = placement.num_ranks
    links = find_links(owner_M, expert_M, rank_M, num_ranks=ranks, node_size=node_size, fanout=fanout, far=far)
    lines, most = link_lines(links, ranks, node_size, adapters)
    assert most == pytest.approx(received.max())
    # Pairs that differ by rounding are one; of those with the same first number, the largest counts
    merged = [dict(sorted((round(busy, 9), extra) for busy, extra in pairs)) for pairs in (lines.tolist(), loads.lines)]
    assert merged[0] == pytest.approx(merged[1])
