"""Seconds of a layer's tasks, compared with hand-computed values for an invented profile."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_balance.comm.alltoall import FlatAllToAll
from megatron_balance.comm.codecs import Float8
from megatron_balance.comm.compressed import Directions, TokenExchange, token_exchange
from megatron_balance.comm.sharded import AllGather, AllReduce, DirectAllToAll, Sharding, Unsharded
from megatron_balance.cost.exchange import ExchangeModel, resized
from megatron_balance.flow.chunks.choice import TaskModel
from megatron_balance.flow.chunks.order import ChunkTimes
from megatron_balance.profile.cluster_profile import COLLECTIVES, LEVELS, ClusterProfile, CodecTimes, Fit, Throughput

GROUP = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
FORWARD = Throughput(3.0, 5.0, 0, 0)
BACKWARD = Throughput(7.0, 11.0, 0, 0)
CODEC = CodecTimes(Throughput(0.5, 2.0, 0, 0), Throughput(0.25, 1.0, 0, 0))
LINE = Fit(100.0, 1.0, 0, 0)
PROFILE = ClusterProfile(
    num_ranks=2,
    node_size=2,
    links=dict.fromkeys(COLLECTIVES, dict.fromkeys(("intra", "inter", "ep"), LINE)),
    messages=dict.fromkeys(LEVELS, Fit(90.0, 10.0, 0, 0)),
    launches={},
    forward=FORWARD,
    backward=BACKWARD,
    codecs={"fp8": CODEC},
)
HIDDEN = 8
TOKENS_DP = np.array([[6.0, 0.0, 3.0, 1.0], [0.0, 2.0, 20.0, 0.0]])
"""Rank 0 keeps 6 rows and sends 4; rank 1 sends 2 and keeps 20. The busiest rank has 22 rows at first, then 24."""


def task_model(profile: ClusterProfile, exchange: TokenExchange, sharding: Sharding) -> TaskModel:
    """Return a model whose all-to-all was not measured: a launch takes 90, a message 10, a byte 1."""
    ranks = exchange.probs.group.size()
    return TaskModel(
        profile=profile,
        exchange=exchange,
        models=[ExchangeModel.of(resized(profile, ranks, ranks), "p2p")],
        sharding=sharding,
        hosts=2,
        codec="fp8",
        hidden=HIDDEN,
        dtype=torch.float32,
    )


def model(exchange: TokenExchange) -> TaskModel:
    return task_model(PROFILE, exchange, Unsharded())


def test_times_by_hand() -> None:
    wire = FlatAllToAll(GROUP)
    forward, backward = model(TokenExchange(wire, wire, wire)).times(TOKENS_DP)
    # The busiest rank sends or receives 4 rows of 32 bytes
    exchange = 100 + 4 * 32
    assert forward == ChunkTimes(0, exchange, 0, 5 + 3 * 24, 0, exchange, 0)
    assert backward == ChunkTimes(0, exchange, 0, 11 + 7 * 24, 0, exchange, 0)


@pytest.mark.parametrize(
    ("directions", "compressed"),
    [
        ("dispatch", (True, False, False, False)),
        ("combine", (False, True, False, False)),
        ("forward", (True, True, False, False)),
        ("all", (True, True, True, True)),
    ],
)
def test_times_of_what_is_compressed(directions: Directions, compressed: tuple[bool, ...]) -> None:
    """The exchanges are dispatch, combine, and the gradients of combine and of dispatch."""
    ways = model(token_exchange(FlatAllToAll(GROUP), Float8(), directions)).times(TOKENS_DP)
    legs = [leg for way in ways for leg in ((way.c1, way.a1, way.d1), (way.c2, way.a2, way.d2))]
    plain = (0, 100 + 4 * 32, 0)
    there = (2 + 0.5 * 22, 100 + 4 * (HIDDEN + 4), 1 + 0.25 * 24)
    back = (2 + 0.5 * 24, 100 + 4 * (HIDDEN + 4), 1 + 0.25 * 22)
    expected = [coded if is_coded else plain for coded, is_coded in zip((there, back) * 2, compressed, strict=True)]
    assert legs == [pytest.approx(leg) for leg in expected]


def test_fewer_tokens_take_less_but_for_what_each_chunk_costs() -> None:
    wire = FlatAllToAll(GROUP)
    whole, half = (model(TokenExchange(wire, wire, wire)).times(TOKENS_DP / parts)[0] for parts in (1, 2))
    assert 2 * half.e == pytest.approx(whole.e + FORWARD.overhead)
    assert 2 * half.a1 == pytest.approx(whole.a1 + LINE.alpha)
    nothing = model(TokenExchange(wire, wire, wire)).times(TOKENS_DP * 0)[0]
    assert nothing == ChunkTimes(*[0.0] * 7)


def test_the_fastest_of_several_all_to_alls_counts() -> None:
    wire = FlatAllToAll(GROUP)
    one = model(TokenExchange(wire, wire, wire))
    network = one.models[0].network
    models = [ExchangeModel("default", network, Fit(alpha, beta, 0, 0)) for alpha, beta in ((100.0, 1.0), (7.0, 2.0))]
    both = replace(one, models=models)
    # Four rows of 32 bytes, and a quarter of that
    assert both.times(TOKENS_DP)[0].a1 == pytest.approx(100 + 4 * 32)
    assert both.times(TOKENS_DP / 4)[0].a1 == pytest.approx(7 + 2 * 32)


def test_shards_exchange_more() -> None:
    """There are two hosts with two shards each; every shard has three rows for each host."""
    everyone, hosts = (SimpleNamespace(size=lambda size=size: size, rank=lambda: 0) for size in (4, 2))
    tokens_SP = np.full((4, 2), 3.0)
    profile = replace(PROFILE, num_ranks=4, node_size=4)
    row = HIDDEN * 4
    wide, narrow = (TokenExchange(*[FlatAllToAll(group)] * 3) for group in (everyone, hosts))
    times = {
        name: task_model(profile, exchange, sharding).times(tokens_SP)[0]
        for name, exchange, sharding in (
            ("dumped", wide, DirectAllToAll(2)),
            ("gathered", narrow, AllGather(hosts)),
        )
    }
    # Either copies of rows go to three other ranks, or rows go to the other host and twelve are gathered
    assert times["dumped"].a1 == pytest.approx(90 + 3 * 10 + 3 * 3 * row)
    assert (times["gathered"].a1, times["gathered"].d1) == pytest.approx((100 + 3 * row, 100 + 12 * row))
    assert {one.e for one in times.values()} == {5 + 3 * 12}
    # Here a source is a whole host, with six rows for each host
    reduced = task_model(profile, narrow, AllReduce(hosts)).times(tokens_SP[:2] * 2)[0]
    assert (reduced.a1, reduced.d1, reduced.c2) == pytest.approx((100 + 6 * row, 0, 100 + 12 * row))
