"""Arrays that a placement alone determines, for what is computed anew from every load.

In shapes, N counts the physical experts in use; K is the largest number of hosts of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np


@dataclass(frozen=True, eq=False, kw_only=True)
class Tables:
    """Arrays of one placement; `Placement` explains the fields. They must not be changed."""

    num_ranks: int
    slots_per_rank: int
    hosts: Sequence[Sequence[int]]
    quotas: Sequence[Sequence[int]]
    primary: Sequence[int]
    physicals: Sequence[Sequence[int]]

    def complete(self) -> None:
        """Compute all arrays, so that nobody has to wait for one later."""
        for name, member in vars(Tables).items():
            if isinstance(member, cached_property):
                getattr(self, name)

    @cached_property
    def physical_N(self) -> np.ndarray:
        """The physical experts of expert 0 by ascending rank, then those of expert 1, and so on."""
        return _flat(self.physicals)

    @cached_property
    def expert_N(self) -> np.ndarray:
        """The logical expert of each of `physical_N`."""
        return np.repeat(np.arange(len(self.physicals)), [len(row) for row in self.physicals])

    @cached_property
    def by_physical_N(self) -> np.ndarray:
        """Where the physical experts in use, in ascending order, are in `physical_N`."""
        return np.argsort(self.physical_N)

    @cached_property
    def expert_P(self) -> np.ndarray:
        """[P]: the logical expert that each physical one computes; -1 for none."""
        expert_P = np.full(self.num_ranks * self.slots_per_rank, -1)
        expert_P[self.physical_N] = self.expert_N
        return expert_P

    @cached_property
    def first_E(self) -> np.ndarray:
        """[E + 1]: where each expert's physical experts begin in `physical_N`, and where the last ones end."""
        return np.cumsum([0, *map(len, self.physicals)])

    @cached_property
    def share_N(self) -> np.ndarray:
        """How each of `physical_N` shares its expert's tokens: its part of `shares_ED`."""
        return self.shares_ED[self.expert_N, self.physical_N // self.slots_per_rank]

    @cached_property
    def primary_E(self) -> np.ndarray:
        """[E]: the host of tokens whose source rank is not a host."""
        return np.asarray(self.primary)

    @cached_property
    def in_place(self) -> bool:
        """Whether logical and physical experts are the same."""
        return len(self.physical_N) == self.num_ranks * self.slots_per_rank and bool(
            (np.diff(self.expert_P) == 1).all()
        )

    @cached_property
    def shares_ED(self) -> np.ndarray:
        """[E, D] int64: how the ranks share an expert's tokens; 0 where the rank is not a host.

        They are the placement's quotas, and 1 for each vExpert of experts without quotas.
        """
        return shares_of(self.hosts, self.quotas, self.num_ranks)

    @cached_property
    def physicals_EK(self) -> np.ndarray:
        """[E, K]: the physical experts of each logical one; each row ends in copies of its last one."""
        width = max(map(len, self.physicals))
        return np.array([(*row, *[row[-1]] * (width - len(row))) for row in self.physicals])


def shares_of(hosts: Sequence[Sequence[int]], quotas: Sequence[Sequence[int]], num_ranks: int) -> np.ndarray:
    """Return `Tables.shares_ED` for experts with these hosts; `quotas` is empty if no expert has quotas."""
    experts = len(hosts)
    cells = np.repeat(np.arange(experts) * num_ranks, [len(row) for row in hosts]) + _flat(hosts)
    if not quotas:
        return np.bincount(cells, minlength=experts * num_ranks).reshape(experts, num_ranks)
    rows = zip(quotas, hosts, strict=True)
    shares_ED = np.zeros((experts, num_ranks), dtype=np.int64)
    np.add.at(shares_ED.reshape(-1), cells, _flat([quotas or (1,) * len(row) for quotas, row in rows]))
    return shares_ED


def _flat(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64)
