"""DEMI's scheduling problem of one MoE layer (its Section III). D is the paper's M workers, E its K experts.

In the paper, an expert has one worker. If an expert is on several workers, its parts are experts of the problem.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

WEIGHTS = ("pow2", "linear")
"""Weights omega_t of time slots: 2^t for pow2, t + 1 for linear."""

MOST_DOUBLINGS = 40
"""Slot from which pow2 is constant, so that long schedules do not overflow."""

FEWEST_SLOTS = 3
"""Minimum T: sending a token, computing it and sending it back take one slot each (6a and 6c)."""

TOLERANCE = 1e-8
"""Relative rounding error allowed in sums of sizes and capacities."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Work of one MoE layer, and the capacities for it. All sizes have one unit, such as bytes."""

    tokens_DE: np.ndarray
    """d, [D, E] float64: size of the tokens that each source routes to each expert."""
    owner_E: np.ndarray
    """b, [E] int64: the worker that owns each expert."""
    size_E: np.ndarray
    """w, [E]: size that crosses a link if an expert migrates; 0 if migration is free."""
    link_DD: np.ndarray
    """Z^comm, [D, D]: size that can cross each link in a slot; above 0 except on the diagonal."""
    compute_D: np.ndarray
    """Z^comp, [D]: size of the tokens that each worker can compute in a slot; above 0."""
    token_room_D: np.ndarray
    """C, [D]: total size of the tokens that each worker may compute."""
    expert_room_D: np.ndarray
    """Q, [D]: total size of the experts that each worker may host."""
    slots: int = 5
    """T: number of slots of the linear program, at least FEWEST_SLOTS. Schedules may be longer."""
    weights: str = "pow2"
    """Weights of the slots: a name in WEIGHTS."""
    guests: int | None = None
    """Number of other workers' experts that each worker may host; None: unlimited."""
    part_of_E: np.ndarray | None = None
    """[E] int64, ascending: the whole expert that each expert is a part of; None: all are whole."""

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
    def whole_E(self) -> np.ndarray:
        """[E]: the whole expert that each expert is (a part of)."""
        return np.arange(self.num_experts) if self.part_of_E is None else self.part_of_E

    @cached_property
    def load_E(self) -> np.ndarray:
        """[E]: size of each expert's tokens."""
        return self.tokens_DE.sum(0)

    @cached_property
    def passage_DD(self) -> np.ndarray:
        """`link_DD` with infinity on the diagonal: local data crosses no link."""
        return np.where(np.eye(self.num_workers, dtype=bool), np.inf, self.link_DD)

    def divided(self, parts_E: np.ndarray) -> "Problem":
        """Return the problem with each expert split into `parts_E` equal parts. Two parts of an expert on one worker
        count as two experts, although the worker receives the expert only once. So solutions spread the parts."""
        whole_E = np.repeat(np.arange(self.num_experts), parts_E)
        return self.of_parts(self.tokens_DE[:, whole_E] / parts_E[whole_E], whole_E)

    def of_parts(self, tokens_DE: np.ndarray, whole_E: np.ndarray) -> "Problem":
        """Return the problem in which the experts `whole_E` are replaced by parts with these tokens."""
        owner_E = self.owner_E[whole_E]
        size_E = self.size_E[whole_E]
        # Owners have room for all parts of their experts
        owned_D = np.bincount(owner_E, weights=size_E, minlength=self.num_workers)
        return replace(
            self,
            tokens_DE=tokens_DE,
            owner_E=owner_E,
            size_E=size_E,
            expert_room_D=np.maximum(self.expert_room_D, owned_D),
            part_of_E=whole_E,
        )

    def weight(self, slot: int) -> float:
        """Return omega_t of a slot."""
        return 2.0 ** min(slot, MOST_DOUBLINGS) if self.weights == "pow2" else slot + 1.0

    def use(self, hosts_BE: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return size of tokens, size of experts and number of other workers' experts on each worker, each [B, D]."""
        count = len(hosts_BE)
        workers = self.num_workers
        cells = (hosts_BE + workers * np.arange(count)[:, None]).ravel()

        def summed(values: np.ndarray) -> np.ndarray:
            weights = np.broadcast_to(values, hosts_BE.shape).ravel()
            return np.bincount(cells, weights=weights, minlength=count * workers).reshape(count, workers)

        return summed(self.load_E), summed(self.size_E), summed((hosts_BE != self.owner_E).astype(np.float64))

    def rooms(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the bounds (3a), (3b) and `guests` on the values of `use`, each [D]."""
        guests_D = np.full(self.num_workers, np.inf if self.guests is None else self.guests)
        return self.token_room_D * (1 + TOLERANCE), self.expert_room_D * (1 + TOLERANCE), guests_D

    def fits(self, hosts_BE: np.ndarray) -> np.ndarray:
        """Return [B] bool: whether placements are within all bounds."""
        pairs = zip(self.use(hosts_BE), self.rooms(), strict=True)
        return np.logical_and.reduce([(used_BD <= room_D).all(1) for used_BD, room_D in pairs])
