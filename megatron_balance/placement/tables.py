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

    home: Sequence[Sequence[int]]
    guests: Sequence[Sequence[int]]
    owners: Sequence[int]
    hosts: Sequence[Sequence[int]]
    quotas: Sequence[Sequence[int]]
    primary: Sequence[int]

    def complete(self) -> None:
        """Compute all arrays, so that nobody has to wait for one later."""
        for name, member in vars(Tables).items():
            if isinstance(member, cached_property):
                getattr(self, name)

    @cached_property
    def guests_3M(self) -> np.ndarray:
        """[3, M] int64: owners, experts and ranks of all guests, by ascending rank and slot. Here, M counts guests."""
        guests_DG = _table(self.guests)
        rank_M, slot_M = (guests_DG >= 0).nonzero()
        expert_M = guests_DG[rank_M, slot_M]
        return np.stack([np.array(self.owners, dtype=np.int64)[expert_M], expert_M, rank_M])

    @cached_property
    def slots_per_rank(self) -> int:
        return len(self.home[0]) + len(self.guests[0])

    @cached_property
    def expert_P(self) -> np.ndarray:
        """[P]: the logical expert that each physical one computes; -1 for none."""
        expert_DS = np.concatenate([_table(self.home), _table(self.guests)], axis=1)
        # The last expert stands in for none
        computes_DS = self.shares_ED[expert_DS, np.arange(len(expert_DS))[:, None]] > 0
        return np.where(computes_DS & (expert_DS >= 0), expert_DS, -1).ravel()

    @cached_property
    def physical_N(self) -> np.ndarray:
        """The physical experts of expert 0 by ascending rank, then those of expert 1, and so on."""
        used_N = (self.expert_P >= 0).nonzero()[0]
        return used_N[np.argsort(self.expert_P[used_N], kind="stable")]

    @cached_property
    def expert_N(self) -> np.ndarray:
        """The logical expert of each of `physical_N`."""
        return self.expert_P[self.physical_N]

    @cached_property
    def by_physical_N(self) -> np.ndarray:
        """Where the physical experts in use, in ascending order, are in `physical_N`."""
        return np.argsort(self.physical_N)

    @cached_property
    def first_E(self) -> np.ndarray:
        """[E + 1]: where each expert's physical experts begin in `physical_N`, and where the last ones end."""
        return np.searchsorted(self.expert_N, np.arange(len(self.hosts) + 1))

    @cached_property
    def share_N(self) -> np.ndarray:
        """How each of `physical_N` shares its expert's tokens: its part of `shares_ED`."""
        return self.shares_ED[self.expert_N, self.physical_N // self.slots_per_rank]

    @cached_property
    def primary_E(self) -> np.ndarray:
        """[E]: the host of tokens whose source rank is not a host."""
        return np.asarray(self.primary)

    @cached_property
    def hosting(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`first_E`, `physical_N`, `share_N` and `primary_E`: arguments of compiled loops."""
        return self.first_E, self.physical_N, self.share_N, self.primary_E

    @cached_property
    def in_place(self) -> bool:
        """Whether logical and physical experts are the same."""
        return len(self.physical_N) == len(self.expert_P) and bool((np.diff(self.expert_P) == 1).all())

    @cached_property
    def shares_ED(self) -> np.ndarray:
        """[E, D] int64: how the ranks share an expert's tokens; 0 where the rank is not a host.

        They are the placement's quotas, and 1 for each vExpert of experts without quotas.
        """
        return shares_of(self.hosts, self.quotas, len(self.home))

    @cached_property
    def physicals_EK(self) -> np.ndarray:
        """[E, K]: the physical experts of each logical one; each row ends in copies of its last one."""
        first_E1, after_E1 = self.first_E[:-1, None], self.first_E[1:, None]
        return self.physical_N[np.minimum(first_E1 + np.arange((after_E1 - first_E1).max()), after_E1 - 1)]


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


def _table(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return [rows, columns] int64 of rows that have the same length, maybe 0."""
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64).reshape(len(rows), len(rows[0]))


def _flat(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64)
