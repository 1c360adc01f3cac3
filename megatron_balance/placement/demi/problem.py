"""DEMI's scheduling problem of one MoE layer (its Section III).

Letters for sizes: D workers (the paper's M), E experts (its K), B placements.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

WEIGHTS = ("pow2", "linear")
"""omega_t. pow2: 2^t. linear: t + 1."""

MOST_DOUBLINGS = 40
"""pow2 stays the same from this slot on, so that no schedule is too long for floating point."""

FEWEST_SLOTS = 3
"""A token that is sent, computed and sent back needs a slot for each (6a and 6c)."""

TOLERANCE = 1e-8
"""Share of a size or capacity by which sums of floating-point numbers may miss it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """What there is to do in one MoE layer, and what with. Sizes are in any one unit, such as bytes."""

    tokens_DE: np.ndarray
    """d, [D, E] float64: size of the tokens that each source routes to each expert."""

    owner_E: np.ndarray
    """b, [E] int64: where each expert is at first."""

    size_E: np.ndarray
    """w, [E]: what crosses a link if an expert migrates; 0 if that costs nothing."""

    link_DD: np.ndarray
    """Z^comm, [D, D]: what crosses the link from one worker to another in a slot; above 0 but on the diagonal."""

    compute_D: np.ndarray
    """Z^comp, [D]: size of the tokens that each worker computes in a slot; above 0."""

    token_room_D: np.ndarray
    """C, [D]: size of the tokens that each worker may compute in all."""

    expert_room_D: np.ndarray
    """Q, [D]: size of the experts that each worker may have."""

    slots: int = 5
    """T of the linear program, at least FEWEST_SLOTS. Schedules take as many as they need."""

    weights: str = "pow2"
    """A name in WEIGHTS."""

    guests: int | None = None
    """How many experts of others each worker may take; None: any number."""

    def __post_init__(self) -> None:
        assert self.slots >= FEWEST_SLOTS and self.weights in WEIGHTS
        assert (self.compute_D > 0).all() and (self.link_DD[~np.eye(self.num_workers, dtype=bool)] > 0).all()

    @property
    def num_workers(self) -> int:
        return self.tokens_DE.shape[0]

    @property
    def num_experts(self) -> int:
        return self.tokens_DE.shape[1]

    @cached_property
    def load_E(self) -> np.ndarray:
        """Size of each expert's tokens."""
        return self.tokens_DE.sum(0)

    @cached_property
    def passage_DD(self) -> np.ndarray:
        """`link_DD` with no bound on the diagonal: what stays on a worker crosses nothing."""
        return np.where(np.eye(self.num_workers, dtype=bool), np.inf, self.link_DD)

    @property
    def most_guests(self) -> float:
        return np.inf if self.guests is None else self.guests

    def weight(self, slot: int) -> float:
        """omega_t"""
        return 2.0 ** min(slot, MOST_DOUBLINGS) if self.weights == "pow2" else slot + 1.0

    @property
    def weight_T(self) -> np.ndarray:
        """omega of the linear program's slots."""
        return np.array([self.weight(slot) for slot in range(self.slots)])

    def use(self, hosts_BE: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each [B, D]: size of the tokens and of the experts, and number of others' experts, on each worker."""
        count, workers = len(hosts_BE), self.num_workers
        cells = (hosts_BE + workers * np.arange(count)[:, None]).ravel()

        def summed(values: np.ndarray) -> np.ndarray:
            weights = np.broadcast_to(values, hosts_BE.shape).ravel()
            return np.bincount(cells, weights=weights, minlength=count * workers).reshape(count, workers)

        return summed(self.load_E), summed(self.size_E), summed((hosts_BE != self.owner_E).astype(np.float64))

    def rooms(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each [D]: the bounds (3a), (3b) and `guests` on what `use` gives."""
        guests_D = np.full(self.num_workers, self.most_guests)
        return self.token_room_D * (1 + TOLERANCE), self.expert_room_D * (1 + TOLERANCE), guests_D

    def fits(self, hosts_BE: np.ndarray) -> np.ndarray:
        """[B] bool: whether placements keep within all rooms."""
        pairs = zip(self.use(hosts_BE), self.rooms(), strict=True)
        return np.logical_and.reduce([(used_BD <= room_D).all(1) for used_BD, room_D in pairs])
