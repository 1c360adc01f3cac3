"""Arrays that a placement alone determines, for what is computed anew from every load.

In shapes, N counts the physical experts in use, and M the experts with several hosts; K is the largest number of hosts
of an expert.
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
    owners: Sequence[int]
    guests: Sequence[Sequence[int]]
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
    def guests_3M(self) -> np.ndarray:
        """[3, M] int64: owners, experts and ranks of all guests, by ascending rank and slot. Here, M counts guests."""
        guests_DG = np.array(self.guests, dtype=np.int64).reshape(self.num_ranks, -1)
        rank_M, slot_M = (guests_DG >= 0).nonzero()
        expert_M = guests_DG[rank_M, slot_M]
        return np.stack([np.array(self.owners, dtype=np.int64)[expert_M], expert_M, rank_M])

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
    def only_E(self) -> np.ndarray:
        """[E]: the first physical expert of each logical one."""
        return np.array([row[0] for row in self.physicals])

    @cached_property
    def shares_ED(self) -> np.ndarray:
        """[E, D] int64: how the ranks share an expert's tokens; 0 where the rank is not a host.

        They are the placement's quotas, and 1 for each vExpert of experts without quotas.
        """
        return shares_of(self.hosts, self.quotas, self.num_ranks)

    @cached_property
    def shared_M(self) -> np.ndarray:
        """[M]: the experts with several hosts."""
        return np.flatnonzero([len(row) > 1 for row in self.physicals])

    @cached_property
    def shares_MD(self) -> np.ndarray:
        return self.shares_ED[self.shared_M]

    @cached_property
    def primary_M(self) -> np.ndarray:
        return np.asarray(self.primary)[self.shared_M]

    @cached_property
    def physicals_EK(self) -> np.ndarray:
        """[E, K]: the physical experts of each logical one; each row ends in copies of its last one."""
        width = max(map(len, self.physicals))
        return np.array([(*row, *[row[-1]] * (width - len(row))) for row in self.physicals])

    @cached_property
    def physicals_MK(self) -> np.ndarray:
        return self.physicals_EK[self.shared_M]

    @cached_property
    def ranks_MK(self) -> np.ndarray:
        """[M, K]: the ranks of `physicals_MK`."""
        return self.physicals_MK // self.slots_per_rank

    @cached_property
    def is_host_MK(self) -> np.ndarray:
        """[M, K] bool: whether this is a host, not a copy of one."""
        number_M = np.array([len(self.physicals[expert]) for expert in self.shared_M])
        return np.arange(self.physicals_MK.shape[1]) < number_M[:, None]

    @cached_property
    def shared_physical_N(self) -> np.ndarray:
        """The physical experts of the experts with several hosts, row after row of `is_host_MK`."""
        return self.physicals_MK[self.is_host_MK]


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
