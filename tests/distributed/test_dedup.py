"""One copy of a token per node: results equal those of every other all-to-all, with the fewest rows between nodes."""

from functools import partial

import pytest
import torch.distributed as dist

from megatron_balance.comm.alltoall import AllToAll
from megatron_balance.comm.dedup import DedupAllToAll
from megatron_balance.job.groups import new_node_groups
from tests.distributed.layers import (
    ACTIVATIONS,
    Layout,
    all_on_all,
    check_against_oracle,
    host_on,
    in_chunks,
    own_gradients,
    size_of,
)
from tests.distributed.test_parallel_schedule import check_schedule
from tests.variants import variants

LAYOUTS = {
    "2x1": (2, 1),
    "2x2": (4, 2),
    "4x1": (4, 1),
    "2x4": (8, 4),
    "4x2": (8, 2),
    "1x8": (8, 8),
    "3+3+2": (8, 3),
    "3+1": (4, 3),
    "7+1": (8, 7),
}
"""Nodes -> ranks, ranks per node."""


def dedup(node_size: int, group: dist.ProcessGroup) -> AllToAll:
    return DedupAllToAll(new_node_groups(group, dist.group.WORLD, node_size))


@pytest.mark.parametrize("tokens", ["uneven", "empty"])
@pytest.mark.parametrize(("world_size", "node_size"), variants(LAYOUTS, quick=("2x1", "2x2", "3+3+2")))
def test_layers_equal_the_oracle(ranks, world_size: int, node_size: int, tokens: str) -> None:
    ranks(world_size).run(check_against_oracle, ACTIVATIONS["gelu"], tokens, own_gradients, partial(dedup, node_size))


@pytest.mark.parametrize(("world_size", "node_size"), variants(LAYOUTS, quick=("2x2",)))
def test_chunks_equal_the_oracle(ranks, world_size: int, node_size: int) -> None:
    for chunks, activation, tokens in ((2, "gelu", "uneven"), (5, "swiglu-no-bias", "empty")):
        host = partial(in_chunks, chunks, world_size, own_gradients)
        ranks(world_size).run(check_against_oracle, ACTIVATIONS[activation], tokens, host, partial(dedup, node_size))


@pytest.mark.parametrize("split", ["local_first", "proportional"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_experts_with_many_hosts_equal_the_oracle(ranks, split: str, chunks: int) -> None:
    host = partial(in_chunks, chunks, 7, partial(host_on, str(all_on_all(4)), split, ""))
    ranks(4).run(check_against_oracle, ACTIVATIONS["gelu"], "uneven", host, partial(dedup, 2))


SHARDED = [(2, 2, 2), *(pytest.param(one, marks=pytest.mark.slow) for one in ((1, 2, 2), (4, 2, 2), (1, 4, 2)))]


@pytest.mark.parametrize("schedule", ["megatron", "baseline", "s1"])
@pytest.mark.parametrize("layout", SHARDED)
def test_schedules_equal_the_oracle(ranks, layout: Layout, schedule: str) -> None:
    for node_size, chunks in ((1, 1), (2, 3)):
        options = (layout, schedule, "swiglu-no-bias", False, chunks, False, None, 0.0, partial(dedup, node_size))
        ranks(size_of(layout)).run(check_schedule, *options)
