"""One copy of a token per node: results equal those of every other all-to-all, with the fewest rows between nodes."""

from functools import partial
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import AllToAll
from megatron_balance.comm.codecs import NoCodec
from megatron_balance.comm.compressed import CompressedAllToAll, TokenExchange
from megatron_balance.comm.dedup import DedupAllToAll
from megatron_balance.comm.registry import CopiesCase, load_all_to_all
from megatron_balance.cost.flex import FlexModel, Routing
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.job.groups import new_node_groups
from megatron_balance.job.layout import build_groups
from megatron_balance.profile.cluster_profile import Fit, Throughput, from_links
from tests.distributed import runs
from tests.distributed.layers import (
    ACTIVATIONS,
    HIDDEN,
    Layout,
    all_on_all,
    build_layer,
    check_against_oracle,
    host_on,
    in_chunks,
    moe_config,
    own_gradients,
    size_of,
)
from tests.distributed.runs import deviation
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
    return DedupAllToAll(new_node_groups(group, node_size))


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


def kinds_of_auto(node_size: int) -> list[str]:
    """Return what `auto` is for tokens that choose one and eight of 64 experts."""
    nodes = new_node_groups(dist.group.WORLD, node_size)
    line = Throughput(1e-7, 0.0, 0.0, 0.0)
    near = Fit(1e-6, 1e-11, 0.0, 0.0)
    far = Fit(5e-6, 1 / 20e9, 0.0, 0.0)
    profile = from_links(nodes.ep.size(), node_size, near, far, shared=far, forward=line, backward=line)
    found = []
    for topk in (1, 8):
        case = CopiesCase(FlexModel.of(profile, Routing(64, topk), "dedup"), topk * 1e6)
        options = {"nodes": lambda: nodes, "profile": lambda: profile, "copies": partial(CopiesCase, *case)}
        found.append(type(load_all_to_all("auto", nodes.ep, **options)).__name__)
    return found


def test_auto_is_dedup_where_tokens_choose_many_experts(ranks) -> None:
    for node_size, kinds in ((2, ["AutoAllToAll", "DedupAllToAll"]), (4, ["AutoAllToAll", "AutoAllToAll"])):
        assert ranks(4).run(kinds_of_auto, node_size) == [kinds] * 4


SHARDED = [(2, 2, 2), *(pytest.param(one, marks=pytest.mark.slow) for one in ((1, 2, 2), (4, 2, 2), (1, 4, 2)))]


@pytest.mark.parametrize("schedule", ["megatron", "baseline", "s1"])
@pytest.mark.parametrize("layout", SHARDED)
def test_schedules_equal_the_oracle(ranks, layout: Layout, schedule: str) -> None:
    for node_size, chunks in ((1, 1), (2, 3)):
        options = (layout, schedule, "swiglu-no-bias", False, chunks, False, None, 0.0, partial(dedup, node_size))
        ranks(size_of(layout)).run(check_schedule, *options)


def layer_of(node_size: int, exchange: TokenExchange | None = None, **changes: object) -> BalancedMoELayer:
    config = moe_config(**changes)
    groups = build_groups(config, seed=7)
    layer = build_layer(config, groups, dedup(node_size, groups.ep))
    if exchange is not None:
        layer.dispatcher.exchange = exchange
    return layer


def passes(layer: BalancedMoELayer, tokens: int = 40) -> list[torch.Tensor]:
    """Return the output of one pass, and the gradients of tokens, of the router and of experts."""
    for parameter in layer.parameters():
        parameter.grad = None
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    hidden = torch.randn(tokens, 1, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    output, _ = layer(hidden)
    (output * output.detach().cos()).sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    return [output.detach(), hidden.grad, *gradients]


def check_repeats(node_size: int) -> None:
    layer = layer_of(node_size)
    first = passes(layer)
    same_bits(first, passes(layer))
    # A codec that changes nothing moves encoded rows through the same levels and sums
    plain = layer.dispatcher.exchange.probs
    coded = CompressedAllToAll(plain, NoCodec(), gradients=True)
    layer.dispatcher.exchange = TokenExchange(coded, coded, plain)
    same_bits(first, passes(layer))


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second) >= 6
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize(("world_size", "node_size"), variants(LAYOUTS, quick=("3+1",)))
def test_repeats_to_the_bit_with_and_without_a_codec(ranks, world_size: int, node_size: int) -> None:
    ranks(world_size).run(check_repeats, node_size)


class FarMessages(NamedTuple):
    """What one rank sends to other nodes in the four exchanges of one pass."""

    rows: list[int]
    """Rows in each message of rows."""
    other_bytes: int
    """Bytes of all other messages: bitmaps of experts, combine weights and their gradients."""
    copies: int
    """Pairs of an own token and another node with some of its experts."""
    choices: int
    """Pairs of an own token and an expert on another node."""


