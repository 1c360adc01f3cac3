"""Random DEMI problems for property tests."""

import numpy as np
from hypothesis import strategies as st

from megatron_balance.planning.demi.problem import WEIGHTS, Problem


@st.composite
def problems(draw: st.DrawFn, most_workers: int = 4, most_experts: int = 6) -> Problem:
    """Draw a problem whose owners stay within all limits: unequal links, workers and experts, some without tokens."""
    workers = draw(st.integers(1, most_workers))
    experts = draw(st.integers(1, most_experts))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    tokens_DE = np.rint(generator.lognormal(2, 1, (workers, experts)) * (generator.random((workers, experts)) < 0.8))
    owner_E = generator.integers(0, workers, experts)
    size_E = np.rint(generator.lognormal(2, 1, experts)) * draw(st.sampled_from([0, 1, 1]))
    scale = draw(st.sampled_from([3.0, 10.0, 100.0]))
    owned = [np.bincount(owner_E, weights=sizes_E, minlength=workers) for sizes_E in (tokens_DE.sum(0), size_E)]
    share = draw(st.sampled_from([0.5, 1.0]))
    return Problem(
        tokens_DE=tokens_DE,
        owner_E=owner_E,
        size_E=size_E,
        link_DD=scale * generator.uniform(0.5, 1.5, (workers, workers)),
        compute_D=scale * generator.uniform(0.5, 1.5, workers),
        token_room_D=np.maximum(owned[0], share * tokens_DE.sum()),
        expert_room_D=np.maximum(owned[1], share * size_E.sum()),
        slots=draw(st.integers(3, 8)),
        weights=draw(st.sampled_from(WEIGHTS)),
        guests=draw(st.sampled_from([None, 0, 1, 2])),
    )


def even_problem(tokens: list[list[float]], owners: list[int], **changes: object) -> Problem:
    """Return a problem with capacity 1, ample room and experts of size 1, except for `changes`."""
    tokens_DE = np.array(tokens, dtype=float)
    workers, experts = tokens_DE.shape
    values = {
        "size_E": np.ones(experts),
        "link_DD": np.ones((workers, workers)),
        "compute_D": np.ones(workers),
        "token_room_D": np.full(workers, tokens_DE.sum()),
        "expert_room_D": np.full(workers, float(experts)),
    }
    arrays = {
        name: np.asarray(value, dtype=float) if name in values else value for name, value in (values | changes).items()
    }
    return Problem(tokens_DE=tokens_DE, owner_E=np.array(owners), **arrays)


def instance(seed: int) -> Problem:
    """Return a random problem: skewed tokens, experts of different sizes, unequal links and workers, limited rooms."""
    generator = np.random.default_rng(seed)
    workers = int(generator.integers(2, 4))
    experts = int(generator.integers(3, 6))
    owner_E = np.sort(np.r_[generator.permutation(workers), generator.integers(0, workers, experts - workers)])
    popular_E = generator.lognormal(0, 0.8, experts)
    tokens_DE = np.rint(generator.lognormal(2, 1, (workers, experts)) * popular_E)
    tokens_DE[generator.random((workers, experts)) < 0.1] = 0
    load_E = tokens_DE.sum(0)
    mean = tokens_DE.sum() / experts
    size_E = np.rint(generator.uniform(0, 1) * generator.lognormal(0, 0.5, experts) * mean)
    link_DD = generator.uniform(0.5, 1.5, (workers, workers))
    compute_D = generator.uniform(0.5, 3, workers)
    owned_DD = np.zeros((workers, workers))
    np.add.at(owned_DD, owner_E, tokens_DE.T)
    crossing_DD = (owned_DD + owned_DD.T) * ~np.eye(workers, dtype=bool)
    busiest = max((crossing_DD / link_DD).max(), (owned_DD.sum(1) / compute_D).max())
    slot = max(busiest, 1.0) / generator.uniform(4, 7)
    rooms = [
        np.maximum(np.bincount(owner_E, weights=sizes_E, minlength=workers), sizes_E.max()).clip(share * sizes_E.sum())
        for sizes_E, share in zip((load_E, size_E), generator.uniform(0.5, 1, 2), strict=True)
    ]
    return Problem(
        tokens_DE=tokens_DE,
        owner_E=owner_E,
        size_E=size_E,
        link_DD=link_DD * slot,
        compute_D=compute_D * slot,
        token_room_D=rooms[0],
        expert_room_D=rooms[1],
        slots=8,
        guests=[None, 1, 2][generator.integers(3)],
    )
