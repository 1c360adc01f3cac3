"""Tokens in chunks: no token is lost, order is kept, sizes are even, and the number of chunks is chosen."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.flow.chunks.choice import DEGREES, ByMiniTasks, ByPrediction, ChunkChoice, find_degrees
from megatron_balance.flow.chunks.order import (
    UNSPLIT,
    ChunkTimes,
    Order,
    TaskTimes,
    parse,
    sequential,
    split_by,
    split_evenly,
    theorem_1,
)
from megatron_balance.flow.plan import DispatchPlan
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.demi import Demi
from megatron_balance.profile.cluster_profile import builtin
from megatron_balance.workloads.synthetic import load_matrix
from tests.unit.placements import physicals_of, random_placement


@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 9), st.integers(0, 2**31))
def test_chunks_are_even_and_lose_nothing(chunks: int, ranks: int, physicals: int, seed: int) -> None:
    tokens_DP = torch.from_numpy(np.random.default_rng(seed).integers(0, 20, (ranks, physicals)))
    tokens_CDP = split_evenly(tokens_DP, chunks)
    assert tokens_CDP.shape == (chunks, ranks, physicals)
    assert torch.equal(tokens_CDP.sum(0), tokens_DP)
    assert int(tokens_CDP.min()) >= 0 and int((tokens_CDP.amax(0) - tokens_CDP.amin(0)).max()) <= 1


def test_single_tokens_do_not_all_go_together() -> None:
    tokens_CDP = split_evenly(torch.ones(4, 8, dtype=torch.int64), 4)
    assert tokens_CDP.sum((1, 2)).tolist() == [8, 8, 8, 8]
    assert tokens_CDP.sum(1).max() == 1


class Model:
    """A time model: the time of all tokens together, plus an overhead per chunk."""

    def __init__(self, overhead: float) -> None:
        self.overhead = overhead
        self.asked = 0

    def times(self, tokens_DP: np.ndarray) -> tuple[ChunkTimes, ChunkTimes]:
        self.asked += 1
        exchange = tokens_DP.sum() / 100 + self.overhead
        compute = tokens_DP.sum() / 50 + self.overhead
        return tuple(ChunkTimes(0.0, exchange, 0.0, times * compute, 0.0, exchange, 0.0) for times in (1, 2))


def plan_of(tokens: int) -> object:
    placement = Placement.identity(4, 2, 0)
    return DispatchPlan(torch.full((2, 4), tokens), placement)


@pytest.mark.parametrize(("overhead", "chosen"), [(0.0, 16), (0.05, 4), (100.0, 1)])
def test_more_chunks_until_their_overhead_costs_more(overhead: float, chosen: int) -> None:
    said: list[str] = []
    choice = ChunkChoice(ByPrediction(DEGREES, theorem_1, Model(overhead)), lambda: 0, 10, said.append)
    chunking = choice(3, plan_of(10))
    assert chunking.chunks == chosen
    assert chunking.forward == chunking.backward == theorem_1((ChunkTimes(*[0.0] * 7),) * chosen)
    assert len(said) == 1 and said[0].startswith(f"layer 3: {chosen} chunk") and "16: " in said[0]


def test_a_choice_lasts_for_an_interval_and_through_a_checkpoint() -> None:
    now = 0
    model = Model(0.05)
    choice = ChunkChoice(ByPrediction(DEGREES, theorem_1, model), lambda: now, 10)
    first = choice(1, plan_of(10))
    asked = model.asked
    now = 9
    assert choice(1, plan_of(1000)) is first and model.asked == asked
    copy = ChunkChoice(ByPrediction(DEGREES, theorem_1, model), lambda: now, 10)
    copy.restore(choice.state())
    assert copy(1, plan_of(1000)) == first and model.asked == asked
    now = 10
    assert choice(1, plan_of(1000)).chunks > first.chunks
    assert choice(2, plan_of(0)).chunks == 1


class OneWayEach:
    """A time model in which chunks only cost time forward and only save time backward."""

    def times(self, tokens_SP: np.ndarray) -> tuple[ChunkTimes, ChunkTimes]:
        seconds = 1.25 * float(tokens_SP.sum())
        return ChunkTimes(0, 0, 0, 5, 0, 0, 0), ChunkTimes(0, seconds, 0, seconds, 0, 0, 0)


def test_forward_and_backward_passes_count() -> None:
    # d chunks of 80 tokens take 5 d seconds forward and 100 (1 + 1 / d) backward; alone, 1 and 16 would be fastest
    assert ByPrediction(DEGREES, theorem_1, OneWayEach())(plan_of(10))[0].chunks == 4


def test_a_users_order_is_checked() -> None:
    def impossible(times: TaskTimes) -> Order:
        return sequential(times)[:-1]

    choice = ByPrediction((2,), impossible, Model(0.0))
    with pytest.raises(ValueError, match=r"--moe-comm-order: .* chunk 1 ends after 4 tasks"):
        choice(plan_of(10))


@given(st.integers(1, 5), st.integers(2, 4), st.integers(0, 2**31))
def test_shares_lose_nothing(chunks: int, ranks: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    placement = random_placement(2 * ranks, ranks, 2, seed)
    plan = DispatchPlan(torch.from_numpy(generator.integers(0, 30, (ranks, 2 * ranks))), placement)
    shares_CDE = generator.random((chunks, ranks, 2 * ranks))
    shares_CDE /= shares_CDE.sum(0)
    # An expert that had no tokens when shares were chosen
    shares_CDE[:, :, 0] = 0.0
    tokens_CDP = split_by(shares_CDE.tolist(), plan)
    assert torch.equal(tokens_CDP.sum(0), plan.tokens_DP) and int(tokens_CDP.min()) >= 0
    expert_P = torch.from_numpy(plan.placement.tables.expert_P)
    expected = torch.from_numpy(shares_CDE)[:, :, expert_P] * plan.tokens_DP
    covered = expert_P > 0
    assert float((tokens_CDP - expected)[:, :, covered].abs().max()) <= 1


def test_mini_tasks_say_which_tokens_go_together() -> None:
    cost = CostModel(builtin(4, 4, 1024, 2048), token_bytes=2048, param_bytes=8e6, grad_bytes=8e6)
    load_DE = load_matrix("hot_rank", 4, 8, 2, 1024, 0, 0)
    owned = Placement.identity(8, 4, 2)
    placements = (owned, Demi(hosts=1).plan(load_DE, owned, cost), owned.with_hosts([(0, 1), (0, 2), (3, 2)]))
    for placement in placements:
        plan = DispatchPlan(torch.from_numpy(load_DE), placement, "proportional")
        schedule = Demi().schedule(plan.tokens_DP.numpy(), placement, cost)
        chunking, reason = ByMiniTasks(Demi(), cost)(plan)
        assert str(schedule) in reason
        tokens_CDP = chunking.split(plan)
        computed: dict[tuple[int, int], np.ndarray] = {}
        for mini_task, amounts in zip(schedule.mini_tasks, schedule.amounts, strict=True):
            if mini_task.task == "COMPUTE":
                sum_T = computed.setdefault((mini_task.source, mini_task.expert), np.zeros(schedule.makespan))
                sum_T[: len(amounts)] += amounts
        slots = np.any([*computed.values()], axis=0).nonzero()[0]
        assert chunking.chunks == len(slots) >= 2
        for (source, expert), sum_T in computed.items():
            sizes_C = tokens_CDP[:, source, [*physicals_of(placement)[expert]]].sum(1)
            rounding = len(placement.hosts[expert])
            assert sizes_C.tolist() == pytest.approx((sum_T[slots] / cost.token_bytes).tolist(), abs=rounding)


def test_mini_tasks_without_tokens() -> None:
    cost = CostModel(builtin(2, 2, 64, 64), token_bytes=128, param_bytes=0.0, grad_bytes=0.0)
    assert ByMiniTasks(Demi(), cost)(plan_of(0))[0] == UNSPLIT


@pytest.mark.parametrize(("chunks", "found"), [("auto", DEGREES), ("3", (3,))])
def test_numbers_of_chunks(chunks: str, found: tuple[int, ...]) -> None:
    assert find_degrees(chunks) == found


@pytest.mark.parametrize("chunks", ["0", "-1", "2.5", "many", ""])
def test_numbers_of_chunks_that_are_none(chunks: str) -> None:
    with pytest.raises(ValueError, match="--moe-comm-chunks"):
        find_degrees(chunks)


def test_all_at_once() -> None:
    assert UNSPLIT.chunks == 1 and UNSPLIT.forward == parse("C1.0 D1.0 E.0 C2.0 D2.0")
