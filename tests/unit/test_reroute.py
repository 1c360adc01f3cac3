"""Reroute: every token keeps its weights, and each physical expert receives its planned number of tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.flow.plan import DispatchPlan
from megatron_balance.flow.reroute import fixed_targets, reroute, reroute_to
from megatron_balance.placement.placement import Placement
from tests.unit.placements import physicals_of, placements


def routing(placement: Placement, seed: int, largest: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return router maps [T, E] for every source rank, with 0 to `largest` tokens, and their load matrix [D, E]."""
    generator = torch.Generator().manual_seed(seed)
    maps = []
    for _ in range(placement.num_ranks):
        tokens = int(torch.randint(largest + 1, (), generator=generator))
        # Experts have very different popularity
        popularity_E = torch.rand(placement.num_experts, generator=generator).square()
        maps.append(torch.rand(tokens, placement.num_experts, generator=generator) < popularity_E)
    return maps, torch.stack([map_TE.sum(0) for map_TE in maps])


def weights(map_TE: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.rand(map_TE.shape, generator=torch.Generator().manual_seed(1)) + 0.1).to(dtype) * map_TE


def reference(map_TE: torch.Tensor, plan: DispatchPlan, rank: int) -> torch.Tensor:
    """Compute map_TP token by token: each takes its expert's first host with tokens left in the plan."""
    left = plan.tokens_DP[rank].tolist()
    map_TP = torch.zeros(len(map_TE), plan.placement.num_physical, dtype=torch.bool)
    for token, expert in map_TE.nonzero().tolist():
        host = next(index for index in physicals_of(plan.placement)[expert] if left[index])
        left[host] -= 1
        map_TP[token, host] = True
    assert not any(left)
    return map_TP


@given(placements(), st.sampled_from(["local_first", "proportional"]), st.integers(0, 10**6), st.integers(0, 40))
def test_reroute(placement: Placement, split: str, seed: int, tokens: int) -> None:
    maps, counts_DE = routing(placement, seed, tokens)
    plan = DispatchPlan(counts_DE, placement, split)
    for rank, map_TE in enumerate(maps):
        probs_TE = weights(map_TE)
        probs_TP, map_TP = reroute(probs_TE, map_TE, plan, rank)
        assert map_TP.dtype == torch.bool
        assert torch.equal(map_TP, reference(map_TE, plan, rank))
        assert torch.equal(map_TP.sum(0), plan.tokens_DP[rank])
        assert not probs_TP[~map_TP].any()
        for expert, physicals in enumerate(physicals_of(placement)):
            assert torch.equal(probs_TP[:, list(physicals)].sum(1), probs_TE[:, expert])


@given(placements(), st.sampled_from(["local_first", "proportional"]), st.integers(0, 10**6), st.integers(0, 40))
def test_fixed_targets_need_no_load(placement: Placement, split: str, seed: int, tokens: int) -> None:
    maps, counts_DE = routing(placement, seed, tokens)
    plan = DispatchPlan(counts_DE, placement, split)
    shared = any(len(physicals) > 1 for physicals in physicals_of(placement))
    for rank, map_TE in enumerate(maps):
        target_E = fixed_targets(placement, split, rank)
        assert (target_E is None) == (shared and split == "proportional")
        if target_E is not None:
            probs_TE = weights(map_TE)
            both = reroute_to(target_E, probs_TE, map_TE, placement), reroute(probs_TE, map_TE, plan, rank)
            assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


@given(placements(), st.sampled_from(["local_first", "proportional"]), st.integers(0, 10**6))
def test_gradients_are_those_of_the_logical_map(placement: Placement, split: str, seed: int) -> None:
    maps, counts_DE = routing(placement, seed, largest=30)
    plan = DispatchPlan(counts_DE, placement, split)
    scale_E = torch.rand(placement.num_experts, dtype=torch.float64)
    scale_P = scale_E[torch.tensor(placement.tables.expert_P.tolist())]
    for rank, map_TE in enumerate(maps):
        probs_TE = weights(map_TE).requires_grad_()
        (expected,) = torch.autograd.grad(((probs_TE * scale_E)[map_TE] ** 3).sum(), probs_TE)
        probs_TP, map_TP = reroute(probs_TE, map_TE, plan, rank)
        (gradient,) = torch.autograd.grad(((probs_TP * scale_P)[map_TP] ** 3).sum(), probs_TE)
        assert torch.equal(gradient, expected)


def test_by_hand() -> None:
    """Of the four tokens for expert 0, the first goes to its owner, the next two to one guest, the last to another."""
    placement = Placement.parse("0 + . | 1 + 0 | 2 + 0")
    plan = DispatchPlan(torch.zeros(3, 3, dtype=torch.int64), placement)
    vars(plan)["tokens_DP"] = torch.tensor([[0] * 6, [0] * 6, [1, 0, 1, 2, 0, 1]])
    map_TE = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0]]).bool()
    probs_TE = torch.tensor([[0.1, 0, 0], [0.2, 0.3, 0], [0, 0, 0], [0.4, 0, 0], [0.5, 0, 0]])
    probs_TP, map_TP = reroute(probs_TE, map_TE, plan, source=2)
    expected = torch.zeros(5, 6)
    expected[0, 0] = 0.1
    expected[1, 3] = 0.2
    expected[1, 2] = 0.3
    expected[3, 3] = 0.4
    expected[4, 5] = 0.5
    assert torch.equal(probs_TP, expected)
    assert torch.equal(map_TP, expected > 0)


def test_identity_returns_its_arguments() -> None:
    placement = Placement.identity(4, 2)
    map_TE = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0]]).bool()
    probs_TE = weights(map_TE)
    plan = DispatchPlan(map_TE.sum(0).repeat(2, 1), placement)
    assert all(a is b for a, b in zip(reroute(probs_TE, map_TE, plan, 1), (probs_TE, map_TE), strict=True))


def test_identity_with_permuted_homes_is_a_permutation() -> None:
    placement = Placement.parse("3 0 | 2 1")
    assert placement.is_identity
    map_TE = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 0]]).bool()
    probs_TE = weights(map_TE)
    plan = DispatchPlan(map_TE.sum(0).repeat(2, 1), placement)
    probs_TP, map_TP = reroute(probs_TE, map_TE, plan, 0)
    assert torch.equal(probs_TP, probs_TE[:, [3, 0, 2, 1]])
    assert torch.equal(map_TP, map_TE[:, [3, 0, 2, 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_keep_their_type(dtype: torch.dtype) -> None:
    placement = Placement.identity(4, 2, guest_slots=1).with_hosts([(0, 1)])
    map_TE = torch.ones(6, 4, dtype=torch.bool)
    plan = DispatchPlan(map_TE.sum(0).repeat(2, 1), placement, "proportional")
    probs_TE = weights(map_TE, dtype)
    probs_TP, _ = reroute(probs_TE, map_TE, plan, 1)
    assert probs_TP.dtype == dtype
    assert torch.equal(probs_TP.sort(1).values[:, -4:], probs_TE.sort(1).values)
