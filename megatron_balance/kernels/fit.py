"""`planning.fit.fit` on the device, to the bit.

The host never reads a value, so it does not wait for the device. One program makes the moves of one layer. It uses
whole numbers, a fixed order and no atomics, so ranks with the same loads find the same moves.

A value and its index form one int64 key, value * 2**INDEX_BITS + index: one maximum finds both, and breaks ties as in
`planning.fit`. All state stays in the program's registers.

In shapes, M counts moves, N states (one before each move and one at the end), and F the fields of a move.
"""

# triton is not a requirement, and pyright does not know how its kernels are launched
# pyright: reportMissingImports=false, reportIndexIssue=false

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from megatron_balance.planning.fit import BUSIEST, FILLING, PARTS, WHOLE

INDEX_BITS = 20
"""Experts, and ranks with the last node counted as full, are fewer than 2**INDEX_BITS."""

_BITS = tl.constexpr(INDEX_BITS)
_INDEX = tl.constexpr((1 << INDEX_BITS) - 1)
_NONE = tl.constexpr(-(1 << 62))
"""A key below all others."""
_ALL = tl.constexpr(1 << 62)
"""A key above all others."""
_PARTS = tl.constexpr(PARTS)
_FILLING = tl.constexpr(FILLING)
_WHOLE = tl.constexpr(WHOLE)

EXPERTS_PER_WARP = 512
"""16 keys per thread."""

MAX_WARPS = 8


class Fits(NamedTuple):
    """The moves of each layer, int64, on the device of the loads. Entries after a layer's last move are 0."""

    moves_LMF: torch.Tensor
    """[L, D * (S + 1), 4] fields of `planning.fit.TokenMoves`: expert, source, target, tokens."""
    number_L: torch.Tensor
    """Number of moves."""
    excess_LN: torch.Tensor
    """[L, D * (S + 1) + 1] `planning.fit.Fitted.excess`."""
    quotas_LED: torch.Tensor
    """Movable tokens of each expert that each rank computes."""


def fit(
    tokens_LDS: torch.Tensor,
    experts_LDS: torch.Tensor,
    loads_LD: torch.Tensor,
    capacities_LD: torch.Tensor,
    slots_LD: torch.Tensor,
    *,
    num_experts: int,
    node_size: int,
    far: int = PARTS,
    reaches_far: bool = True,
    order: int = BUSIEST,
) -> Fits:
    """Move each layer's tokens as `planning.fit.fit` does, without waiting for the device.

    Tensors are int64, on one CUDA device; in host memory if the environment has TRITON_INTERPRET=1.

    Args:
        tokens_LDS: movable tokens of a rank's experts, in any order, below 2**42; 0: no such expert.
        experts_LDS: numbers of these experts, below num_experts; each occurs once in a layer.
        loads_LD: tokens of each rank, including tokens that must stay, below 2**42.
        capacities_LD: maximum tokens of each rank, below 2**42.
        slots_LD: number of guests that a rank can take.
        num_experts: number of logical experts.
        node_size: number of consecutive ranks that share a node.
        far: cost of a guest on another node, relative to PARTS for one on the owner's node; below 2**INDEX_BITS.
        reaches_far: whether guests may be on other nodes than the owner.
        order: one of `planning.fit.ORDERS`.
    """
    layers, ranks, homes = tokens_LDS.shape
    # No rank has room and excess; each move exhausts an expert, a room or, unless guests are filled, an excess
    most = ranks * (homes + 1)
    fits = Fits(
        moves_LMF=tokens_LDS.new_zeros(layers, most, 4),
        number_L=tokens_LDS.new_zeros(layers),
        excess_LN=tokens_LDS.new_zeros(layers, most + 1),
        quotas_LED=tokens_LDS.new_zeros(layers, num_experts, ranks),
    )
    given = (tensor.contiguous() for tensor in (tokens_LDS, experts_LDS, loads_LD, capacities_LD, slots_LD))
    chosen = constants(ranks, homes, num_experts, node_size=node_size, reaches_far=reaches_far, order=order)
    fit_kernel[(layers,)](*given, *fits, far, **chosen, num_warps=warps(ranks * homes))
    return fits


