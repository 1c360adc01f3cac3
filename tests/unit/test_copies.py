"""Copies of tokens without processes: entries of nodes, sizes of messages, orders, and when `auto` sends copies."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cli.arguments import parse_args
from megatron_balance.comm.dedup import NodeSteps, entering
from megatron_balance.comm.registry import Chooser
from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.cost.flex import FlexModel, Routing
from megatron_balance.flow.copies import Destinations, Tally, packed, unpacked
from megatron_balance.profile.cluster_profile import Fit, Throughput, from_links
from tests.unit.commands import CPU, argv


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_each_copy_enters_once_in_order(sources: int, ranks: int, first: int) -> None:
    found = entering(range(first, first + sources), range(20, 20 + ranks))
    assert [source for part in found for source in part] == [*range(first, first + sources)]
    sizes = [len(part) for part in found]
    assert len(found) == ranks and max(sizes) - min(sizes) <= 1


@st.composite
def choices(draw: st.DrawFn) -> tuple[list[torch.Tensor], int, int]:
    """Return each rank's chosen experts [T, P], the number of ranks, and the ranks of a node."""
    ranks = draw(st.integers(1, 7))
    node_size = draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    slots = draw(st.integers(1, 3))
    tokens = [draw(st.integers(0, 6)) for _ in range(ranks)]
    return [torch.rand(count, ranks * slots, generator=generator) < density for count in tokens], ranks, node_size


@given(choices(), st.integers(1, 3))
def test_senders_and_receivers_agree(choices: tuple[list[torch.Tensor], int, int], chunks: int) -> None:
    """The two ends of every message agree on its size, and each rank gets one row per token that needs it."""
    chosen, ranks, node_size = choices
    each = [Destinations(chosen_TP, ranks, ranks, node_size) for chosen_TP in chosen]
    gathered = torch.stack([one.tally(chunks) for one in each])
    tally = Tally.of(gathered, chosen[0].shape[1], ranks)
    assert (tally.tokens_CDP.sum(0) == [one.sum(0).tolist() for one in chosen]).all()
    for chunk, counts in enumerate(tally.copy_counts(slice(None))):
        steps = [NodeSteps(counts, rank, node_size) for rank in range(ranks)]
        for step in range(len(steps[0].nodes)):
            for rank, own in enumerate(steps):
                # What a source sends to its entry is what the entry expects of it
                entry = own.entry(step)
                position = steps[entry].own_sources(step).index(rank)
                assert own.copies_by_node[own.target(step)] == steps[entry].copies(step)[position]
                # What an entry sends on is what the ranks of its node expect, at consecutive places
                for place, target in enumerate(own.here):
                    assert own.to_ranks(step)[place] == steps[target].from_ranks(step)[rank - own.here.start]
        for rank, own in enumerate(steps):
            places = sorted((own.place(step).start, own.place(step).stop) for step in range(len(own.nodes)))
            assert [start for start, _ in places] == [0, *(stop for _, stop in places[:-1])]
            slots = chosen[0].shape[1] // ranks
            sent = [one.tensor_split(chunks)[chunk][:, rank * slots : (rank + 1) * slots] for one in chosen]
            needed = sum(int(part.any(1).sum()) for part in sent)
            assert places[-1][1] == needed


@given(choices(), st.integers(1, 3))
def test_copies_are_one_per_token_and_node(choices: tuple[list[torch.Tensor], int, int], chunks: int) -> None:
    chosen, ranks, node_size = choices
    for chosen_TP in chosen:
        found = Destinations(chosen_TP, ranks, ranks, node_size)
        slots = chosen_TP.shape[1] // ranks
        bounds = [len(part) for part in chosen_TP.tensor_split(chunks)]
        expected = []
        first = 0
        for size in bounds:
            for node in range(-(-ranks // node_size)):
                experts = slice(node * node_size * slots, (node + 1) * node_size * slots)
                expected += [
                    (token, chosen_TP[token, experts].tolist())
                    for token in range(first, first + size)
                    if chosen_TP[token, experts].any()
                ]
            first += size
        order = found.copies(chunks, len(expected))
        assert order.token_R.tolist() == [token for token, _ in expected]
        width = node_size * slots
        bits = unpacked(found.bitmaps(order, chunks), width).tolist()
        assert bits == [experts + [False] * (width - len(experts)) for _, experts in expected]


@given(st.integers(0, 5), st.integers(1, 40), st.integers(0, 10**6))
def test_bitmaps_are_packed_without_loss(rows: int, width: int, seed: int) -> None:
    bits_UX = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < 0.5
    bytes_UB = packed(bits_UX)
    assert bytes_UB.dtype == torch.uint8 and bytes_UB.shape == (rows, -(-width // 8))
    assert torch.equal(unpacked(bytes_UB, width), bits_UX)


@pytest.mark.parametrize(("topk", "chosen"), [(1, "default"), (8, "dedup")])
def test_auto_sends_copies_where_tokens_choose_many_experts(topk: int, chosen: str) -> None:
    line = Throughput(1e-7, 0.0, 0.0, 0.0)
    near = Fit(1e-6, 1 / 100e9, 0.0, 0.0)
    far = Fit(5e-6, 1 / 20e9, 0.0, 0.0)
    profile = from_links(8, 4, near, far, shared=far, forward=line, backward=line)
    said = []
    models = [ExchangeModel.of(profile), FlexModel.of(profile, Routing(64, topk), "dedup")]
    assert Chooser(models, said.append).choose(torch.full((8, 8), 1000), 4096) == chosen
    assert said[0].startswith(f"--moe-comm-alltoall auto: {chosen} for 262 MB in all (predicted: default ")


def test_rows_for_shards_are_the_same_copies() -> None:
    """Twice the rows, one for each of two shards, are as many copies between nodes, on twice as many ranks."""
    line = Throughput(1e-7, 0.0, 0.0, 0.0)
    link = Fit(1e-6, 1e-9, 0.0, 0.0)
    hosts, shards = (from_links(n, n // 2, link, link, shared=link, forward=line, backward=line) for n in (4, 8))
    rows_HH = np.random.default_rng(1).uniform(0, 100, (4, 4))
    alone = FlexModel.of(hosts, Routing(16, 4), "dedup").crossing(rows_HH)
    # The two shards of a source host send half of its tokens each
    both = FlexModel.of(shards, Routing(16, 4), "dedup", 2).crossing(rows_HH.repeat(2, 0).repeat(2, 1) / 2)
    far_H = both.far_2XD[:, 0].reshape(2, 4, 2).sum(2)
    assert far_H == pytest.approx(alone.far_2XD[:, 0])


EP8 = "--expert-model-parallel-size 8"


def test_what_does_not_compose_is_refused() -> None:
    for flags, said in (
        ("--moe-comm-chunks auto --moe-comm-order demi", "--moe-comm-order demi: not with --moe-comm-alltoall dedup"),
        (
            "--moe-parallel-schedule s2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 "
            "--disable-bias-linear",
            "--moe-parallel-schedule s2: not with --moe-comm-alltoall dedup",
        ),
        ("--moe-layer-impl megatron", "dedup: needs --moe-layer-impl balanced"),
        ("--moe-token-dispatcher-type allgather", "--moe-token-dispatcher-type allgather: not with"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_args(argv(f"{EP8} --moe-comm-alltoall dedup {flags}"), CPU)
