"""flow/rows.py: rows and their sums equal dense ones and megatron-core's, are deterministic, and cause no waits."""

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_utils import permute, unpermute

from megatron_balance.comm.blocks import Gather, gather_of, gathers
from megatron_balance.flow import cut as cutting
from megatron_balance.flow import rows
from megatron_balance.flow.chunks.order import split_evenly
from megatron_balance.flow.plan import DispatchPlan
from megatron_balance.flow.rows import row_order, sending
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SplitName
from tests.block_index import block_index
from tests.unit.placements import physicals_of, placements


class _Copies(torch.autograd.Function):
    """What the layer computes forward and backward, as functions that autograd knows."""

    @staticmethod
    def forward(ctx, tokens_TH, order):
        ctx.order = order
        return rows.gather_rows(tokens_TH, order)

    @staticmethod
    def backward(ctx, *gradients):
        return rows.combine(gradients[0], ctx.order), None


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RH, order):
        ctx.order = order
        return rows.combine(rows_RH, order)

    @staticmethod
    def backward(ctx, *gradients):
        return rows.gather_rows(gradients[0], ctx.order), None


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, probs_TE, order):
        ctx.order = order
        ctx.shape = probs_TE.shape
        return rows.gather_weights(probs_TE, order)

    @staticmethod
    def backward(ctx, *gradients):
        return rows.scatter_weights(gradients[0], ctx.order, ctx.shape), None


gather_rows = _Copies.apply
combine = _Sums.apply
gather_weights = _Weights.apply

CPU = torch.device("cpu")
DEVICE = torch.cuda.current_device()


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def dense_mixture(tokens_TH: torch.Tensor, probs_TP: torch.Tensor, routing_TP: torch.Tensor) -> torch.Tensor:
    """Sum each token's copies, multiplied by the column's number plus one and by the weight."""
    factor_P = torch.arange(1, routing_TP.shape[1] + 1, device=DEVICE)
    return tokens_TH * (probs_TP * routing_TP * factor_P).sum(1, keepdim=True)


@st.composite
def routings(draw: st.DrawFn) -> torch.Tensor:
    # A GPU compiles kernels for every number of columns
    tokens = draw(st.integers(0, 9))
    columns = draw(st.sampled_from([1, 3, 7]))
    chosen = draw(st.lists(st.booleans(), min_size=tokens * columns, max_size=tokens * columns))
    return torch.tensor(chosen, dtype=torch.bool).view(tokens, columns)


@settings(max_examples=80)
@given(routings(), st.sampled_from([1, 3]))
def test_rows_and_sums_equal_dense_ones(routing_TP: torch.Tensor, hidden: int) -> None:
    (tokens, columns), routing_TP = routing_TP.shape, routing_TP.to(DEVICE)
    tokens_TH = random(tokens, hidden)
    probs_TP = random(tokens, columns)
    order = row_order(routing_TP, int(routing_TP.sum()))
    rows_RH = gather_rows(tokens_TH, order)
    probs_R = gather_weights(probs_TP, order)
    by_column = [tokens_TH[routing_TP[:, column]] for column in range(columns)]
    assert torch.equal(rows_RH, torch.cat(by_column))
    assert torch.equal(probs_R, torch.cat([probs_TP[routing_TP[:, one], one] for one in range(columns)]))

    factor_R = torch.cat([torch.full((len(part),), column + 1.0) for column, part in enumerate(by_column)]).to(DEVICE)
    found = combine(rows_RH * (probs_R * factor_R).unsqueeze(1), order)
    expected = dense_mixture(tokens_TH, probs_TP, routing_TP)
    gradient = torch.randn_like(expected)
    results = [(one, *torch.autograd.grad(one, (tokens_TH, probs_TP), gradient)) for one in (found, expected)]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def with_chunks(tokens: int, columns: int, topk: int, seed: int) -> torch.Tensor:
    """Let every token choose `topk` columns; drop some of these, and all columns of one token in six."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, columns, generator=generator).topk(topk).indices
    routing_TP = torch.zeros(tokens, columns, dtype=torch.bool).scatter(1, chosen, True)
    routing_TP &= torch.rand(tokens, columns, generator=generator) < 0.8
    return (routing_TP & (torch.rand(tokens, 1, generator=generator) < 5 / 6)).to(DEVICE)


def forward_and_backward(ours: bool, routing_TP: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return rows, weights, output and gradients of one pass with scaled rows."""
    torch.manual_seed(1)
    tokens_TH = random(len(routing_TP), 40, dtype=dtype)
    probs_TP = random(*routing_TP.shape, dtype=torch.float32)
    gradient_TH = torch.randn_like(tokens_TH)
    count = int(routing_TP.sum())
    if ours:
        order = row_order(routing_TP, count)
        rows_RH = gather_rows(tokens_TH, order)
        probs_R = gather_weights(probs_TP, order)
        output = combine((rows_RH * probs_R.unsqueeze(1)).to(dtype), order)
    else:
        rows_RH, probs_R, order, *_ = permute(tokens_TH, routing_TP, probs=probs_TP, num_out_tokens=count)
        assert probs_R is not None
        scaled_RH = (rows_RH * probs_R.unsqueeze(1)).to(dtype)
        output = unpermute(scaled_RH, order, restore_shape=tokens_TH.shape, routing_map=routing_TP)
    gradients = torch.autograd.grad(output, (tokens_TH, probs_TP), gradient_TH)
    return [rows_RH.detach(), probs_R.detach(), output.detach(), *gradients]