def far_messages(node_size: int, changes: dict[str, object]) -> FarMessages:
    """Run one pass of 64 tokens per rank, whose experts are random."""
    layer = layer_of(node_size, **changes)
    experts = layer.config.num_moe_experts
    noise = torch.randn(64, 1, experts, generator=torch.Generator().manual_seed(dist.get_rank()))
    layer.router.gating = lambda tokens: noise.double()
    chosen = []
    layer.router.register_forward_hook(lambda module, inputs, output: chosen.append(output[1]))
    node_of = torch.arange(dist.get_world_size()) // node_size
    away = node_of != node_of[dist.get_rank()]
    sent = []

    def batch(operations: list[dist.P2POp]) -> list[dist.Work]:
        sends = [one for one in operations if one.op is dist.isend and dist.get_world_size(one.group) == len(node_of)]
        sent.extend(one.tensor for one in sends if away[one.peer])
        return POST(operations)

    hidden = torch.randn(64, 1, HIDDEN, dtype=torch.float64).requires_grad_()
    with mock.patch.object(dist, "batch_isend_irecv", batch):
        layer(hidden)[0].sum().backward()
    is_rows = [tensor.shape[1:] == (HIDDEN,) for tensor in sent]
    chosen_TNX = chosen[0].view(64, -1, experts // len(node_of) * node_size)
    away_TNX = chosen_TNX[:, away[::node_size]]
    return FarMessages(
        rows=[len(tensor) for tensor, rows in zip(sent, is_rows, strict=True) if rows],
        other_bytes=sum(tensor.nbytes for tensor, rows in zip(sent, is_rows, strict=True) if not rows),
        copies=int(away_TNX.any(2).sum()),
        choices=int(away_TNX.sum()),
    )


POST = dist.batch_isend_irecv

GROUPS = {"moe_router_num_groups": 8, "moe_router_group_topk": 4}


@pytest.mark.parametrize(
    ("world_size", "node_size", "experts", "groups", "fewer"),
    [
        (4, 1, 64, {}, 0.543),
        (8, 1, 256, GROUPS, 0.546),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((8, 1, 64, {}, 0.321), (8, 1, 256, {}, 0.338), (8, 2, 64, {}, 0.543), (8, 2, 256, {}, 0.548))
        ),
    ],
)
def test_rows_between_nodes_are_copies(
    ranks, world_size: int, node_size: int, experts: int, groups: dict[str, int], fewer: float
) -> None:
    """Of top-8 routing, each message between nodes has one row for each token that needs the node."""
    nodes = world_size // node_size
    routing = Routing(experts, 8, groups.get("moe_router_num_groups", 1), groups.get("moe_router_group_topk", 1))
    assert 1 - routing.copies(nodes) == pytest.approx(fewer, abs=0.001)
    changes = {"num_moe_experts": experts, "moe_router_topk": 8, **groups}
    found = ranks(world_size).run(far_messages, node_size, changes)
    copies = sum(one.copies for one in found)
    assert sum(sum(one.rows) for one in found) == 4 * copies
    assert all(len(one.rows) == 4 * (nodes - 1) for one in found), "one message per node and exchange"
    choices = sum(one.choices for one in found)
    if groups:
        # A group is chosen for its best experts, so that a token nearly always uses all of its groups
        assert routing.copies(nodes) <= copies / choices <= 0.5
    else:
        assert copies / choices == pytest.approx(routing.copies(nodes), rel=0.03)
    # A bitmap per copy, and a float64 combine weight and its gradient per choice
    assert sum(one.other_bytes for one in found) == copies * (experts // nodes // 8) + 2 * 8 * choices


EP4 = "--expert-model-parallel-size 4"
HOT = f"{EP4} --moe-router-force-workload hot_experts"

TRAININGS = {
    "exact plans": (f"{HOT} --balance-policy top2 --balance-load exact --moe-comm-chunks 2", HOT),
    "codec": (f"{EP4} --moe-comm-codec fp8 --moe-comm-codec-directions all", EP4),
    "full recomputation in chunks": (
        f"{EP4} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --moe-comm-chunks 3",
        EP4,
    ),
}
"""Flags with dedup, and those of the run with the default all-to-all that it must follow; test_layouts.py trains dedup
with each other feature."""


@pytest.mark.parametrize("name", variants({name: (name,) for name in TRAININGS}, quick=("exact plans", "codec")))
def test_training_follows_the_default(ranks, curve_of, tmp_path, length, name: str) -> None:
    flags, plain = TRAININGS[name]
    iterations = length(3)
    balanced = "--balance-policy" in flags
    if balanced:
        runs.fast_links(4, 2).save(tmp_path / "profile.json")
        flags += f" --balance-profile {tmp_path / 'profile.json'}"
    flags += " --moe-comm-alltoall dedup --moe-comm-node-size 2"
    (curve, hosts), *others = ranks(4).run(runs.train_hosts, flags, iterations)
    assert all(other[0] == curve for other in others)
    assert (sum(hosts) > 0) == balanced
    assert deviation(curve, curve_of(plain, iterations)) <= (2e-2 if name == "codec" else 1e-5)
