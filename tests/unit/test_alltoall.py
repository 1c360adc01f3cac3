"""All-to-alls without processes: orders, packing, the choice among them, names and flags."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cli.arguments import parse_args
from megatron_balance.comm.auto import node_share, predict, stages
from megatron_balance.comm.hierarchical import transposed
from megatron_balance.comm.pipelined import PipelinedAllToAll, peers_in_order
from megatron_balance.comm.registry import ALL_TO_ALLS, find_all_to_all
from megatron_balance.profile.cluster_profile import COLLECTIVES, ClusterProfile, Fit, Throughput
from tests.unit.commands import CPU, GPU, argv, layout_on

layouts = st.tuples(st.integers(1, 5), st.integers(1, 5))
"""Numbers of nodes and of ranks per node."""


@given(layouts)
def test_every_step_of_pipe_uses_every_rank_and_link_once(layout: tuple[int, int]) -> None:
    nodes, size = layout
    ranks = range(nodes * size)
    orders = [peers_in_order(rank, len(ranks), size) for rank in ranks]
    for rank, (near, far) in enumerate(orders):
        assert sorted([rank, *near, *far]) == [*ranks]
        assert {peer // size for peer in near} <= {rank // size}
    for level in (0, 1):
        for targets in zip(*(order[level] for order in orders), strict=True):
            assert sorted(targets) == [*ranks]
            links = {(rank // size, target // size) for rank, target in enumerate(targets)}
            assert len(links) == len({source for source, _ in links}) == len({target for _, target in links}) == nodes


@given(st.integers(1, 24), st.integers(1, 24))
def test_pipe_reaches_everyone_from_nodes_of_any_size(num_ranks: int, node_size: int) -> None:
    for rank in range(num_ranks):
        near, far = peers_in_order(rank, num_ranks, node_size)
        assert sorted([rank, *near, *far]) == [*range(num_ranks)]
        assert {peer // node_size == rank // node_size for peer in near} <= {True}
        assert {peer // node_size == rank // node_size for peer in far} <= {False}


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_transposed(first: int, second: int, data: st.DataObject) -> None:
    sizes_AB = torch.tensor([[data.draw(st.integers(0, 3)) for _ in range(second)] for _ in range(first)])
    names = [(a, b) for a in range(first) for b in range(second) for _ in range(sizes_AB[a, b])]
    rows = torch.tensor(names, dtype=torch.int64).view(-1, 2)
    expected = sorted(names, key=lambda pair: pair[::-1])
    assert [tuple(row) for row in transposed(rows, sizes_AB).tolist()] == expected


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
    for name in ALL_TO_ALLS:
        found = stages(name, bytes_DD, size)
        assert all(not stage.diagonal().any() for stage in found)
        between = sum(np.where(node[:, None] != node, stage, 0) for stage in found)
        # Between two nodes, only bytes from one node's ranks to the other's ranks travel
        assert np.array_equal(_by_node(between, size), _by_node(crossing, size)), name
    assert np.array_equal(sum(stages("flat", bytes_DD, size)), traveling)
    assert np.array_equal(sum(stages("pipe", bytes_DD, size)), traveling)


def _by_node(matrix: np.ndarray, size: int) -> np.ndarray:
    nodes = len(matrix) // size
    return matrix.reshape(nodes, size, nodes, size).sum((1, 3))


def profile(near: tuple[float, float], far: tuple[float, float], together: float, size: int = 2) -> ClusterProfile:
    """Return a profile of two nodes: (alpha, beta) inside and between them, and beta of an all-to-all of all ranks."""
    lines = {"intra": Fit(*near, 0, 0), "inter": Fit(*far, 0, 0), "ep": Fit(0, together, 0, 0)}
    speed = Throughput(1, 0, 0, 0)
    links = dict.fromkeys(COLLECTIVES, lines)
    return ClusterProfile(num_ranks=2 * size, node_size=size, links=links, forward=speed, backward=speed)


EVEN = np.full((4, 4), 6)
"""Two nodes of two ranks; each rank has 6 bytes for each rank."""

NAMES = ("flat", "p2p", "pipe", "2dh", "1dh")


def test_predictions_by_hand() -> None:
    # With a link per rank, 1/3 of an all-to-all's bytes travel at beta 1 and 2/3 at beta 10
    cluster = profile((100, 1), (1000, 10), 1 / 3 + 20 / 3)
    assert node_share(cluster) == pytest.approx(0.5)
    near, far = 100 + 6, 2 * 1000 + 10 * 12
    expected = {
        "flat": near + far,
        "p2p": max(near, far),
        "pipe": max(near, far),
        # 12 bytes to the neighbor: 6 for itself and 6 for its counterpart. Then 6 + 6 to the other node
        "2dh": (100 + 12) + (1000 + 10 * 12),
        # 24 bytes to the leader, 24 between leaders, 24 back
        "1dh": (100 + 24) + (1000 + 10 * 24) + (100 + 24),
    }
    assert predict(NAMES, EVEN, cluster) == pytest.approx(expected)


def test_predictions_by_hand_where_ranks_share_a_link() -> None:
    cluster = profile((0, 0), (1000, 10), 40 / 3)
    assert node_share(cluster) == pytest.approx(1.0)
    expected = {"flat": 2240, "p2p": 2240, "pipe": 2240, "2dh": 1240, "1dh": 1240}
    assert predict(NAMES, EVEN, cluster) == pytest.approx(expected)


@pytest.mark.parametrize(("together", "share"), [(0.0, 0.5), (1e9, 1.0), (10.0, 0.75 * 29 / 30)])
def test_the_share_of_a_link_is_between_a_link_per_rank_and_one_link(together: float, share: float) -> None:
    assert node_share(profile((0, 1), (0, 10), together)) == pytest.approx(share)


def test_the_choice_follows_the_size() -> None:
    """Long messages favor overlapping levels of equal cost; short ones favor fewer messages between nodes."""
    cluster = profile((1e-6, 1e-9), (1e-3, 1e-9), 1e-9, size=4)
    chosen = []
    for row_bytes in (1, 10**9):
        seconds = predict(("flat", "pipe", "2dh", "1dh"), np.full((8, 8), row_bytes), cluster)
        chosen.append(min(seconds, key=seconds.__getitem__))
    assert chosen == ["2dh", "pipe"]
    for single in (dataclasses.replace(cluster, node_size=8), dataclasses.replace(cluster, node_size=1)):
        seconds = predict(("flat", "pipe", "2dh"), np.full((8, 8), 1000), single)
        assert min(seconds, key=seconds.__getitem__) == "flat"


@given(matrices)
def test_predictions_are_sane(matrix: tuple[np.ndarray, int]) -> None:
    bytes_DD, size = matrix
    cluster = dataclasses.replace(profile((1, 1), (3, 2), 2, size), num_ranks=len(bytes_DD))
    seconds = predict(NAMES, bytes_DD, cluster)
    assert seconds["pipe"] <= seconds["flat"] <= 2 * seconds["pipe"]
    assert all(more >= seconds[name] for name, more in predict(NAMES, bytes_DD * 2, cluster).items())
    # Times do not depend on the direction
    assert predict(("flat", "pipe"), bytes_DD.T, cluster) == {name: seconds[name] for name in ("flat", "pipe")}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ring", "choose from default, flat, p2p, 1dh, 2dh, pipe, auto"),
        ("no.such.module:Ring", "cannot be imported"),
        ("megatron_balance.comm.pipelined:Ring", "cannot be imported"),
        (":Ring", "cannot be imported"),
        ("math:pi", "not a subclass"),
        ("megatron_balance.flow.plan:DispatchPlan", "not a subclass"),
    ],
)
def test_unknown_names(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^--moe-comm-alltoall {name}: .*{said}"):
        find_all_to_all(name)
    with pytest.raises(ValueError, match=rf"^--moe-comm-alltoall {name}: .*{said}"):
        parse_args(argv(f"--moe-comm-alltoall {name}"), CPU)


def test_names() -> None:
    assert (
        find_all_to_all("megatron_balance.comm.pipelined:PipelinedAllToAll") is PipelinedAllToAll is ALL_TO_ALLS["pipe"]
    )
    assert len(set(ALL_TO_ALLS.values())) == len(ALL_TO_ALLS)


EP8 = "--expert-model-parallel-size 8"


@pytest.mark.parametrize(
    ("flags", "dispatcher", "noticed"),
    [
        (EP8, "allgather", None),
        (f"{EP8} --moe-comm-alltoall default", "allgather", None),
        (f"{EP8} --moe-comm-alltoall pipe", "alltoall", "pipe: --moe-token-dispatcher-type alltoall"),
        (f"{EP8} --moe-comm-alltoall pipe --moe-token-dispatcher-type alltoall", "alltoall", None),
        (f"{EP8} --moe-comm-alltoall auto --balance-profile builtin", "alltoall", "auto: --moe-token"),
        ("--moe-comm-alltoall 2dh --moe-token-dispatcher-type alltoall", "alltoall", "2dh has no effect with --expert"),
        (f"{EP8} --moe-comm-codec fp8", "alltoall", "fp8: --moe-token-dispatcher-type alltoall"),
        (f"{EP8} --moe-comm-codec zfp --moe-comm-codec-directions dispatch", "alltoall", "zfp: --moe-token"),
        (f"{EP8} --moe-comm-alltoall 1dh --moe-comm-codec bf16", "alltoall", "1dh --moe-comm-codec bf16: --moe-token"),
        (f"{EP8} --moe-comm-codec none", "allgather", None),
    ],
)
def test_the_dispatcher_that_an_all_to_all_implies(flags: str, dispatcher: str, noticed: str | None) -> None:
    config, notices, _ = parse_args(argv(flags), CPU)
    assert config.transformer.moe_token_dispatcher_type == dispatcher
    found = [notice for notice in notices if "--moe-comm" in notice]
    assert [noticed in notice for notice in found] == ([] if noticed is None else [True])


@pytest.mark.parametrize(
    ("flags", "said"),
    itertools.chain(
        (
            (f"--moe-comm-alltoall {name} --moe-token-dispatcher-type allgather", "dispatcher-type allgather: not with")
            for name in ("flat", "pipe")
        ),
        [
            ("--moe-comm-alltoall pipe --moe-layer-impl megatron", "pipe: needs --moe-layer-impl balanced"),
            ("--moe-comm-alltoall pipe --balance-profile builtin", "--balance-profile: has no effect"),
            ("--moe-comm-codec fp8 --moe-layer-impl megatron", "codec fp8: needs --moe-layer-impl balanced"),
            (
                "--moe-comm-codec int8 --moe-token-dispatcher-type allgather",
                "allgather: not with --moe-comm-codec",
            ),
            ("--moe-comm-codec gzip", "--moe-comm-codec gzip: choose from none, bf16"),
            ("--moe-comm-codec bf16 --bf16", "--moe-comm-codec bf16: saves nothing, .* --bf16; use fp8"),
            ("--moe-comm-codec fp16 --bf16", "--moe-comm-codec fp16: saves nothing, .* --bf16; use fp8"),
            (
                "--moe-comm-codec-directions all",
                "codec-directions: has no effect with --moe-comm-codec none",
            ),
        ],
    ),
)
def test_contradictions(flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_args(argv(f"{EP8} {flags}"), CPU)


@pytest.mark.parametrize("name", ALL_TO_ALLS)
def test_gloo_sends_no_messages_from_gpus(name: str) -> None:
    flags = f"{EP8} --distributed-backend gloo --transformer-impl local --moe-comm-alltoall {name}"
    if name == "flat":
        assert layout_on(GPU, flags)[0].moe_token_dispatcher_type == "alltoall"
        return
    with pytest.raises(ValueError, match=rf"--moe-comm-alltoall {name}: .*use --distributed-backend nccl"):
        layout_on(GPU, flags)


def test_zfp_needs_the_cpu() -> None:
    with pytest.raises(ValueError, match=r"--moe-comm-codec zfp: .*use fp8 or int8"):
        layout_on(GPU, f"{EP8} --moe-comm-codec zfp")
