"""Random placements and loads for property tests."""

import numpy as np
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel
from megatron_balance.cost.network import Level
from megatron_balance.placement.placement import Placement

UNSHRUNK = settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))
"""Settings for slow properties of many numbers: examples are already small, and shrinking one takes minutes."""


@st.composite
def placements(draw: st.DrawFn, with_quotas: bool = True) -> Placement:
    """Draw any small, valid placement: permuted homes, guests, several vExperts on a rank, lent experts, quotas."""
    ranks, slots, guest_slots = draw(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 3)))
    order = draw(st.permutations(range(ranks * slots)))
    home = tuple(tuple(order[rank * slots : (rank + 1) * slots]) for rank in range(ranks))
    guests = []
    for own in home:
        others = [expert for expert in order if expert not in own]
        chosen = st.lists(st.sampled_from(others), unique=True, max_size=guest_slots) if others else st.just([])
        row = draw(chosen)
        guests.append(tuple(draw(st.permutations(row + [-1] * (guest_slots - len(row))))))
    hosts = []
    quotas = []
    for expert in range(ranks * slots):
        on = [rank for rank, row in enumerate(guests) if expert in row]
        copies = {rank: draw(st.integers(1, 3)) for rank in on}
        owner = next(rank for rank, row in enumerate(home) if expert in row)
        copies[owner] = draw(st.integers(0 if on else 1, 3))
        has_quotas = with_quotas and draw(st.booleans())
        times = {rank: min(number, 1) if has_quotas else number for rank, number in copies.items()}
        hosts.append(tuple(rank for rank in sorted(times) for _ in range(times[rank])))
        quotas.append(tuple(draw(st.integers(1, 10**6)) for _ in hosts[-1]) if has_quotas else ())
    primary = tuple(draw(st.sampled_from(row)) for row in hosts)
    return Placement(
        num_experts=ranks * slots,
        home=home,
        guests=tuple(guests),
        hosts=tuple(hosts),
        primary=primary,
        quotas=tuple(quotas) if any(quotas) else (),
    )


@st.composite
def loads(draw: st.DrawFn, placement: Placement, largest: int = 10**8) -> torch.Tensor:
    """Draw tokens [D, E] of each source rank for each expert: many zeros, small numbers and large numbers."""
    cells = placement.num_ranks * placement.num_experts
    tokens = st.one_of(st.just(0), st.integers(0, 9), st.integers(0, largest))
    counts = draw(st.lists(tokens, min_size=cells, max_size=cells))
    return torch.tensor(counts, dtype=torch.int64).view(placement.num_ranks, placement.num_experts)


def random_placement(num_experts: int, num_ranks: int, guest_slots: int, seed: int) -> Placement:
    """Return ordered owners with random guests (at least one on rank 0), some lent experts and any primary hosts."""
    generator = np.random.default_rng(seed)
    owners = Placement.identity(num_experts, num_ranks, guest_slots)
    hosts = [[owners.owner(expert)] for expert in range(num_experts)]
    for rank in range(num_ranks):
        strangers = [expert for expert in range(num_experts) if owners.owner(expert) != rank]
        for expert in generator.permutation(strangers)[: generator.integers(rank == 0, guest_slots + 1)]:
            hosts[expert] += [rank] * int(generator.integers(1, 3))
    for expert, row in enumerate(hosts):
        if len(row) > 1 and generator.random() < 0.4:
            row.remove(owners.owner(expert))
    return owners.rehost(hosts, [int(generator.choice(row)) for row in hosts])


def physicals_of(placement: Placement) -> list[list[int]]:
    """Return [E]: the physical experts that compute each logical expert, by ascending rank."""
    tables = placement.tables
    return [row.tolist() for row in np.split(tables.physical_N, tables.first_E[1:-1])]


def rank_seconds(cost: CostModel, loads_FBD: np.ndarray) -> np.ndarray:
    """Return [B, D]: each rank's computation and exchanges beyond latencies, FlexMoE's Eq. 7 and 8."""

    def busy(level: Level, sent_BD: np.ndarray, received_BD: np.ndarray) -> np.ndarray:
        low_BD, high_BD = np.minimum(sent_BD, received_BD), np.maximum(sent_BD, received_BD)
        return level.beta * (low_BD + level.one_way * (high_BD - low_BD))

    computed_BD, *exchanged = loads_FBD
    near_BD, far_BD = busy(cost.network.near, *exchanged[:2]), busy(cost.network.far, *exchanged[2:])
    per_token = cost.profile.forward.seconds_per_token + cost.profile.backward.seconds_per_token
    exchanging_BD = 4 * cost.token_bytes * cost.exchange.scale * np.maximum(near_BD, far_BD)
    return exchanging_BD + per_token * computed_BD / cost.rate_D