def constants(
    ranks: int, homes: int, num_experts: int, *, node_size: int, reaches_far: bool, order: int
) -> dict[str, int | bool]:
    """Return the constants that the kernel is compiled for."""
    return {
        "RANKS": ranks,
        "HOMES": homes,
        "EXPERTS": num_experts,
        "NODE_SIZE": node_size,
        "REACHES_FAR": reaches_far,
        "ORDER": order,
        "RANKS_BLOCK": triton.next_power_of_2(ranks),
        "HOMES_BLOCK": triton.next_power_of_2(ranks * homes),
    }


def warps(experts: int) -> int:
    """Return the number of warps for a layer with this many experts, a power of two."""
    return min(MAX_WARPS, max(1, triton.next_power_of_2(experts) // EXPERTS_PER_WARP))


@triton.jit(do_not_specialize=["far"])
def fit_kernel(
    tokens_LDS,
    experts_LDS,
    loads_LD,
    capacities_LD,
    slots_LD,
    moves_LMF,
    number_L,
    excess_LN,
    quotas_LED,
    far,
    RANKS: tl.constexpr,
    HOMES: tl.constexpr,
    EXPERTS: tl.constexpr,
    NODE_SIZE: tl.constexpr,
    REACHES_FAR: tl.constexpr,
    ORDER: tl.constexpr,
    RANKS_BLOCK: tl.constexpr,
    HOMES_BLOCK: tl.constexpr,
):
    """Make the moves of one layer, given by the program's number. See `fit` and `constants` for the arguments."""
    layer = tl.program_id(0).to(tl.int64)
    moves = moves_LMF + layer * (RANKS * (HOMES + 1) * 4)
    states = excess_LN + layer * (RANKS * (HOMES + 1) + 1)
    quotas = quotas_LED + layer * (EXPERTS * RANKS)
    movable, owner = _read_experts(tokens_LDS, experts_LDS, layer, RANKS, HOMES, HOMES_BLOCK)
    rank = tl.arange(0, RANKS_BLOCK)
    node = rank // NODE_SIZE
    above, rooms, slots = _read_ranks(loads_LD, capacities_LD, slots_LD, layer, rank, RANKS, NODE_SIZE)
    number = 0
    busiest = tl.max(above)
    giving = tl.max(above)
    kept = tl.full([], 0, tl.int64)
    stuck = tl.min(above) >> _BITS
    tl.store(states, busiest >> _BITS)
    while (busiest >> _BITS) > 0:
        if ORDER != _WHOLE:
            giving = busiest
        stays = (giving >> _BITS) > 0
        giving = tl.where(stays, giving, busiest)
        excess = giving >> _BITS
        source = giving & _INDEX
        largest = tl.max(tl.where(owner == source, movable, 0))
        if ORDER == _WHOLE:
            largest = tl.where(stays & ((kept >> _BITS) > 0), kept, largest)
        wanted = largest >> _BITS if ORDER == _FILLING else tl.minimum(largest >> _BITS, excess)
        chosen = tl.max(tl.where(node == source // NODE_SIZE, rooms, 0))
        if REACHES_FAR:
            chosen = _worth(wanted, chosen, tl.max(rooms), far)
        if ORDER == _WHOLE:
            chosen = _tightest(wanted, chosen, rooms, node == source // NODE_SIZE)
        moved = tl.minimum(wanted, chosen >> _BITS)
        if moved > 0:
            target = _mirrored(chosen & _INDEX, RANKS, NODE_SIZE)
            movable -= tl.where(movable == largest, moved << _BITS, 0)
            above -= tl.where(rank == source, moved << _BITS, 0)
            slots -= tl.where(rank == target, 1, 0)
            # A rank without slots has no room
            rooms -= tl.where(rank == target, tl.where(slots != 0, moved, chosen >> _BITS) << _BITS, 0)
            rooms += tl.where((rank == source) & (slots != 0), tl.maximum(moved - excess, 0) << _BITS, 0)
            busiest = tl.max(above)
            giving = tl.max(tl.where(rank == source, above, _NONE))
            kept = largest - (moved << _BITS)
            _write_move(moves + number * 4, largest & _INDEX, source, target, moved)
            tl.store(quotas + (largest & _INDEX) * RANKS + target, moved)
            number += 1
            tl.store(states + number, tl.maximum(busiest >> _BITS, stuck))
        else:
            stuck = tl.maximum(stuck, excess)
            above = tl.where(rank == source, _NONE, above)
            busiest = tl.max(above)
            giving = _NONE
    tl.store(number_L + layer, number)
    tl.store(quotas + (movable & _INDEX) * RANKS + owner, movable >> _BITS, mask=(movable >> _BITS) > 0)


@triton.jit
def _read_experts(tokens_LDS, experts_LDS, layer, RANKS: tl.constexpr, HOMES: tl.constexpr, HOMES_BLOCK: tl.constexpr):
    """Return keys (tokens, expert) of all experts, and the experts' owners."""
    home = tl.arange(0, HOMES_BLOCK)
    at = layer * (RANKS * HOMES) + home
    present = home < RANKS * HOMES
    tokens = tl.load(tokens_LDS + at, mask=present, other=0)
    return (tokens << _BITS) + tl.load(experts_LDS + at, mask=present, other=0), home // HOMES


@triton.jit
def _read_ranks(loads_LD, capacities_LD, slots_LD, layer, rank, RANKS: tl.constexpr, NODE_SIZE: tl.constexpr):
    """Return keys (excess, rank) and (room, mirrored rank), and the number of slots."""
    at = layer * RANKS + rank
    present = rank < RANKS
    slots = tl.load(slots_LD + at, mask=present, other=0)
    excess = tl.load(loads_LD + at, mask=present, other=0) - tl.load(capacities_LD + at, mask=present, other=0)
    room = tl.where((excess < 0) & (slots != 0), -excess, 0)
    above = tl.where(present, (excess << _BITS) + rank, _NONE)
    return above, tl.where(present, (room << _BITS) + _mirrored(rank, RANKS, NODE_SIZE), 0), slots


@triton.jit
def _mirrored(rank, RANKS: tl.constexpr, NODE_SIZE: tl.constexpr):
    """Return the rank with the order of nodes reversed; its own inverse. The largest of keys with equal rooms then
    belongs to the first node, and to the last rank within a node."""
    return ((RANKS - 1) // NODE_SIZE - rank // NODE_SIZE) * NODE_SIZE + rank % NODE_SIZE


@triton.jit
def _worth(wanted, near, other, far):
    """Return the key of the room to use: `near`, or `other` if that is worth the cost of another node."""
    takes = tl.minimum(wanted, near >> _BITS)
    reached = tl.minimum(wanted, other >> _BITS)
    return tl.where((takes < wanted) & (reached * _PARTS > takes * far), other, near)


@triton.jit
def _tightest(wanted, roomiest, rooms, is_home):
    """Return the key of the smallest room that takes all wanted tokens, if `roomiest` does; otherwise `roomiest`. Rooms
    on the source's node take precedence."""
    takes = (rooms >> _BITS) >= wanted
    at_home = tl.min(tl.where(takes & is_home, rooms, _ALL))
    tightest = tl.where(at_home < _ALL, at_home, tl.min(tl.where(takes, rooms, _ALL)))
    return tl.where((roomiest >> _BITS) >= wanted, tightest, roomiest)


@triton.jit
def _write_move(at, expert, source, target, tokens):
    tl.store(at, expert)
    tl.store(at + 1, source)
    tl.store(at + 2, target)
    tl.store(at + 3, tokens)
