"""The planner bench's oracle: exact if every placement can be tried, and never above a policy's time."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

import oracle
from megatron_balance.cost.model import CostModel, Overlap
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS
from megatron_balance.planning.policies import load_policy, registered
from megatron_balance.profile.cluster_profile import builtin
from tests.unit.placements import random_placement

EXACT = 1e-4
"""Precision of the solver."""

SIZES = ((2, 4, 1, 2), (3, 3, 1, 4), (2, 4, 1, 1), (3, 3, 1, 2))
"""(D, E, guest slots, ranks per node): one node, nodes of one rank, and uneven nodes."""


def cost_model(num_ranks: int, node_size: int = 8, *, shared: float = 1, **options: object) -> CostModel:
    """Return a model in which sending an expert takes about as long as computing a rank's tokens.

    Args:
        shared: number of ranks that share an adapter.
    """
    profile = builtin(num_ranks, node_size, 1024, 2048)
    line = profile.links["p2p"]["ep"]
    links = {**profile.links, "p2p": {**profile.links["p2p"], "ep": line._replace(beta=shared * line.beta)}}
    profile = dataclasses.replace(profile, links=links)
    return CostModel(profile, token_bytes=2048, param_bytes=8e6, grad_bytes=24e6, **options)


def load(seed: int, num_ranks: int, num_experts: int) -> np.ndarray:
    """Return tokens [D, E]: a few experts have most, and some have none; so do ranks."""
    generator = np.random.default_rng(seed)
    counts_DE = (generator.lognormal(0, 1.5, (num_ranks, num_experts)) * generator.choice([100, 3000])).astype(np.int64)
    counts_DE[:, generator.random(num_experts) < 0.2] = 0
    counts_DE[generator.random(num_ranks) < 0.1] = 0
    return counts_DE


def every_placement(owners: Placement) -> Iterator[Placement]:
    """Yield all hosts within the guest slots, including lent experts."""
    ranks = range(owners.num_ranks)
    choices = [hosts for size in ranks for hosts in itertools.combinations(ranks, size + 1)]
    for hosts in itertools.product(choices, repeat=owners.num_experts):
        guests = [
            sum(rank in own for own in hosts) - sum(rank in hosts[e] for e in owners.home[rank]) for rank in ranks
        ]
        if max(guests) <= owners.guest_slots:
            yield owners.rehost(hosts)


def every_copy(owners: Placement) -> Iterator[Placement]:
    """Yield all placements in which owners host and each rank has at most one guest."""
    choices = [[None, *({*range(owners.num_experts)} - {*home})] for home in owners.home]
    for guests in itertools.product(*choices):
        yield owners.with_hosts((expert, rank) for rank, expert in enumerate(guests) if expert is not None)


def sending(placement: Placement, cost: CostModel) -> tuple[float, float]:
    """Return lower bounds of the seconds of Trans and Agg, with the best parts of experts on each link."""
    node = cost.network.node_D
    size = len(cost.network.first_N)
    guests = [
        (expert, placement.owner(expert), rank)
        for expert, ranks in enumerate(placement.hosts)
        for rank in sorted({*ranks} - {placement.owner(expert)})
    ]
    if not guests:
        return 0.0, 0.0
    lent = sorted({expert for expert, _, _ in guests})
    # For each guest, the part that enters its node there; for each lent expert, the part that leaves its owner's node
    first = len(guests)
    numbers = 1 + len(guests) + len(lent)
    found = []
    for launch, near, far in cost.transport.at_least():
        rows = []
        upper = []
        equal = []
        total = []

        def busy(seconds: np.ndarray, constant: float = 0.0, rows: list = rows, upper: list = upper) -> None:
            rows.append(np.append(seconds, -1.0))
            upper.append(-constant)

        away = np.array([node[owner] != node[rank] for _, owner, rank in guests] + [False] * len(lent))
        crosses = np.arange(numbers - 1) >= first
        for rank in range(len(node)):
            here = np.array([target == rank for *_, target in guests] + [False] * len(lent))
            owned = crosses & np.array([False] * first + [placement.owner(e) == rank for e in lent])
            busy(-near * (here & away), near * here.sum())
            busy(far * (here & away))
            busy(-near * owned, near * owned.sum())
            busy(far * owned)
        for n in range(size):
            entered = np.array([node[rank] == n for *_, rank in guests] + [False] * len(lent)) & away
            leaving = crosses & np.array([False] * first + [node[placement.owner(e)] == n for e in lent])
            busy(far / cost.network.adapters * entered)
            busy(far / cost.network.adapters * leaving)
        for expert, n in {(e, node[rank]) for e, owner, rank in guests if node[owner] != node[rank]}:
            equal.append([e == expert and node[rank] == n for e, _, rank in guests] + [False] * (len(lent) + 1))
            total.append(1.0)
        bounds = [(0.0, 1.0)] * first
        for expert in lent:
            nodes = {node[rank] == node[owner] for e, owner, rank in guests if e == expert}
            bounds.append((float(True not in nodes), float(False in nodes)))
        matrices = {"A_eq": np.array(equal, dtype=float), "b_eq": total} if equal else {}
        objective = np.append(np.zeros(numbers - 1), 1.0)
        scaled = np.array(rows) / np.append(np.full(numbers - 1, near), 1.0)
        answer = linprog(objective, A_ub=scaled, b_ub=np.array(upper) / near, bounds=[*bounds, (0, None)], **matrices)
        found.append(launch + near * float(answer.fun))
    return found[0], found[1]


def best_shares(counts_DE: np.ndarray, placement: Placement, cost: CostModel) -> float:
    """Return the minimum layer time of a placement.

    Variables are the tokens of each source and expert on each host, the seconds of an exchange, the computed tokens,
    and the exposed seconds of Trans and Agg.
    """
    unit = 1000.0
    network = cost.network
    flows = [(d, e, m) for d in range(len(counts_DE)) for e, hosts in enumerate(placement.hosts) for m in {*hosts}]
    source, _, target = np.array(flows).T
    near = network.node_D[source] == network.node_D[target]
    away = source != target
    none, one = (np.array(cost.time_of(0.0, tokens, 0.0, 0.0)) for tokens in (0.0, unit))
    slope = one - none
    overlap = cost.overlap or Overlap(0.0, 0.0, experts=False)
    byte = 1e3 * unit * cost.token_bytes * cost.exchange.scale
    rows = []
    bounds = []
    for end in (source, target):
        carried = [
            *(byte * network.near.beta * (away & near & (end == rank)) for rank in range(len(counts_DE))),
            *(byte * network.far.beta * (~near & (end == rank)) for rank in range(len(counts_DE))),
            *(
                byte * network.far.beta / network.adapters * (~near & (network.node_D[end] == n))
                for n in range(len(network.first_N))
            ),
        ]
        rows += [[*row, -1, 0, 0, 0] for row in carried]
    rows += [[*(1.0 * (target == rank)), 0, -1, 0, 0] for rank in range(len(counts_DE))]
    bounds += [0] * len(rows)
    share = overlap.experts / cost.microbatches
    for index, seconds in enumerate(sending(placement, cost)):
        seen = [-1e3, 0] if index == 0 else [0, -1e3]
        rows.append([*[0] * len(flows), 0, -1e3 * share * slope[1 + index], *seen])
        bounds.append(1e3 * (share * none[1 + index] + overlap[index] - seconds))
    totals = [[float((d, e) == pair) for d, e, _ in flows] + [0] * 4 for pair in np.ndindex(counts_DE.shape)]
    objective = [*[0] * len(flows), 4, 1e3 * (slope[1] + slope[2]), 1e3, 1e3]
    found = linprog(objective, rows, bounds, totals, counts_DE.ravel() / unit)
    assert found.status == 0
    return float(none.sum() + found.fun / 1e3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("overlap", [None, Overlap(1e-4, 4e-4), Overlap(0.0, 0.0)])
def test_it_is_the_least_of_all_placements(size: tuple[int, int, int, int], overlap: Overlap | None) -> None:
    num_ranks, num_experts, slots, node_size = size
    owners = Placement.identity(num_experts, num_ranks, slots)
    shared = 1 + (overlap is None)
    cost = cost_model(num_ranks, node_size, shared=shared, overlap=overlap, microbatches=1 + 2 * (overlap is not None))
    counts_DE = load(slots + num_ranks, num_ranks, num_experts)
    least = min(best_shares(counts_DE, placement, cost) for placement in every_placement(owners))
    assert oracle.least_seconds(counts_DE, owners, cost) == pytest.approx(least, rel=EXACT)


@pytest.mark.parametrize(("node_size", "shared"), [(4, 1), (2, 1), (2, 2), (1, 1)])
def test_copies_are_the_least_of_all_copies(node_size: int, shared: float) -> None:
    owners = Placement.identity(4, 4, 1)
    cost = cost_model(4, node_size, shared=shared)
    counts_DE = 4 * load(3, 4, 4)
    placements = [*every_copy(owners)]
    bounds = [
        cost.time_of(*cost.work(counts_DE, placement), *sending(placement, cost)).total for placement in placements
    ]
    found = oracle.least_seconds(counts_DE, owners, cost, copies=True)
    assert found == pytest.approx(min(bounds), rel=EXACT)
    # The bound is near what the model charges
    assert 1 - EXACT < min(cost.layer_seconds(counts_DE, placement) for placement in placements) / found < 1.05


@pytest.mark.parametrize("counts", ["near", "far", "both"])
@pytest.mark.parametrize("shared", [1, 2])
def test_messages_cannot_change_their_links(counts: str, shared: float) -> None:
    # Without guest slots there is nothing to choose
    owners = Placement.identity(4, 4, 0)
    cost = cost_model(4, 2, shared=shared)
    counts_DE = load(5, 4, 4)
    is_near_DE = cost.network.is_near_DD
    counts_DE = counts_DE * {"near": is_near_DE, "far": ~is_near_DE, "both": 1}[counts]
    least = oracle.least_seconds(counts_DE, owners, cost)
    assert least == pytest.approx(cost.layer_seconds(counts_DE, owners), rel=EXACT)


@pytest.mark.parametrize(
    ("additions", "shared", "busy"),
    [
        ([(0, 2), (2, 2)], 1, "2 far"),  # one rank receives two experts from another node
        ([(0, 2), (2, 3)], 1, "1 far"),
        ([(0, 4), (4, 5)], 2, "2 far"),  # two experts enter a node by one adapter
        ([(0, 2), (2, 4)], 2, "2 far"),  # two experts leave a node by one adapter
        ([(0, 2), (1, 4)], 1, "2 far"),  # one rank sends two experts to other nodes
        ([(0, 2), (0, 1), (1, 4), (1, 1)], 1, "1 far"),  # it sends them within its node, where they are relayed
        ([(0, 1), (3, 0)], 1, "1 near"),
    ],
)
def test_every_end_of_a_link_is_busy(additions: list[tuple[int, int]], shared: float, busy: str) -> None:
    placement = Placement.identity(12, 6, 2).with_hosts(additions)
    cost = cost_model(6, 2, shared=shared)
    program = oracle._Program()
    hosts_ED = program.variables(12, 6, upper=1, integer=True)
    for expert, rank in np.ndindex(hosts_ED.shape):
        here = float(rank in placement.hosts[expert])
        program.require((hosts_ED[expert, [rank]], 1), lower=here, upper=here)
    trans, _ = oracle._sending(program, hosts_ED, placement, cost)
    count, level = busy.split()
    (launch, near, far), _ = cost.transport.at_least()
    least = launch + float(count) * {"near": near, "far": far}[level]
    assert 1e3 * least == pytest.approx(program.least((trans[0], 1e3 * np.asarray(trans[1]))), rel=EXACT)
    assert least <= cost.sending(placement).trans


@settings(max_examples=15)
@given(st.data(), st.integers(0, 2**32 - 1))
def test_no_policy_and_no_split_is_faster(data: st.DataObject, seed: int) -> None:
    sizes = st.sampled_from([(2, 4, 2, 1), (3, 6, 1, 2), (4, 4, 1, 2), (4, 4, 2, 4), (4, 8, 1, 2)])
    num_ranks, num_experts, slots, node_size = data.draw(sizes)
    shared = data.draw(st.sampled_from([1, 1.5]))
    overlap = data.draw(st.sampled_from([None, Overlap(1e-4, 2e-4)]))
    cost = cost_model(num_ranks, node_size, shared=shared, overlap=overlap)
    check_bound(num_ranks, num_experts, slots, cost, seed)


@pytest.mark.parametrize("node_size", [4, 2])
def test_no_policy_is_faster_on_eight_ranks(node_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "MOST_NODES", 1)
    check_bound(8, 8, 1, cost_model(8, node_size, shared=1.5), node_size)


def check_bound(num_ranks: int, num_experts: int, slots: int, cost: CostModel, seed: int) -> None:
    owners = Placement.identity(num_experts, num_ranks, slots)
    counts_DE = load(seed, num_ranks, num_experts)
    least = oracle.least_seconds(counts_DE, owners, cost) * (1 - EXACT)
    copies = oracle.least_seconds(counts_DE, owners, cost, copies=True) * (1 - EXACT)
    assert 0 < least <= copies * (1 + 2 * EXACT)
    for split in SPLITS:
        judged = dataclasses.replace(cost, split=split)
        for offset in range(20):
            assert least <= judged.layer_seconds(
                counts_DE, random_placement(num_experts, num_ranks, slots, seed + offset)
            )
        for name in registered():
            seconds = judged.layer_seconds(counts_DE, load_policy(name).plan(counts_DE, owners, judged))
            assert (copies if (name, split) == ("fastermoe", "local_first") else least) <= seconds


def test_microbatches_wait_for_their_own_slowest_rank() -> None:
    owners = Placement.identity(4, 2, 0)
    cost = cost_model(2, microbatches=2)
    counts_BDE = np.array([[[9000, 0, 0, 0]] * 2, [[0, 0, 0, 9000]] * 2])
    together = oracle.least_seconds(counts_BDE.sum(0), owners, cost)
    apart = oracle.least_seconds(counts_BDE, owners, cost)
    assert apart == pytest.approx(cost.layer_seconds(counts_BDE, owners), rel=EXACT)
    assert apart > 1.5 * together


def test_ranks_have_their_own_speeds() -> None:
    cost = cost_model(2)
    cost = dataclasses.replace(cost, profile=dataclasses.replace(cost.profile, rates=(1.5, 0.5)))
    owners = Placement.identity(2, 2, 0)
    counts_DE = np.array([[5000, 5000]] * 2)
    assert oracle.least_seconds(counts_DE, owners, cost) == pytest.approx(
        cost.layer_seconds(counts_DE, owners), rel=EXACT
    )


def test_a_planner_that_is_blind_to_nodes_is_noticed() -> None:
    # Rank 0 owns both hot experts and most tokens. Lending one to rank 1 pays; on another node, its messages do not
    counts_DE = np.array([[9000, 9000, 0, 0, 0, 0, 0, 0]] + [[300] * 8] * 3)
    owners = Placement.identity(8, 4, 1)
    cost = cost_model(4, 2)
    least = oracle.least_seconds(counts_DE, owners, cost)
    seconds = [cost.layer_seconds(counts_DE, owners.rehost([[rank], *owners.hosts[1:]])) for rank in (1, 2)]
    assert seconds[0] < 1.15 * least
    assert seconds[1] > 2 * least


def test_guests_may_compute_in_place_of_the_owner() -> None:
    # Rank 0 owns both hot experts. Lending one moves all its tokens; a copy would take only its host's own tokens
    counts_DE = np.array([[9000, 9000, 0, 0]] * 2)
    owners = Placement.identity(4, 2, 1)
    cost = dataclasses.replace(cost_model(2), param_bytes=1.0, grad_bytes=1.0)
    lent = owners.rehost([[0], [1], [1], [1]])
    assert oracle.least_seconds(counts_DE, owners, cost) == pytest.approx(cost.layer_seconds(counts_DE, lent), rel=1e-3)
    copies = oracle.least_seconds(counts_DE, owners, cost, copies=True)
    assert copies > 1.3 * cost.layer_seconds(counts_DE, lent)


def test_no_tokens_take_latencies_only() -> None:
    owners = Placement.identity(4, 2, 1)
    cost = cost_model(2)
    counts_DE = np.zeros((2, 4), dtype=np.int64)
    assert oracle.least_seconds(counts_DE, owners, cost) == pytest.approx(cost.layer_seconds(counts_DE, owners))
