"""Which expert-parallel ranks share a node, from the layout alone."""

import pytest

from megatron_balance.job.groups import Topology, expert_node_size


@pytest.mark.parametrize(
    ("world_size", "node_size", "expert_parallel", "expert_tensor", "expected"),
    [
        (8, 8, 4, 1, 4),
        (8, 4, 8, 1, 4),
        (8, 2, 4, 1, 2),
        (8, 1, 4, 1, 1),
        (16, 8, 8, 2, 4),
        (8, 1, 4, 2, 1),
        # One group: its last node may be smaller
        (8, 3, 8, 1, 3),
    ],
)
def test_expert_parallel_ranks_per_node(
    world_size: int, node_size: int, expert_parallel: int, expert_tensor: int, expected: int
) -> None:
    assert expert_node_size(Topology(world_size, node_size), expert_parallel, expert_tensor) == expected


@pytest.mark.parametrize(("node_size", "group"), [(3, r"\[4, 5, 6, 7\]"), (6, r"\[4, 5, 6, 7\]")])
def test_nodes_that_cut_groups_unevenly_are_refused(node_size: int, group: str) -> None:
    with pytest.raises(ValueError, match=rf"--moe-comm-node-size {node_size} .*{group}.*multiple or a divisor of 4"):
        expert_node_size(Topology(8, node_size), 4, 1)
