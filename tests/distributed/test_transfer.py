"""Trans and Agg of random plans: guests get exact copies, and owners get sums in a fixed order."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_balance.comm.trans_agg import TransAgg, cut
from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.trans_plan import ROUTES, TransPlan, hops, plan_hops
from tests.unit.placements import random_placement

SHAPES = ((30, 25), (1,), (3, 5), (7, 111))
"""Some pieces are part of one tensor, some of several."""

CASES = 6


class Kept:
    """Weights and gradients of one rank's slots; seeds are the expert for weights, expert and rank for gradients."""

    def __init__(self, placement: Placement, rank: int) -> None:
        experts = [*placement.home[rank], *placement.guests[rank]]
        nothing = [torch.full(shape, torch.nan) for shape in SHAPES]
        self.weights = [drawn(expert) for expert in placement.home[rank]] + [
            [tensor.clone() for tensor in nothing] for _ in placement.guests[rank]
        ]
        self.gradients = [drawn(expert, rank) if expert != EMPTY else nothing for expert in experts]

    def reset(self, placement: Placement, rank: int) -> None:
        """Draw new gradients, and forget the guests' weights, in the same memory."""
        experts = [*placement.home[rank], *placement.guests[rank]]
        for slot, expert in enumerate(experts):
            for tensor, new in zip(self.gradients[slot], drawn(expert, rank), strict=True):
                tensor.copy_(new if expert != EMPTY else torch.full_like(new, torch.nan))
            if slot >= placement.home_slots:
                for tensor in self.weights[slot]:
                    tensor.fill_(torch.nan)

    def ready(self) -> None:
        raise AssertionError("Trans and Agg run on threads that may call no module")

    def weights_of(self, slot: int) -> list[torch.Tensor]:
        return self.weights[slot]

    def gradients_of(self, slot: int) -> list[torch.Tensor]:
        return self.gradients[slot]


def drawn(*seeds: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum((seed + 1) * 1000**index for index, seed in enumerate(seeds)))
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def expected_sum(plan: TransPlan, expert: int, rank: int) -> list[torch.Tensor]:
    """Return a rank's own gradients plus those from the ranks that it sent to, rounded after each addition."""
    by_rank: dict[int, list[torch.Tensor]] = {}

    for messages in reversed(plan.rounds):
        for message in messages:
            if message.expert == expert:
                into, out = (by_rank.setdefault(end, drawn(expert, end)) for end in (message.source, message.target))
                pieces = (cut(tensors, message.piece, message.pieces) for tensors in (into, out))
                for total, more in zip(*pieces, strict=True):
                    total.add_(more)
    return by_rank.get(rank, drawn(expert, rank))


def run_random_plans(seed: int) -> None:
    """Run several plans over one TransAgg without waiting for other ranks in between."""
    group = dist.group.WORLD
    assert group is not None
    trans_agg = TransAgg(group)
    rank = group.rank()
    num_ranks = group.size()
    generator = np.random.default_rng([seed, num_ranks])
    for case in range(CASES):
        slots, node_size, pieces, route = generator.integers(1, [4, num_ranks + 1, 9, 4]).tolist()
        placement = random_placement(2 * num_ranks, num_ranks, min(slots, 2 * num_ranks - 2), case)
        plan = plan_hops(hops(placement, node_size, ROUTES[route - 1]), pieces)
        kept = Kept(placement, rank)
        first, rest = plan.split(int(generator.integers(len(plan.rounds) + 1)))
        for again in range(2):
            if again:
                # The same objects: what was prepared is used once more
                kept.reset(placement, rank)
            trans_agg.trans(first, placement, kept)
            trans_agg.trans(rest, placement, kept)
            trans_agg.agg(rest, placement, kept)
            trans_agg.agg(first, placement, kept)
            check(plan, placement, kept, rank)


@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 64, 5000])
def test_pieces_are_all_of_an_expert(chunks: int) -> None:
    tensors = [torch.arange(index, index + tensor.numel()) for index, tensor in enumerate(drawn(0))]
    pieces = [cut([tensor.clone().view(1, -1) for tensor in tensors], chunk, chunks) for chunk in range(chunks)]
    assert torch.equal(torch.cat([part for piece in pieces for part in piece]), torch.cat(tensors))
    assert all(part.numel() for piece in pieces for part in piece)
    assert sum(map(len, pieces)) <= chunks + len(SHAPES) - 1


def check(plan: TransPlan, placement: Placement, kept: Kept, rank: int) -> None:
    for slot, expert in enumerate(placement.home[rank]):
        assert all(map(torch.equal, kept.gradients[slot], expected_sum(plan, expert, rank)))
        assert all(map(torch.equal, kept.weights[slot], drawn(expert)))
    for slot, expert in enumerate(placement.guests[rank], placement.home_slots):
        if expert != EMPTY:
            assert all(map(torch.equal, kept.weights[slot], drawn(expert)))
            assert not any(tensor.any() for tensor in kept.gradients[slot])


@pytest.mark.parametrize("world_size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_random_plans(ranks, world_size: int) -> None:
    ranks(world_size).run(run_random_plans, 0)
