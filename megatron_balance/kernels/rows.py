"""A layer's rows on the device: their order, copies of tokens, and sums of rows.

See flow/rows.py and comm/blocks.py for functions and arguments. No two programs write to the same memory, so there are
no atomics, and results are deterministic to the bit.

In shapes, B counts blocks of tokens.
"""

# triton is not a requirement, and pyright does not know how its kernels are launched
# pyright: reportMissingImports=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl

TOKENS_BLOCK = 32
"""Tokens per program of the kernels that find the order of rows."""

COLUMNS_BLOCK = 64
"""Maximum columns of a routing that a program reads at once; with more, registers overflow."""

INDEX_BLOCK = 1024

HIDDEN_BLOCK = 1024
"""Maximum elements of a row that a program copies or adds up."""


def row_order(routing_TE: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    """Return the order of a routing [T, E] bool by expert, with `rows` true entries: the token of each row [R] and the
    three tensors of a `flow.rows.RowPlaces`, all int32. With another number of true entries, the order has no meaning,
    but its values are valid indices."""
    tokens, experts = routing_TE.shape
    chosen_TE = routing_TE.contiguous().view(torch.uint8)
    order = chosen_TE.new_zeros(3 * rows + tokens, dtype=torch.int32).split([rows, rows, rows, tokens])
    blocks = triton.cdiv(tokens, TOKENS_BLOCK)
    if not blocks:
        return order
    counts_EB = chosen_TE.new_empty((experts, blocks), dtype=torch.int32)
    counts_T = chosen_TE.new_empty(tokens, dtype=torch.int32)
    constants = order_constants(experts)
    count_kernel[(blocks,)](chosen_TE, counts_EB, counts_T, tokens, blocks, **constants)
    ends_EB, ends_T = (counts.view(-1).cumsum(0, dtype=torch.int32) for counts in (counts_EB, counts_T))
    order_kernel[(blocks,)](chosen_TE, ends_EB, ends_T, *order, tokens, blocks, rows, **constants)
    return order


def order_constants(experts: int) -> dict[str, int]:
    """Return the constants that the kernels of `row_order` are compiled for."""
    columns = min(COLUMNS_BLOCK, triton.next_power_of_2(experts))
    return {"EXPERTS": experts, "TOKENS_BLOCK": TOKENS_BLOCK, "COLUMNS_BLOCK": columns}


def block_index(ends_N: torch.Tensor, shift_N: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [rows] int32: each row's index plus the shift of its block; see comm/blocks.py."""
    index_R = torch.empty(rows, dtype=torch.int32, device=ends_N.device)
    if rows:
        steps = len(ends_N).bit_length()
        grid = (triton.cdiv(rows, INDEX_BLOCK),)
        block_index_kernel[grid](ends_N, shift_N, index_R, rows, len(ends_N), steps, BLOCK=INDEX_BLOCK)
    return index_R


def gather_rows(tokens_TH: torch.Tensor, by_token_R: torch.Tensor, first_T: torch.Tensor, rows: int) -> torch.Tensor:
    """Copy each row from its token, reading each token once: [T, H] -> [rows, H]."""
    tokens_TH = tokens_TH.contiguous()
    rows_RH = tokens_TH.new_empty(rows, *tokens_TH.shape[1:])
    _launch(copy_kernel, tokens_TH, rows_RH, by_token_R, first_T, {})
    return rows_RH


def combine(rows_RH: torch.Tensor, by_token_R: torch.Tensor, first_T: torch.Tensor) -> torch.Tensor:
    """Sum each token's rows in the order of `by_token_R`: [R, H] -> [T, H]."""
    rows_RH = rows_RH.contiguous()
    tokens_TH = rows_RH.new_empty(len(first_T), *rows_RH.shape[1:])
    wide = tl.float64 if rows_RH.dtype == torch.float64 else tl.float32
    _launch(sum_kernel, tokens_TH, rows_RH, by_token_R, first_T, {"WIDE": wide})
    return tokens_TH


def hidden_block(hidden: int) -> int:
    """Return the number of a row's elements that a program handles."""
    return min(HIDDEN_BLOCK, triton.next_power_of_2(hidden))


def _launch(kernel, tokens_TH, rows_RH, by_token_R, first_T, constants: dict) -> None:
    tokens, hidden = tokens_TH.shape
    if tokens and hidden:
        block = hidden_block(hidden)
        grid = (tokens, triton.cdiv(hidden, block))
        kernel[grid](
            tokens_TH, rows_RH, by_token_R, first_T, tokens, len(by_token_R), hidden, HIDDEN_BLOCK=block, **constants
        )


@triton.jit
def count_kernel(
    chosen_TE,
    counts_EB,
    counts_T,
    tokens,
    blocks,
    EXPERTS: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    COLUMNS_BLOCK: tl.constexpr,
):
    """Count the choices of each expert within this block of tokens, and the choices of each token."""
    block = tl.program_id(0)
    token = block * TOKENS_BLOCK + tl.arange(0, TOKENS_BLOCK)
    of_token = tl.zeros([TOKENS_BLOCK], tl.int32)
    for first in tl.range(0, EXPERTS, COLUMNS_BLOCK):
        expert = first + tl.arange(0, COLUMNS_BLOCK)
        chosen = _chosen(chosen_TE, token, expert, tokens, EXPERTS)
        tl.store(counts_EB + expert * blocks + block, tl.sum(chosen, 0), mask=expert < EXPERTS)
        of_token += tl.sum(chosen, 1)
    tl.store(counts_T + token, of_token, mask=token < tokens)


@triton.jit
def order_kernel(
    chosen_TE,
    ends_EB,
    ends_T,
    token_R,
    place_R,
    by_token_R,
    first_T,
    tokens,
    blocks,
    rows,
    EXPERTS: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    COLUMNS_BLOCK: tl.constexpr,
):
    """Write the rows of this block of tokens; skip rows beyond the number of rows."""
    block = tl.program_id(0)
    token = block * TOKENS_BLOCK + tl.arange(0, TOKENS_BLOCK)
    before = token - 1
    at_token = tl.load(ends_T + before, mask=(before >= 0) & (before < tokens), other=0)
    tl.store(first_T + token, at_token, mask=token < tokens)
    for first in tl.range(0, EXPERTS, COLUMNS_BLOCK):
        expert = first + tl.arange(0, COLUMNS_BLOCK)
        chosen = _chosen(chosen_TE, token, expert, tokens, EXPERTS)
        cell = expert * blocks + block - 1
        at_expert = tl.load(ends_EB + cell, mask=(cell >= 0) & (expert < EXPERTS), other=0)
        row = at_expert[None, :] + tl.cumsum(chosen, 0) - chosen
        turn = at_token[:, None] + tl.cumsum(chosen, 1) - chosen
        kept = (chosen != 0) & (row < rows) & (turn < rows)
        tl.store(token_R + row, tl.broadcast_to(token[:, None], row.shape), mask=kept)
        tl.store(place_R + row, token[:, None] * EXPERTS + expert[None, :], mask=kept)
        tl.store(by_token_R + turn, row, mask=kept)
        at_token += tl.sum(chosen, 1)


@triton.jit
def _chosen(chosen_TE, token, expert, tokens, EXPERTS: tl.constexpr):
    present = (token[:, None] < tokens) & (expert[None, :] < EXPERTS)
    at = token[:, None].to(tl.int64) * EXPERTS + expert[None, :]
    return tl.load(chosen_TE + at, mask=present, other=0).to(tl.int32)


@triton.jit
def block_index_kernel(ends_N, shift_N, index_R, rows, blocks, steps, BLOCK: tl.constexpr):
    """Find each row's block (the first block that ends after the row) by bisection."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + blocks - 1
    for _ in tl.range(0, steps):
        middle = (low + high) // 2
        behind = tl.load(ends_N + middle) > row
        high = tl.where(behind, middle, high)
        low = tl.where(behind, low, tl.minimum(middle + 1, high))
    tl.store(index_R + row, row + tl.load(shift_N + low), mask=row < rows)


@triton.jit
def copy_kernel(tokens_TH, rows_RH, by_token_R, first_T, tokens, number, hidden, HIDDEN_BLOCK: tl.constexpr):
    """Copy a part of this token to all its rows."""
    token = tl.program_id(0)
    column = tl.program_id(1) * HIDDEN_BLOCK + tl.arange(0, HIDDEN_BLOCK)
    present = column < hidden
    values = tl.load(tokens_TH + token.to(tl.int64) * hidden + column, mask=present)
    begin, end = _range(first_T, token, tokens, number)
    for turn in tl.range(begin, end):
        row = tl.load(by_token_R + turn).to(tl.int64)
        tl.store(rows_RH + row * hidden + column, values, mask=present)


@triton.jit
def sum_kernel(
    tokens_TH,
    rows_RH,
    by_token_R,
    first_T,
    tokens,
    number,
    hidden,
    HIDDEN_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum a part of this token's rows in order, and round once."""
    token = tl.program_id(0)
    column = tl.program_id(1) * HIDDEN_BLOCK + tl.arange(0, HIDDEN_BLOCK)
    present = column < hidden
    total = tl.zeros([HIDDEN_BLOCK], WIDE)
    begin, end = _range(first_T, token, tokens, number)
    for turn in tl.range(begin, end):
        row = tl.load(by_token_R + turn).to(tl.int64)
        total += tl.load(rows_RH + row * hidden + column, mask=present, other=0).to(WIDE)
    tl.store(tokens_TH + token.to(tl.int64) * hidden + column, total.to(tokens_TH.dtype.element_ty), mask=present)


@triton.jit
def _range(first_T, token, tokens, number):
    """Return the range of a token's rows in `by_token_R`."""
    end = tl.load(first_T + token + 1, mask=token + 1 < tokens, other=number)
    return tl.load(first_T + token), end
