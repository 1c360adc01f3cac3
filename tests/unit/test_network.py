"""What batches of messages take on nodes with shared adapters: by hand, and against a loop over ranks and nodes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.network import Level, Network
from megatron_balance.profile.cluster import Ranks, profile_of, read
from megatron_balance.profile.cluster_profile import Fit, builtin
from tests.unit.test_clusters import FILES

NEAR = Level(launch=100.0, message=10.0, beta=1.0)
FAR = Level(launch=1000.0, message=50.0, beta=4.0)
NEAR_TURNS, FAR_TURNS = NEAR._replace(one_way=0.5), FAR._replace(one_way=0.75)
"""The directions of links inside nodes take turns, and those of links between nodes slow each other down."""


def network(num_ranks: int, node_size: int, adapters: float, turns: bool = False) -> Network:
    return Network(num_ranks, node_size, *((NEAR_TURNS, FAR_TURNS) if turns else (NEAR, FAR)), adapters)


def sent(num_ranks: int, *messages: tuple[int, int, float]) -> np.ndarray:
    """Return [D, D] bytes with the given (source, target, bytes)."""
    bytes_DD = np.zeros((num_ranks, num_ranks))
    for source, target, amount in messages:
        bytes_DD[source, target] += amount
    return bytes_DD


@pytest.mark.parametrize(
    ("adapters", "messages", "expected"),
    [
        pytest.param(2, [(0, 1, 7)], 100 + 10 + 7, id="near"),
        pytest.param(2, [(0, 2, 7)], 1000 + 50 + 4 * 7, id="far"),
        # Sent and received at the same time
        pytest.param(2, [(0, 1, 7), (1, 0, 5)], 100 + 10 + 7, id="both-ways"),
        # A rank's own two messages share its link; two messages, one launch
        pytest.param(2, [(0, 1, 7), (0, 1, 5)], 100 + 10 + 12, id="sum"),
        pytest.param(2, [(0, 2, 7), (0, 3, 5)], 1000 + 2 * 50 + 4 * 12, id="rank"),
        # Two ranks of a node have an adapter each, or share one
        pytest.param(2, [(0, 2, 7), (1, 3, 5)], 1000 + 50 + 4 * 7, id="adapter-each"),
        pytest.param(1, [(0, 2, 7), (1, 3, 5)], 1000 + 50 + 4 * 12, id="one-adapter"),
        pytest.param(1.5, [(0, 2, 7), (1, 3, 5)], 1000 + 50 + 4 * 12 / 1.5, id="one-and-a-half"),
        # The receiving node's adapter is the busiest
        pytest.param(1, [(0, 2, 7), (1, 3, 5), (4, 2, 6)], 1000 + 2 * 50 + 4 * 18, id="receivers"),
        # Messages of both levels travel at the same time, but one host launches them
        pytest.param(2, [(0, 1, 100), (0, 2, 7)], 1000 + 10 + 50 + 100, id="levels"),
        # The last node has one rank
        pytest.param(1, [(0, 4, 7), (1, 4, 5)], 1000 + 2 * 50 + 4 * 12, id="ragged"),
        pytest.param(2, [(0, 0, 7)], 0, id="nothing-travels"),
    ],
)
def test_batches_by_hand(adapters: float, messages: list[tuple[int, int, float]], expected: float) -> None:
    assert network(5, 2, adapters).batch_seconds(sent(5, *messages)) == pytest.approx(expected)


def test_directions_that_slow_each_other_down() -> None:
    net = network(5, 2, 1, turns=True)
    # Half of the time alone; as long as 7 both ways at the same time
    assert net.batch_seconds(sent(5, (0, 1, 7))) == pytest.approx(110 + 7 / 2)
    assert net.batch_seconds(sent(5, (0, 1, 7), (1, 0, 7))) == pytest.approx(110 + 7)
    assert net.batch_seconds(sent(5, (0, 1, 7), (1, 0, 3))) == pytest.approx(110 + 3 + 4 / 2)
    # Two ranks share an adapter: twelve bytes leave, of which five meet those that come
    far = 4 * (5 + 0.75 * 7)
    assert net.batch_seconds(sent(5, (0, 2, 7), (1, 3, 5), (2, 1, 5))) == pytest.approx(1050 + far)


def test_ranks_that_take_turns() -> None:
    net = network(8, 4, 1, turns=True)
    assert net.batch_seconds(sent(8, (0, 1, 8), (1, 0, 8), (2, 3, 4), (3, 2, 4))) == pytest.approx(110 + (8 + 4) / 2)
    # At least half of the busiest rank's time
    assert net.batch_seconds(sent(8, (0, 1, 8), (1, 0, 8))) == pytest.approx(110 + 8 / 2)
    # The other node has as much in all, and its ranks have the same
    even = [(i, j, 4) for i, j in ((4, 5), (5, 4), (6, 7), (7, 6))]
    assert net.batch_seconds(sent(8, (0, 1, 8), (1, 0, 8), *even)) == pytest.approx(110 + 4)
    # When the others are done after 4, the first rank has as much left, for which it has twice the rate
    uneven = [(0, 1, 4), (0, 2, 4), (1, 0, 4), (2, 0, 4)]
    assert net.byte_seconds(net.crossing(sent(8, *uneven))) == pytest.approx(4 * 3 / 4 + 4 / 2)
    alone = network(8, 4, 1)
    assert alone.batch_seconds(sent(8, (0, 1, 8), (1, 0, 8), (2, 3, 4), (3, 2, 4))) == pytest.approx(110 + 8)


def shared(work: list[float], size: int, one_way: float) -> float:
    """Return when the last rank is done, by letting all ranks work at the same rate until the next one is done."""
    if one_way == 1:
        return max(work)
    left = [one for one in work if one > 0]
    seconds = 0.0
    while left:
        step = min(left)
        rate = min(size / len(left), 1 / one_way)
        seconds += step / rate
        left = [one - step for one in left if one > step]
    return seconds


def by_loop(net: Network, bytes_DD: np.ndarray) -> float:
    """Return what `byte_seconds` does, one resource at a time."""
    ranks = range(net.num_ranks)
    seconds = [0.0]

    def on(link: Level, amounts: list[float]) -> float:
        low, high = sorted(amounts)
        return link.beta * (low + link.one_way * (high - low))

    def node(rank: int) -> int:
        return rank // net.node_size

    pairs = [(i, j, bytes_DD[i, j]) for i in ranks for j in ranks if i != j]
    near = [pair for pair in pairs if node(pair[0]) == node(pair[1])]
    far = [pair for pair in pairs if node(pair[0]) != node(pair[1])]
    busy = [on(net.near, [sum(p[2] for p in near if p[end] == rank) for end in (0, 1)]) for rank in ranks]
    seconds += [on(net.far, [sum(p[2] for p in far if p[end] == rank) for end in (0, 1)]) for rank in ranks]
    for number in {*map(node, ranks)}:
        members = [busy[rank] for rank in ranks if node(rank) == number]
        seconds.append(shared(members, net.node_size, net.near.one_way))
        seconds.append(on(net.far, [sum(p[2] for p in far if node(p[end]) == number) for end in (0, 1)]) / net.adapters)
    return max(seconds)


@given(st.integers(1, 9), st.data())
def test_the_busiest_resource_is_that_of_a_loop_over_all_of_them(num_ranks: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, num_ranks))
    net = network(num_ranks, size, data.draw(st.floats(1, size)), data.draw(st.booleans()))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    batches_BDD = rng.integers(0, 9, (2, num_ranks, num_ranks)) * (rng.random((2, num_ranks, num_ranks)) < 0.4)
    found = net.byte_seconds(net.crossing(batches_BDD.astype(float)))
    assert found == pytest.approx([by_loop(net, bytes_DD) for bytes_DD in batches_BDD])
    doubled = net.byte_seconds(net.crossing(batches_BDD.astype(float)).scaled(2))
    assert doubled == pytest.approx(2 * found)


def test_a_profile_tells_how_many_ranks_an_adapter_carries() -> None:
    assert Network.of(builtin(8, 4, 64, 64)).adapters == 4
    # Four GPUs share one adapter
    shared = profile_of(read(FILES["schemoe"]), Ranks(32, 4, 4), 64, 64)
    assert Network.of(shared).adapters == pytest.approx(1)
    # Eight GPUs have eight adapters
    assert Network.of(profile_of(read(FILES["h100"]), Ranks(16, 8, 8), 64, 64)).adapters == pytest.approx(8)
    # Noise may make sharing look faster, or slower than taking turns
    for beta, expected in ((0.1, 4), (100.0, 1)):
        base = builtin(8, 4, 64, 64)
        alone = base.link("p2p", "inter").beta
        links = {**base.links, "p2p": {**base.links["p2p"], "ep": Fit(0.0, beta * alone, 0.0, 0.0)}}
        assert Network.of(dataclasses.replace(base, links=links)).adapters == expected


@pytest.mark.parametrize(("share", "expected"), [(0.95, 1.0), (1.3, 1.0), (0.7, 0.7), (0.2, 0.5)])
def test_a_profile_tells_whether_directions_are_independent(share: float, expected: float) -> None:
    base = builtin(8, 4, 64, 64)
    assert Network.of(base).near.one_way == Network.of(base).far.one_way == 1
    faster = {kind: line._replace(beta=share * line.beta) for kind, line in base.links["p2p"].items()}
    net = Network.of(dataclasses.replace(base, links={**base.links, "one_way": faster}))
    assert (net.near.one_way, net.far.one_way) == pytest.approx((expected, expected))


def test_a_lone_message_takes_what_the_profile_says() -> None:
    profile = builtin(8, 4, 64, 64)
    for target, level in ((1, "intra"), (4, "inter")):
        expected = profile.link("p2p", level).seconds(1000)
        assert Network.of(profile).batch_seconds(sent(8, (0, target, 1000))) == pytest.approx(expected)
