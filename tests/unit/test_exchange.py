"""Seconds of all-to-alls: stages that carry what is to be carried, measured lines, and predictions by hand."""

import dataclasses
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.comm.registry import ALL_TO_ALLS
from megatron_balance.cost.exchange import DEFAULT, ExchangeModel, resized, stages
from megatron_balance.cost.network import Network
from megatron_balance.profile.cluster_profile import ClusterProfile, Fit, builtin, from_links

NAMES = ("flat", "p2p", "pipe", "2dh", "1dh")
SPEED = builtin(2, 2, 64, 64).forward

matrices = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32)).map(
    lambda drawn: (np.random.default_rng(drawn[2]).integers(0, 9, [drawn[0] * drawn[1]] * 2), drawn[1])
)
"""Bytes between all ranks, and the number of ranks per node."""


@given(matrices)
def test_stages_carry_what_is_to_be_carried(matrix: tuple[np.ndarray, int]) -> None:
    bytes_DD, size = matrix
    node = np.arange(len(bytes_DD)) // size
    crossing = np.where(node[:, None] != node, bytes_DD, 0)
    traveling = bytes_DD - np.diag(bytes_DD.diagonal())
    for name in (DEFAULT, *ALL_TO_ALLS):
        found = stages(name, bytes_DD, size)
        assert all(not stage.diagonal().any() for stage in found)
        between = sum(np.where(node[:, None] != node, stage, 0) for stage in found)
        # Between two nodes, only bytes from one node's ranks to the other's ranks travel
        assert np.array_equal(_by_node(between, size), _by_node(crossing, size)), name
    for name in (DEFAULT, "flat", "pipe"):
        assert np.array_equal(sum(stages(name, bytes_DD, size)), traveling)


def _by_node(matrix: np.ndarray, size: int) -> np.ndarray:
    nodes = len(matrix) // size
    return matrix.reshape(nodes, size, nodes, size).sum((1, 3))


def cluster(num_ranks: int, node_size: int, shared: float = 10.0) -> ClusterProfile:
    """Return a cluster whose messages take 100 + b within nodes and 1000 + 10 b between them, alone in their node."""
    near = Fit(100.0, 1.0, 0, 0)
    far = Fit(1000.0, 10.0, 0, 0)
    lines = {"forward": SPEED, "backward": SPEED, "shared": Fit(1000.0, shared, 0, 0)}
    return from_links(num_ranks, node_size, near, far, **lines)


EVEN = np.full((4, 4), 6.0)
"""Two nodes of two ranks; each rank has 6 bytes for each rank."""


def predict(names: Iterable[str], bytes_DD: np.ndarray, profile: ClusterProfile) -> dict[str, float]:
    return {name: ExchangeModel.of(profile, name).seconds(bytes_DD) for name in names}


@pytest.mark.parametrize(("shared", "times"), [(10.0, 1), (20.0, 2)])
def test_predictions_by_hand(shared: float, times: int) -> None:
    """Each rank has its adapter, or both ranks of a node share one. A further message adds a tenth of a first one."""
    near = 90 + 10 + 6
    far = 900 + 2 * 100 + times * 10 * 12
    expected = {
        "flat": near + far,
        "p2p": 10 + far,
        "pipe": 10 + far,
        # 12 bytes to the neighbor: 6 for itself and 6 for its counterpart. Then 6 + 6 to the other node
        "2dh": (100 + 12) + (1000 + times * 10 * 12),
        # 24 bytes to the leader, 24 between leaders, which share no adapter, and 24 back
        "1dh": (100 + 24) + (1000 + 10 * 24) + (100 + 24),
    }
    assert predict(NAMES, EVEN, cluster(4, 2, shared)) == pytest.approx(expected)


@pytest.mark.parametrize("num_ranks", [64, 256])
@pytest.mark.parametrize("name", [DEFAULT, "2dh"])
def test_an_even_exchange_takes_what_its_line_says(num_ranks: int, name: str) -> None:
    line = Fit(47e-6, 3.1e-11, 0, 0)
    profile = builtin(num_ranks, 8, 64, 64)
    links = {**profile.links, "all_to_all": {**profile.links["all_to_all"], "ep": line}}
    profile = dataclasses.replace(profile, links=links, all_to_alls={"2dh": line})
    model = ExchangeModel.of(profile, name)
    for total in (1, 2**20, 2**30):
        bytes_DD = np.full((num_ranks, num_ranks), total / (num_ranks - 1))
        assert model.seconds(bytes_DD) == pytest.approx(line.seconds(total), rel=1e-12)
    assert model.latency == line.alpha


def test_an_uneven_exchange_within_nodes_is_cheaper_and_across_them_dearer() -> None:
    """A measured line is scaled by what the busiest resource carries."""
    profile = cluster(8, 4, shared=40.0)
    model = ExchangeModel.of(profile)
    node = np.arange(8) // 4
    same = node[:, None] == node
    even = np.ones((8, 8))
    within = same * 7 / 3
    across = ~same * 7 / 4
    line = profile.link("all_to_all")
    assert model.seconds(even * 100) == pytest.approx(line.seconds(700))
    # Four ranks of a node share an adapter: 4 * 4/7 of a rank's 700 bytes at 10 seconds each
    assert line.beta * 700 == pytest.approx(10 * 4 * 400)
    assert model.seconds(within * 100) == pytest.approx(line.alpha + 700)
    assert model.seconds(across * 100) == pytest.approx(line.alpha + 10 * 4 * 700)


def test_rows_that_stay_take_no_time() -> None:
    # With 1dh, they pass through the leader
    for name in (DEFAULT, *NAMES[:-1]):
        assert ExchangeModel.of(cluster(4, 2), name).seconds(np.diag([5.0] * 4)) == 0.0


def test_the_choice_follows_the_size() -> None:
    """Long messages favor few bytes within nodes; short ones favor few messages between nodes."""
    profile = cluster(8, 4)
    seconds = [predict(("pipe", "2dh"), np.full((8, 8), size), profile) for size in (1e-3, 1e6)]
    assert [min(found, key=found.__getitem__) for found in seconds] == ["2dh", "pipe"]


@given(matrices)
def test_predictions_are_sane(matrix: tuple[np.ndarray, int]) -> None:
    bytes_DD, size = matrix
    profile = cluster(len(bytes_DD), size)
    seconds = predict(NAMES, bytes_DD, profile)
    assert seconds["pipe"] <= seconds["flat"] + 1e-9
    assert all(more >= seconds[name] for name, more in predict(NAMES, bytes_DD * 2, profile).items())
    # Times do not depend on the direction
    assert predict(("flat", "pipe"), bytes_DD.T, profile) == pytest.approx(
        {name: seconds[name] for name in ("flat", "pipe")}
    )


def test_another_number_of_ranks_has_another_all_to_all() -> None:
    measured = Fit(7.0, 1e-3, 0, 0)
    profile = cluster(4, 2)
    links = {**profile.links, "all_to_all": {**profile.links["all_to_all"], "ep": measured}}
    profile = dataclasses.replace(profile, links=links, all_to_alls={"pipe": measured}, rates=(1.0, 1.0, 0.5, 1.5))
    assert resized(profile, 4, 2) is profile
    wider = resized(profile, 8, 4)
    assert (wider.num_ranks, wider.node_size, wider.all_to_alls, wider.rates) == (8, 4, {}, ())
    even = np.full((8, 8), 5.0)
    unmeasured = ExchangeModel(DEFAULT, Network.of(wider), None)
    assert ExchangeModel.of(wider).seconds(even) == pytest.approx(unmeasured.seconds(even))
