"""All-to-alls without processes: orders, packing, the choice among them, names and flags."""

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cli.arguments import parse_args
from megatron_balance.comm.pipelined import PipelinedAllToAll, peers_in_order
from megatron_balance.comm.registry import ALL_TO_ALLS, TURNS, Chooser, find_all_to_all
from tests.unit.commands import CPU, GPU, argv, checked_on


@given(st.integers(1, 5), st.integers(1, 5))
def test_every_step_of_pipe_uses_every_rank_and_link_once(nodes: int, size: int) -> None:
    ranks = range(nodes * size)
    orders = [peers_in_order(rank, len(ranks), size) for rank in ranks]
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


class Counting:
    """Stands in for a model: it counts the predictions and takes the seconds of a formula."""

    def __init__(self, name: str, seconds: Callable[[float], float]) -> None:
        self.name = name
        self.formula = seconds
        self.asked = 0

    def seconds(self, bytes_DD: np.ndarray) -> float:
        self.asked += 1
        return self.formula(bytes_DD.sum())


def choosing(seconds: Mapping[str, Callable[[float], float]]) -> Chooser:
    """Return a chooser among names that take these seconds."""
    return Chooser([Counting(*pair) for pair in seconds.items()])


def exchanged(chooser: Chooser, rows: int) -> str:
    """Return the choice for `rows` rows of four bytes."""
    return chooser.choose(torch.tensor([[0, rows], [0, 0]]), 4)


def test_a_choice_holds_for_exchanges_of_similar_size() -> None:
    chooser = choosing({"default": lambda total: 1.0 + total, "pipe": lambda total: 100.0 + total / 2})
    assert [exchanged(chooser, rows) for rows in (16, 17, 31)] == ["default"] * 3
    assert [model.asked for model in chooser.models] == [1, 1]
    assert [exchanged(chooser, rows) for rows in (128, 130, 16)] == ["pipe", "pipe", "default"]
    assert [model.asked for model in chooser.models] == [2, 2]
    for _ in range(TURNS - 2):
        exchanged(chooser, 130)
    assert [model.asked for model in chooser.models] == [2, 2]
    exchanged(chooser, 130)
    assert [model.asked for model in chooser.models] == [3, 3]


@pytest.mark.parametrize(("seconds", "chosen"), [(1.0, "default"), (0.96, "default"), (0.9, "pipe")])
def test_the_first_one_wins_where_predictions_hardly_differ(seconds: float, chosen: str) -> None:
    assert exchanged(choosing({"default": lambda _: 1.0, "pipe": lambda _: seconds}), 5) == chosen


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ring", "choose from default, flat, p2p, 1dh, 2dh, pipe, dedup, auto"),
        ("megatron_balance.comm.pipelined:Ring", "cannot be imported"),
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
        assert checked_on(GPU, flags).moe_token_dispatcher_type == "alltoall"
        return
    with pytest.raises(ValueError, match=rf"--moe-comm-alltoall {name}: .*use --distributed-backend nccl"):
        checked_on(GPU, flags)


def test_zfp_needs_the_cpu() -> None:
    with pytest.raises(ValueError, match=r"--moe-comm-codec zfp: .*use fp8 or int8"):
        checked_on(GPU, f"{EP8} --moe-comm-codec zfp")
