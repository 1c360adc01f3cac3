"""DispatchPlan: tokens arrive at the rank and in the slot for which they were sent, and none is lost."""

from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.flow.device_plan import DeviceTables, tokens_until
from megatron_balance.flow.plan import DispatchPlan, certified_rows
from megatron_balance.placement.placement import Placement
from tests.unit.placements import loads, physicals_of, placements

SPLITS = ["local_first", "proportional"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Placement, str, int | None]:
    """Draw arguments of DispatchPlan."""
    placement = draw(placements())
    return draw(loads(placement)), placement, draw(st.sampled_from(SPLITS)), draw(st.none() | st.integers(1, 3))


plans = cases().map(lambda case: DispatchPlan(*case))


def apportion(amount: int, weights: list[int]) -> list[int]:
    """Apportion by Hamilton's method with exact fractions; ties go to the first."""
    quotas = [Fraction(amount * weight, max(sum(weights), 1)) for weight in weights]
    shares = [int(quota) for quota in quotas]
    remainders = sorted(range(len(weights)), key=lambda k: (shares[k] - quotas[k], k))
    for k in remainders[: amount - sum(shares)]:
        shares[k] += 1
    return shares


def rounded(amount: int, weights: list[int]) -> list[int]:
    """Apportion so that each sum of the first parts is the exact one, rounded down."""
    ends = [Fraction(amount * end, max(sum(weights), 1)) for end in accumulate(weights)]
    return [int(end) - int(before) for before, end in zip([Fraction(0), *ends], ends, strict=False)]


def quotas_of(own: list[int], placement: Placement, expert: int, split: str) -> list[int]:
    """Return the number of an expert's tokens that each rank computes."""
    hosts = placement.hosts[expert]
    ranks = range(placement.num_ranks)
    if split == "local_first":
        away = sum(own[rank] for rank in ranks if rank not in hosts)
        return [(own[rank] if rank in hosts else 0) + away * (rank == placement.primary[expert]) for rank in ranks]
    shares = dict.fromkeys(ranks, 0)
    for rank, share in zip(
        hosts, (placement.quotas[expert] if placement.quotas else ()) or [1] * len(hosts), strict=True
    ):
        shares[rank] += share
    return apportion(sum(own), [*shares.values()])


