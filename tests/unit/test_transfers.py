"""Transfer plans: every piece reaches every guest once, along the expert's route, in few rounds."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.transfers import EMPTY_PLAN, Message, TransferPlan, plan_transfers
from tests.unit.link_loads import LinkLoads
from tests.unit.placements import CROWDED, placements
from tests.unit.slow_routes import Route, routes, slow_plan

node_sizes = st.integers(1, 6)
chunk_numbers = st.integers(1, 9)
fanouts = st.integers(1, 4)


def one_to_all(num_ranks: int, experts: int = 1) -> Placement:
    """Place the first experts, which rank 0 owns, on every other rank."""
    plain = Placement.identity(num_ranks * experts, num_ranks, experts)
    return plain.with_hosts((expert, rank) for expert in range(experts) for rank in range(1, num_ranks))


def check_rounds(plan: TransferPlan, holders: set[tuple[int, int, int]]) -> None:
    """Check that a rank sends and receives at most one message per round, and has each piece before it sends it."""
    for messages in plan.rounds:
        assert messages
        assert max(Counter(message.source for message in messages).values()) == 1
        assert max(Counter(message.target for message in messages).values()) == 1
        assert all((message.expert, message.source, message.chunk) in holders for message in messages)
        holders |= {(message.expert, message.target, message.chunk) for message in messages}


@settings(max_examples=300)
@given(placements(), node_sizes, chunk_numbers, fanouts)
def test_invariants(placement: Placement, node_size: int, chunks: int, fanout: int) -> None:
    plan = plan_transfers(placement, node_size, chunks, fanout)
    owned = {(expert, placement.owner(expert)) for expert in range(placement.num_experts)}
    check_rounds(plan, {(*pair, chunk) for pair in owned for chunk in range(chunks)})
    reached = Counter(
        (message.expert, message.target, message.chunk) for messages in plan.rounds for message in messages
    )
    slots = [(expert, rank) for rank, row in enumerate(placement.guests) for expert in row if expert != EMPTY]
    assert reached == Counter((*slot, chunk) for slot in slots for chunk in range(chunks))
    assert plan == plan_transfers(Placement.parse(str(placement)), node_size, chunks, fanout)
    assert all(message.chunks == chunks for messages in plan.rounds for message in messages)
    assert plan.experts_sent == pytest.approx(len(slots))


@given(placements(), node_sizes, chunk_numbers, fanouts)
def test_backward_a_rank_has_all_sums_before_it_sends_its_own(
    placement: Placement, node_size: int, chunks: int, fanout: int
) -> None:
    plan = plan_transfers(placement, node_size, chunks, fanout)
    gone = set()
    for messages in reversed(plan.rounds):
        # Messages received in this round are added only after it
        assert not any((message.expert, message.source, message.chunk) in gone for message in messages)
        gone |= {(message.expert, message.target, message.chunk) for message in messages}
        assert not any((message.expert, message.source, message.chunk) in gone for message in messages)


@settings(max_examples=300)
@given(placements(), node_sizes, chunk_numbers, fanouts)
def test_links_are_those_of_the_routes(placement: Placement, node_size: int, chunks: int, fanout: int) -> None:
    plan = plan_transfers(placement, node_size, chunks, fanout)
    links = {message[:3] for messages in plan.rounds for message in messages}
    expected = set()
    for expert, route in routes(placement, node_size, fanout).items():
        expected |= {(expert, *link[:2]) for link in route}
        check_route(route, placement.owner(expert), node_size, fanout)
    assert links == expected


def check_route(route: Route, owner: int, node_size: int, fanout: int) -> None:
    depth = {owner: 0}
    for link in route:
        assert link.before == depth[link.source], "a rank has the expert before it sends it"
        depth[link.target] = link.before + 1
    assert max(Counter(link.source for link in route).values()) <= fanout
    entered = Counter(
        link.target // node_size for link in route if link.source // node_size != link.target // node_size
    )
    assert entered == Counter({rank // node_size for rank in depth} - {owner // node_size}), "each node once"


@given(placements(), node_sizes)
def test_a_chain_goes_node_by_node_from_the_owners_on(placement: Placement, node_size: int) -> None:
    nodes = -(-placement.num_ranks // node_size)
    for expert, route in routes(placement, node_size).items():
        owner = placement.owner(expert)
        assert route[0].source == owner and all(link.target == after.source for link, after in pairwise(route))
        assert [link.before + link.behind for link in route] == [len(route) - 1] * len(route)
        passed = [(link.target // node_size - owner // node_size) % nodes for link in route]
        assert passed == sorted(passed)


def test_routes_of_different_owners_enter_a_node_at_different_ranks() -> None:
    on_all = Placement.identity(8, 8, 7).rehost([range(8)] * 8)
    for fanout in (1, 2):
        found = routes(on_all, 4, fanout).values()
        entries = [link.target for route in found for link in route if link.source // 4 != link.target // 4]
        assert sorted(entries) == list(range(8))
    targets = {expert: tuple(link.target for link in route) for expert, route in routes(on_all, 4).items()}
    assert targets[1] == (2, 3, 0, 5, 6, 7, 4) and targets[6] == (7, 4, 5, 2, 3, 0, 1)


def test_a_tree_reaches_the_nodes_before_it_works_inside_them() -> None:
    (route,) = routes(one_to_all(16), 4, fanout=2).values()
    assert [link[:2] for link in route[:5]] == [(0, 4), (4, 8), (0, 1), (8, 12), (4, 5)]


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 13, 64])
@pytest.mark.parametrize("node_size", [1, 8, 64])
def test_a_whole_expert_doubles(num_ranks: int, node_size: int) -> None:
    rounds = len(plan_transfers(one_to_all(num_ranks), node_size, chunks=1, fanout=16).rounds)
    # First the nodes with the expert double, then the ranks of each node
    nodes = -(-num_ranks // node_size)
    assert rounds <= (nodes - 1).bit_length() + (min(node_size, num_ranks) - 1).bit_length()


@pytest.mark.parametrize("num_ranks", [8, 13, 64])
def test_two_sends_per_rank_reach_many_in_few_rounds(num_ranks: int) -> None:
    # Ranks with the expert in round n: all of the round before, plus one for each rank reached in the two rounds before
    holders = [1, 2]
    while holders[-1] < num_ranks:
        holders.append(holders[-1] + (holders[-1] - holders[-3] if len(holders) > 2 else 2))
    for chunks in (1, 4, 16):
        rounds = len(plan_transfers(one_to_all(num_ranks), 64, chunks, fanout=2).rounds)
        assert rounds <= len(holders) - 1 + 2 * (chunks - 1)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 13, 64])
@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_one_expert_to_all_passes_in_a_pipeline(num_ranks: int, chunks: int) -> None:
    assert len(plan_transfers(one_to_all(num_ranks), 8, chunks).rounds) == chunks + num_ranks - 2


def test_experts_of_one_owner_follow_each_other() -> None:
    assert len(plan_transfers(one_to_all(8, experts=3), 4, 4).rounds) == 3 * 4 + 6


def test_the_most_urgent_piece_goes_first() -> None:
    # Rank 0 owns experts 0 and 1; expert 1 has the longer route
    placement = Placement.identity(8, 4, 2).with_hosts([(0, 1), (1, 1), (1, 2), (1, 3)])
    plan = plan_transfers(placement, 4, 1)
    assert plan.rounds[0] == (Message(expert=1, source=0, target=1, chunk=0),)
    assert len(plan.rounds) == 3


@settings(max_examples=300)
@given(
    placements() | CROWDED,
    node_sizes,
    chunk_numbers,
    st.sampled_from([1, 2, 3, 16]),
    st.sampled_from([0.5, 1.0, 1.3, 8.0]),
)
def test_plans_are_those_of_one_link_after_another(
    placement: Placement, node_size: int, chunks: int, fanout: int, far: float
) -> None:
    plan = plan_transfers(placement, node_size, chunks, fanout, far)
    expected = slow_plan(placement, node_size, chunks, fanout, far)
    assert plan == expected and plan.rounds == expected.rounds


@given(placements(), chunk_numbers)
def test_rounds_are_the_messages(placement: Placement, chunks: int) -> None:
    plan = plan_transfers(placement, 2, chunks)
    assert TransferPlan.of(plan.rounds) == plan
    assert plan.round_M.tolist() == [number for number, messages in enumerate(plan.rounds) for _ in messages]


def test_no_guests_no_rounds() -> None:
    for placement in (Placement.identity(4, 2, 2), Placement.identity(4, 2), Placement.identity(4, 1, 3)):
        assert plan_transfers(placement, 2, 4) == EMPTY_PLAN


def test_a_lent_expert_is_sent_by_its_owner() -> None:
    lent = Placement.identity(2, 2, 1).rehost([[1], [1]])
    assert plan_transfers(lent, 2, 2).rounds == ((Message(0, 0, 1, 0, 2),), (Message(0, 0, 1, 1, 2),))


@given(placements(), chunk_numbers, st.integers(0, 40))
def test_parts_of_a_plan(placement: Placement, chunks: int, rounds: int) -> None:
    plan = plan_transfers(placement, 2, chunks)
    first, rest = plan.split(rounds)
    assert first.rounds + rest.rounds == plan.rounds and len(first.rounds) == min(rounds, len(plan.rounds))
    assert first.experts_sent + rest.experts_sent == pytest.approx(plan.experts_sent)


def loads_of(num_ranks: int, node_size: int, found: list[Route], adapters: float = 64) -> LinkLoads:
    loads = LinkLoads(num_ranks, node_size, adapters)
    for route in found:
        loads.add(route)
    return loads


def least_rounds(loads: LinkLoads, chunks: int) -> int:
    return max((round(busy * chunks + extra) for busy, extra in loads.lines), default=0)


@settings(max_examples=300)
@given(placements(), node_sizes, chunk_numbers, fanouts)
def test_rounds_are_counted_from_below(placement: Placement, node_size: int, chunks: int, fanout: int) -> None:
    loads = loads_of(placement.num_ranks, node_size, list(routes(placement, node_size, fanout).values()))
    rounds = len(plan_transfers(placement, node_size, chunks, fanout).rounds)
    assert least_rounds(loads, chunks) <= rounds <= 1.75 * least_rounds(loads, chunks)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 13, 64])
@pytest.mark.parametrize("fanout", [1, 2, 16])
@pytest.mark.parametrize("chunks", [1, 4, 16])
def test_rounds_of_one_expert_are_counted_exactly(num_ranks: int, fanout: int, chunks: int) -> None:
    placement = one_to_all(num_ranks)
    loads = loads_of(num_ranks, 8, list(routes(placement, 8, fanout).values()))
    assert len(plan_transfers(placement, 8, chunks, fanout).rounds) == least_rounds(loads, chunks)


@given(placements(), node_sizes, fanouts, st.randoms())
def test_link_loads_do_not_depend_on_the_order(placement: Placement, node_size: int, fanout: int, random) -> None:
    found = list(routes(placement, node_size, fanout, far=3).values())
    lines = loads_of(placement.num_ranks, node_size, found, adapters=1).lines
    random.shuffle(found)
    assert loads_of(placement.num_ranks, node_size, found, adapters=1).lines == lines


@given(placements(), node_sizes, fanouts)
def test_hops_between_nodes_are_weighted(placement: Placement, node_size: int, fanout: int) -> None:
    plain, weighted = (routes(placement, node_size, fanout, far) for far in (1, 3))
    for expert, route in weighted.items():
        assert {link[:2] for link in route} == {link[:2] for link in plain[expert]}
        for link in route:
            assert link.time == (1 if link.source // node_size == link.target // node_size else 3)
            feeder = next((other for other in route if other.target == link.source), None)
            least = feeder.before + feeder.time if feeder else 0
            assert link.before >= least and link.behind >= 0
        last = max(route, key=lambda link: link.before + link.time)
        assert last.behind == 0


def test_adapters_are_busy_with_all_messages_of_their_node() -> None:
    # Ranks 0 and 1 each send an expert to the other node, which takes four times as long as within the node
    placement = Placement.identity(4, 4, 2).with_hosts([(0, 2), (1, 3)])
    found = list(routes(placement, 2, far=4).values())
    assert loads_of(4, 2, found, adapters=2).lines == [(4, 0)]
    assert loads_of(4, 2, found, adapters=1).lines == [(4, 0), (8, 0)]
    # Only the sending node has a busy adapter, or only the receiving node
    for additions in ([(0, 2), (1, 4)], [(2, 0), (4, 1)]):
        found = list(routes(Placement.identity(6, 6, 1).with_hosts(additions), 2, far=4).values())
        assert loads_of(6, 2, found, adapters=1).lines == [(4, 0), (8, 0)]