@pytest.mark.skipif(torch.cuda.is_available(), reason="megatron-core's sums vary there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bits_are_those_of_megatron_on_a_cpu(dtype: torch.dtype) -> None:
    routing_TP = with_chunks(150, 24, topk=8, seed=0)
    for ours, theirs in zip(*(forward_and_backward(one, routing_TP, dtype) for one in (True, False)), strict=True):
        assert torch.equal(ours, theirs)


def test_sums_of_bfloat16_are_rounded_once() -> None:
    routing_TP = with_chunks(100, 16, topk=8, seed=2)
    count = int(routing_TP.sum())
    order = row_order(routing_TP, count)
    rows_RH = random(count, 24, dtype=torch.bfloat16)
    exact_TH = combine(rows_RH.float(), order)
    # Kernels may choose differently between two equally near numbers
    error_TH, least_TH = ((one.float() - exact_TH).abs() for one in (combine(rows_RH, order), exact_TH.bfloat16()))
    assert torch.equal(error_TH, least_TH)
    (gradient_RH,) = torch.autograd.grad(combine(rows_RH, order), rows_RH, exact_TH.bfloat16())
    assert torch.equal(gradient_RH, exact_TH.bfloat16()[order.token_R])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_same_bits_every_time(dtype: torch.dtype) -> None:
    routing_TP = with_chunks(200, 24, topk=8, seed=3)
    first, *others = (forward_and_backward(True, routing_TP, dtype) for _ in range(3))
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


def sent(placement: Placement, map_TE: torch.Tensor, tokens_CDP: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (token, place, index of the row by expert) in the order in which rows are sent, chosen one by one.

    A token takes the first member, host and chunk of its expert, in this order, with tokens left in the plan.
    """
    left = tokens_CDP.tolist()
    target = {}
    sent_rows = []
    for expert, token in map_TE.T.nonzero().tolist():
        member, physical, chunk = next(
            (member, physical, chunk)
            for member in range(len(left[0]))
            for physical in physicals_of(placement)[expert]
            for chunk in range(len(left))
            if left[chunk][member][physical]
        )
        left[chunk][member][physical] -= 1
        target[len(sent_rows)] = (member, chunk, physical, token)
        sent_rows.append((token, token * placement.num_experts + expert))
    assert not any(number for chunk in left for member in chunk for number in member)
    for index in sorted(target, key=target.__getitem__):
        yield *sent_rows[index], index


@settings(max_examples=200)
@given(placements(), st.integers(0, 12), st.integers(1, 3), st.integers(1, 3), st.integers(0, 10**6))
def test_rows_are_sent_as_planned(placement: Placement, tokens: int, chunks: int, members: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    map_TE = torch.rand(tokens, placement.num_experts, generator=generator) < 0.4
    counts_ME = split_evenly(map_TE.sum(0, keepdim=True), members)[:, 0]
    counts_DE = counts_ME.repeat(placement.num_ranks, 1)
    plan = DispatchPlan(counts_DE, placement, "proportional")
    tokens_CDP = split_evenly(plan.tokens_DP, chunks)[:, :members]
    there = sending(placement, tokens_CDP.numpy())
    order = row_order(map_TE, int(map_TE.sum()))
    gather, back = gathers([there, there.back], order.token_R.device)
    moved = order.moved(gather, back if seed % 2 else None)
    expected = torch.tensor([*sent(placement, map_TE, tokens_CDP)], dtype=torch.int32).view(-1, 3)
    assert torch.equal(torch.stack([moved.token_R.to(torch.int32), moved.rest.place_R], 1), expected[:, :2])
    assert torch.equal(order.token_R[expected[:, 2]], moved.token_R)
    # Whatever their places, a token's rows are added up by expert
    assert torch.equal(
        moved.rest.place_R[moved.rest.by_token_R], map_TE.reshape(-1).nonzero().flatten().to(torch.int32)
    )
    assert torch.equal(moved.rest.first_T, order.rest.first_T)


@settings(max_examples=200)
@given(placements(), st.integers(0, 12), st.sampled_from(["local_first", "proportional"]), st.booleans(), st.randoms())
def test_one_loop_finds_the_same(
    placement: Placement, tokens: int, split: SplitName, by_block: bool, random: Random
) -> None:
    ranks = placement.num_ranks
    generator = torch.Generator().manual_seed(random.randrange(10**6))
    counts_DE = torch.randint(0, 1 + tokens, (ranks, placement.num_experts), generator=generator)
    plan = DispatchPlan(counts_DE, placement, split, random.choice([None, *range(1, ranks + 1)]))
    rank = random.randrange(ranks)

    def room(blocks: int, most_rows: int, device: torch.device) -> torch.Tensor:
        return torch.full((2, blocks) if by_block else (1, most_rows), -1, dtype=torch.int32, device=device)

    def gather(room: torch.Tensor, rows: int, device: torch.device) -> Gather:
        if not by_block:
            return gather_of(room, rows, device)
        shift_N, end_N = room
        assert int(end_N[-1]) == rows
        sizes_N = end_N.diff(prepend=torch.zeros_like(end_N[:1]))
        return gather_of(block_index(shift_N, sizes_N, rows)[None], rows, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "gather_room", room)
        patch.setattr(cutting, "gather_of", gather)
        most_rows = int(counts_DE[rank].sum()) + random.randrange(3)
        found = cutting.cut(plan, rank, most_rows, CPU)
        part = cutting.cut(plan, rank, most_rows, CPU, whole=False)
    tokens_CDP = plan.tokens_DP.numpy()[None]
    (expected,) = gathers([sending(placement, tokens_CDP[:, [rank]])], CPU)
    rows = torch.arange(int(plan.tokens_DP[rank].sum()))
    (splits_DW,) = found.splits
    assert found.rows == len(rows) == int(splits_DW[rank].sum())
    assert torch.equal(splits_DW, plan.splits_DW)
    assert np.array_equal(found.received_CDS, tokens_CDP.reshape(1, ranks, ranks, -1)[:, :, rank])
    own_DW = torch.full_like(splits_DW, -1)
    own_DW[rank] = splits_DW[rank]
    own_DW[:, rank] = splits_DW[:, rank]
    assert torch.equal(part.splits[0], own_DW) and np.array_equal(part.received_CDS, found.received_CDS)
    assert (found.move.index_R is None) == (expected.index_R is None) and torch.equal(found.move(rows), expected(rows))


def test_sums_do_not_depend_on_hosts_and_chunks() -> None:
    placement = Placement.identity(6, 3, guest_slots=2).with_hosts([(0, 1), (0, 2), (4, 0)])
    torch.manual_seed(3)
    map_TE = torch.rand(60, 6) < 0.6
    plan = DispatchPlan(map_TE.sum(0).repeat(3, 1), placement, "proportional")
    there = sending(placement, split_evenly(plan.tokens_DP, 4)[:, :1].numpy())
    order = row_order(map_TE, int(map_TE.sum()))
    forth, back = gathers([there, there.back], order.token_R.device)
    rows_RH = torch.randn(len(order.token_R), 7)
    assert back.index_R is not None
    assert torch.equal(combine(forth(rows_RH), order.moved(forth, back)), combine(rows_RH, order))


def test_more_rows_than_expected_are_found_again() -> None:
    """A routing without the expected number of entries must not be an error: the layer then finds its order again."""
    routing_TP = with_chunks(40, 8, topk=3, seed=5)
    for count in (0, 1, 40 * 3, 40 * 8):
        order = row_order(routing_TP, count)
        assert len(order) == len(order.rest.place_R) == len(order.rest.by_token_R) == count