def pairs(out: list[int], into: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield sources, receivers and tokens, both in their order."""
    out = [*out]
    into = [*into]
    source = 0
    target = 0
    while any(out):
        if not out[source]:
            source += 1
        elif not into[target]:
            target += 1
        else:
            tokens = min(out[source], into[target])
            out[source] -= tokens
            into[target] -= tokens
            yield source, target, tokens


def reference(counts: list[list[int]], placement: Placement, split: str, size: int | None) -> list[list[int]]:
    """Compute tokens_DP expert by expert: a rank's own tokens first, then those of its node, then the others."""
    ranks = range(placement.num_ranks)
    nodes = [[*ranks[first:][: size or len(ranks)]] for first in ranks[:: size or len(ranks)]]
    tokens = [[0] * placement.num_physical for _ in ranks]
    for expert in range(placement.num_experts):
        own = [counts[rank][expert] for rank in ranks]
        quotas = quotas_of(own, placement, expert, split)
        out = [max(0, tokens - quota) for tokens, quota in zip(own, quotas, strict=True)]
        into = [max(0, quota - tokens) for tokens, quota in zip(own, quotas, strict=True)]
        moves = [(rank, rank, min(own[rank], quotas[rank])) for rank in ranks]
        for node in nodes:
            sides = [[side[rank] for rank in node] for side in (out, into)]
            parts = [rounded(min(map(sum, sides)), side) for side in sides]
            moves += [(node[source], node[target], sent) for source, target, sent in pairs(*parts)]
            for side, part in zip((out, into), parts, strict=True):
                for rank, sent in zip(node, part, strict=True):
                    side[rank] -= sent
        for source, target, sent in [*moves, *pairs(out, into)]:
            if sent:
                tokens[source][placement.physical(target, expert)] += sent
    return tokens


def check_against_reference(case: tuple[torch.Tensor, Placement, str, int | None]) -> None:
    counts_DE, placement, *options = case
    plan = DispatchPlan(counts_DE, placement, *options)
    assert plan.tokens_DP.tolist() == reference(counts_DE.tolist(), placement, *options)
    for expert, physicals in enumerate(physicals_of(placement)):
        assert torch.equal(plan.tokens_DP[:, list(physicals)].sum(1), counts_DE[:, expert])
    unused = [index for index, expert in enumerate(placement.tables.expert_P.tolist()) if expert < 0]
    assert not plan.tokens_DP[:, unused].any()
    assert (plan.tokens_DP >= 0).all()


@settings(max_examples=100)
@given(cases())
def test_equals_the_reference(case: tuple[torch.Tensor, Placement, str, int | None]) -> None:
    check_against_reference(case)


def among_sources(counts: list[list[int]], planned: list[int], physicals: tuple[int, ...], expert: int) -> list[dict]:
    """Give a host's tokens for an expert, source by source, to the expert's physical experts, one after another."""
    left = {physical: planned[physical] for physical in physicals}
    sent = []
    for row in counts:
        tokens = row[expert]
        sent_by_one = {}
        for physical in physicals:
            sent_by_one[physical] = min(tokens, left[physical])
            left[physical] -= sent_by_one[physical]
            tokens -= sent_by_one[physical]
        sent.append(sent_by_one)
    return sent


@settings(max_examples=50)
@given(cases(), st.integers(2, 3), st.data())
def test_a_hosts_tokens_are_divided_among_its_sources(case: tuple, each: int, data: st.DataObject) -> None:
    first_DE, placement, *options = case
    more = [data.draw(loads(placement)) for _ in range(each - 1)]
    counts_DE = torch.stack([first_DE, *more], 1).flatten(0, 1)
    plan = DispatchPlan(counts_DE, placement, *options)
    of_hosts = reference(sum([first_DE, *more]).tolist(), placement, *options)
    expected = torch.zeros_like(plan.tokens_DP)
    for host, planned in enumerate(of_hosts):
        sources = range(host * each, (host + 1) * each)
        for expert, physicals in enumerate(physicals_of(placement)):
            found = among_sources(counts_DE[sources].tolist(), planned, physicals, expert)
            for source, sent in zip(sources, found, strict=True):
                for physical, tokens in sent.items():
                    expected[source, physical] = tokens
    assert torch.equal(plan.tokens_DP, expected)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(cases())
def test_equals_the_reference_at_length(case: tuple[torch.Tensor, Placement, str, int | None]) -> None:
    check_against_reference(case)


def test_proportional_by_hand() -> None:
    # Expert 0 has three vExperts: two on its owner, rank 0, and one on rank 2
    placement = Placement.identity(3, 3, guest_slots=1).with_hosts([(0, 0), (0, 2)])
    counts_DE = torch.tensor([[2, 5, 0], [7, 0, 0], [3, 0, 1]])
    # Of quotas 8 and 4, local tokens take 2 and 3; rank 1 sends its 7 tokens to fill them
    plan = DispatchPlan(counts_DE, placement, "proportional")
    assert plan.tokens_DP.tolist() == [[2, 0, 5, 0, 0, 0], [6, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 3]]
    plan = DispatchPlan(counts_DE, placement, "local_first")
    assert plan.tokens_DP.tolist() == [[2, 0, 5, 0, 0, 0], [7, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 3]]


def test_a_lent_expert_is_computed_by_its_guest_only() -> None:
    placement = Placement.parse("0x0 + . | 1 + 0!")
    for split in SPLITS:
        plan = DispatchPlan(torch.tensor([[4, 1], [2, 3]]), placement, split)
        assert plan.tokens_DP.tolist() == [[0, 0, 1, 4], [0, 0, 3, 2]]


def test_quotas_by_hand() -> None:
    """Ranks 0 and 1 share a node, 2 and 3 another one. Each host computes its quota; few tokens change nodes."""
    placement = Placement.parse("0:6 + . | 1 + 0:2 | 2 + 0:4 | 3 + .")
    counts_DE = torch.zeros(4, 4, dtype=torch.int64)
    counts_DE[:, 0] = torch.tensor([2, 4, 3, 3])
    columns = [placement.physical(rank, 0) for rank in (0, 1, 2)]
    plan = DispatchPlan(counts_DE, placement, "proportional", 2)
    assert plan.tokens_DP[:, columns].tolist() == [[2, 0, 0], [2, 2, 0], [0, 0, 3], [2, 0, 1]]
    # Twice as many tokens, in the same proportions
    plan = DispatchPlan(2 * counts_DE, placement, "proportional", 2)
    assert plan.tokens_DP[:, columns].sum(0).tolist() == [12, 4, 8]


@pytest.mark.parametrize("split", SPLITS)
def test_identity_sends_what_is_counted(split: str) -> None:
    counts_DE = torch.arange(32).view(4, 8)
    assert torch.equal(DispatchPlan(counts_DE, Placement.identity(8, 4), split).tokens_DP, counts_DE)


@given(plans)
def test_a_host_gets_what_its_slots_compute(plan: DispatchPlan) -> None:
    slots = plan.placement.slots_per_rank
    for rank in range(plan.placement.num_ranks):
        assert torch.equal(plan.splits_DW[:, rank], plan.tokens_DP[:, rank * slots : (rank + 1) * slots].sum(1))


@pytest.mark.parametrize("shape", [(2, 3), (3, 4), (4,)])
def test_counts_of_another_layout(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        DispatchPlan(torch.zeros(shape, dtype=torch.int64), Placement.identity(4, 2))


@given(cases())
def test_a_device_divides_each_sources_tokens_the_same_way(case: tuple) -> None:
    counts_DE, placement, _, node_size = case
    plan = DispatchPlan(counts_DE, placement, "proportional", node_size)
    tables = DeviceTables.of(placement, torch.device("cpu"))
    for source, counts_E in enumerate(counts_DE):
        until_EK = tokens_until(counts_DE, tables, source, node_size or placement.num_ranks)
        planned_XK = plan.tokens_DP[source][tables.physicals_EK[tables.shared_X]] * tables.is_host_XK
        assert torch.equal(until_EK[tables.shared_X], planned_XK.cumsum(1))
        assert (until_EK[:, -1] >= counts_E).all()


@given(st.integers(0, 10**9), st.integers(1, 99999), st.integers(1, 6))
def test_certified_rows_exceed_even_rows_by_exactly_the_written_fraction(
    even_rows: int, digits: int, places: int
) -> None:
    rows = certified_rows(even_rows, digits / 10**places)
    assert (rows - 1) * 10**places < even_rows * (10**places + digits) <= rows * 10**places or even_rows == rows == 0


@given(plans, st.integers(0, 100))
def test_room_is_constant_or_exact(plan: DispatchPlan, limit: int) -> None:
    limited = DispatchPlan(plan.counts_DE, plan.placement, plan.split, plan.node_size, limit)
    assert torch.equal(limited.tokens_DP, plan.tokens_DP)
    slots = plan.placement.slots_per_rank
    busiest = max(
        sum(plan.tokens_DP.sum(0).tolist()[first:][:slots]) for first in range(0, plan.placement.num_physical, slots)
    )
    assert (plan.room, limited.room) == (0, limit if busiest <= limit else 0)
