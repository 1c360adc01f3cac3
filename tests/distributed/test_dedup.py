"""One copy of a token per node: results equal those of every other all-to-all, with the fewest rows between nodes."""

from functools import partial

import pytest
import torch.distributed as dist

from megatron_balance.comm.alltoall import AllToAll
from megatron_balance.comm.dedup import DedupAllToAll
from megatron_balance.job.groups import new_node_groups
from tests.distributed.layers import ACTIVATIONS, check_against_oracle, own_gradients


def dedup(node_size: int, group: dist.ProcessGroup) -> AllToAll:
    return DedupAllToAll(new_node_groups(group, dist.group.WORLD, node_size))


@pytest.mark.parametrize(
    ("world_size", "node_size", "tokens"),
    [(2, 1, "uneven"), (4, 2, "uneven"), (4, 1, "empty"), (8, 3, "uneven"), (8, 4, "empty"), (8, 8, "uneven")],
)
def test_equal_the_oracle(ranks, world_size: int, node_size: int, tokens: str) -> None:
    ranks(world_size).run(check_against_oracle, ACTIVATIONS["gelu"], tokens, own_gradients, partial(dedup, node_size))
