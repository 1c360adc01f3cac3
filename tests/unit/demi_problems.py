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
