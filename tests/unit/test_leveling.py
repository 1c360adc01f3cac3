"""The search for even loads: its promises for any load."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.planning.leveling import ALL_NODES, ANYWHERE, NEAR, UnevenLoad
from megatron_balance.planning.leveling import level as compiled_level
from tests.unit.slow_splits import SPLITS

REACHES = (ANYWHERE, ALL_NODES, NEAR)


class Move(NamedTuple):
    """An expert that gets guests."""

    expert: int
    guests: list[int]
    primary: int
    """The owner, or the only guest."""


class Ranks(NamedTuple):
    """Speeds and free guest slots of ranks."""

    rates: Sequence[float]
    free: Sequence[int]
    node_size: int


def level(
    ranks: Ranks,
    experts: Sequence[Sequence[tuple[float, int]]],
    loads: Sequence[float],
    busiest: float,
    *,
    reach: int,
    tokens: Sequence[Sequence[float]] = (),
) -> list[Move]:
    """Return the moves; `experts` are pairs (tokens, expert) of each rank, ascending."""
    most = max(map(len, experts))
    tokens_E = np.zeros(1 + most * len(loads))
    experts_DS = np.full((len(loads), most), most * len(loads))
    for rank, row in enumerate(experts):
        # Missing experts come first, and have no tokens
        for place, (size, expert) in enumerate(row, start=most - len(row)):
            tokens_E[expert] = size
            experts_DS[rank, place] = expert
    tokens_ED = np.array(tokens, dtype=np.float64).reshape(-1, len(loads))
    rates, free, loads_D = (np.array(numbers) for numbers in (ranks.rates, ranks.free, loads))
    load = UnevenLoad(rates, free, ranks.node_size, experts_DS, tokens_E, loads_D, tokens_ED)
    found = compiled_level(load, busiest, reach)
    guests = [row.nonzero()[0].tolist() for row in found.guests_MD]
    return [*map(Move, found.expert_M.tolist(), guests, found.primary_M.tolist())]


class Case:
    """A layer without guests."""

    def __init__(self, seed: int, ranks: int, own: int, slots: int, node_size: int) -> None:
        generator = np.random.default_rng(seed)
        self.counts_ED = (generator.lognormal(0, 1.5, (ranks * own, 1)) * generator.random((ranks * own, ranks))).round(
            3
        )
        self.counts_ED[generator.random(ranks * own) < 0.2] = 0
        self.owner_E = np.arange(ranks * own) // own
        self.rates = generator.choice([0.5, 1.0, 1.0, 2.0], ranks).tolist()
        self.ranks = Ranks(self.rates, generator.integers(0, slots + 1, ranks).tolist(), node_size)
        tokens = self.counts_ED.sum(1).tolist()
        self.experts = [
            sorted((tokens[expert], expert) for expert in np.flatnonzero(self.owner_E == rank).tolist())
            for rank in range(ranks)
        ]
        self.loads = [sum(size for size, _ in row) for row in self.experts]
        self.mean = sum(self.loads) / sum(self.rates)

    def level(self, busiest: float, reach: int, local: bool) -> list[Move]:
        tokens = self.counts_ED.tolist() if local else ()
        return level(self.ranks, self.experts, self.loads, busiest * self.mean, reach=reach, tokens=tokens)

    def after(self, moves: Sequence[Move], split: str) -> np.ndarray:
        """Return [D], the time that each rank computes after moves, by the rules of a split."""
        total_D = np.zeros(len(self.rates))
        chosen = {move.expert: move for move in moves}
        for expert, owner in enumerate(self.owner_E.tolist()):
            move = chosen.get(expert, Move(expert, [], owner))
            hosts_1D = np.zeros((1, len(self.rates)), dtype=np.int64)
            hosts_1D[0, [owner, *move.guests]] = 1
            total_D += SPLITS[split](self.counts_ED[[expert]], hosts_1D, np.array([move.primary]))[0]
        return total_D / self.rates


drawn = st.builds(
    Case,
    st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 9),
    own=st.integers(1, 4),
    slots=st.integers(0, 3),
    node_size=st.integers(1, 9),
)


@given(drawn, st.sampled_from([1.0, 1.1, 1.6]), st.sampled_from(REACHES), st.booleans())
def test_moves_fit_and_help(case: Case, busiest: float, reach: int, local: bool) -> None:
    split = "local_first" if local else "proportional"
    moves = case.level(busiest, reach, local)
    assert moves == case.level(busiest, reach, local)
    free = [*case.ranks.free]
    limit = busiest * case.mean
    assert len({move.expert for move in moves}) == len(moves)
    for number, move in enumerate(moves, start=1):
        owner = int(case.owner_E[move.expert])
        assert move.guests and owner not in move.guests and len({*move.guests}) == len(move.guests)
        assert move.primary == owner or [move.primary] == move.guests
        for rank in move.guests:
            free[rank] -= 1
            assert reach != NEAR or rank // case.ranks.node_size == owner // case.ranks.node_size
        # The owner of the moved expert was the heaviest rank, and no rank becomes heavier than that
        earlier_D = case.after(moves[: number - 1], split)
        later_D = case.after(moves[:number], split)
        assert earlier_D[owner] == pytest.approx(earlier_D.max(), rel=1e-9) and earlier_D[owner] > limit
        if len({*case.rates}) == 1:
            assert later_D.max() <= earlier_D.max() * (1 + 1e-9)
    assert min(free, default=0) >= 0


def fewest_guests(case: Case, expert: int, limit: float) -> int | None:
    """Return the fewest guests on any ranks with which all hosts of an expert are within the limit; slow."""
    owner = int(case.owner_E[expert])
    size = float(case.counts_ED[expert].sum())
    rooms = [limit * rate - load for rate, load in zip(case.rates, case.loads, strict=True)]
    able = sorted((rooms[rank] for rank, slots in enumerate(case.ranks.free) if slots and rank != owner), reverse=True)
    for number in range(1, len(able) + 1):
        share = size / (number + 1)
        if able[number - 1] >= share and rooms[owner] + size >= share:
            return number
    return None


@given(drawn, st.sampled_from([1.05, 1.3, 1.6]))
def test_the_first_expert_gets_the_fewest_guests_that_suffice(case: Case, busiest: float) -> None:
    moves = case.level(busiest, ANYWHERE, local=False)
    limit = busiest * case.mean
    time_D = np.array(case.loads) / case.rates
    heaviest = int(time_D.argmax())
    if not moves or (time_D > time_D.max() * (1 - 1e-9)).sum() > 1:
        return
    size, expert = case.experts[heaviest][-1]
    expected = fewest_guests(case, expert, limit)
    if expected is not None and moves[0].expert == expert:
        rooms = [limit * rate - load for rate, load in zip(case.rates, case.loads, strict=True)]
        assert len(moves[0].guests) == expected
        assert min(rooms[rank] for rank in moves[0].guests) >= size / (expected + 1) * (1 - 1e-6)


def test_reaches() -> None:
    # Rank 0 has 8 tokens of expert 0, each other rank 1 of its own
    experts = [[(8.0, 0)], *([(1.0, rank)] for rank in range(1, 8))]
    loads = [8.0, *[1.0] * 7]

    def guests(reach: int, busiest: float) -> list[int]:
        (move,) = level(Ranks([1.0] * 8, [2] * 8, 4), experts, loads, busiest, reach=reach)
        return move.guests

    assert guests(ANYWHERE, 3.0) == [1, 2, 3]
    assert guests(ALL_NODES, 3.0) == [1, 2, 4]
    # One guest on the other node, even where more are not needed
    assert guests(ANYWHERE, 5.0) == [1] and guests(ALL_NODES, 5.0) == [4]
    # Within the node there is room for three guests only
    assert guests(NEAR, 2.0) == [1, 2, 3] and guests(ANYWHERE, 2.0) == [1, 2, 3, 4, 5, 6, 7]


def test_guests_compute_their_own_tokens_or_all_of_them() -> None:
    experts = [[(12.0, 0)], [(1.0, 1)], [(1.0, 2)], [(2.0, 3)]]
    loads = [12.0, 1.0, 1.0, 2.0]
    tokens = [[1.0, 2.0, 5.0, 4.0], *([0.25] * 4 for _ in range(3))]
    ranks = Ranks([1.0] * 4, [2] * 4, 4)
    # Rank 2 holds most of the tokens, then rank 3
    assert level(ranks, experts, loads, 7.0, reach=ANYWHERE, tokens=tokens) == [Move(0, [2], 0)]
    assert level(ranks, experts, loads, 6.0, reach=ANYWHERE, tokens=tokens) == [Move(0, [2, 3], 0)]
    # No other rank has tokens of the expert, but rank 1 can compute all of them while rank 0 has another expert
    experts = [[(3.0, 4), (4.0, 0)], [(1.0, 1)], [(1.0, 2)], [(2.0, 3)]]
    loads = [7.0, 1.0, 1.0, 2.0]
    tokens = [[0.0, 0.0, 0.0, 4.0]] * 5
    full = ranks._replace(free=[2, 2, 2, 0])
    assert level(full, experts, loads, 5.0, reach=ANYWHERE, tokens=tokens) == [Move(0, [1], 1)]
