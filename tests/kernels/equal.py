"""Comparison of the kernels with the functions that define them, on any device."""

from unittest import mock

import torch

from megatron_balance.flow import rows
from megatron_balance.kernels import rows as kernels
from tests.block_index import block_index


def routing(tokens: int, experts: int, density: float, seed: int) -> torch.Tensor:
    """Return a random routing [T, E]; experts differ in popularity, and some tokens choose none."""
    generator = torch.Generator().manual_seed(seed)
    popularity_E = 2 * density * torch.rand(experts, generator=generator) if density < 1 else torch.ones(experts)
    return torch.rand(tokens, experts, generator=generator) < popularity_E


def order_equal(routing_TE: torch.Tensor, device: str) -> None:
    """Assert that the kernels find the order that torch finds."""
    number = int(routing_TE.sum())
    found = kernels.row_order(routing_TE.to(device), number)
    expected = rows.row_order(routing_TE, number)
    for tensor, wanted in zip(found, (expected.token_R, *expected.rest), strict=True):
        assert tensor.dtype == torch.int32 and torch.equal(tensor.cpu(), wanted.to(torch.int32))
    for wrong in {0, number // 2, number + 5}:
        # Another number of rows than expected is found out later
        assert len(kernels.row_order(routing_TE.to(device), wrong)[0]) == wrong


def blocks_equal(sizes: list[int], seed: int, device: str) -> None:
    """Assert that blocks have the index that torch computes."""
    ends_N = torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32)
    shift_N = torch.randint(-100, 100, ends_N.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    found = kernels.block_index(ends_N.to(device), shift_N.to(device), sum(sizes))
    expected = block_index(shift_N, torch.tensor(sizes, dtype=torch.int32), sum(sizes))
    assert found.dtype == expected.dtype == torch.int32 and torch.equal(found.cpu(), expected)


def rows_equal(routing_TE: torch.Tensor, hidden: int, seed: int, device: str) -> None:
    """Assert that copies and sums have the bits of torch's; in bfloat16, sums within one unit in the last place."""
    number = int(routing_TE.sum())
    order = rows.row_order(routing_TE, number)
    # Rows may be anywhere
    place_R = torch.randperm(number, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    token_R = torch.empty_like(order.token_R)
    token_R[place_R] = order.token_R
    rest = order.rest.place_R, place_R[order.rest.by_token_R], order.rest.first_T
    order = rows.RowOrder(token_R, lambda: rows.RowPlaces(*rest))
    index = tuple(tensor.to(device) for tensor in (order.rest.by_token_R, order.rest.first_T))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        generator = torch.Generator().manual_seed(seed)
        tokens_TH = torch.randn(len(routing_TE), hidden, generator=generator).to(dtype)
        rows_RH = torch.randn(number, hidden, generator=generator).to(dtype)
        expected_RH = rows.gather_rows(tokens_TH, order)
        expected_TH = rows.combine(rows_RH, order)
        there = rows.RowOrder(token_R.to(device), lambda: rows.RowPlaces(rest[0].to(device), *index))
        with mock.patch.object(rows, "of_rows", lambda device: kernels):
            copies_RH = rows.gather_rows(tokens_TH.to(device), there).cpu()
            sums_TH = rows.combine(rows_RH.to(device), there).cpu()
        assert torch.equal(copies_RH, expected_RH)
        if dtype == torch.bfloat16:
            # Neighboring numbers are neighboring integers, on both sides of zero
            bits = (tensor.view(torch.int16).to(torch.int32) for tensor in (sums_TH, expected_TH))
            one_TH, other_TH = (torch.where(bits < 0, -32768 - bits, bits) for bits in bits)
            assert int((one_TH - other_TH).abs().max()) <= 1 if sums_TH.numel() else True
        else:
            assert torch.equal(sums_TH, expected_TH)
