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
        """Compute what a forward pass needs, so that none has to wait for it.

        `shares_ED` grows with the square of the ranks, and only policies and dispatch on the device need it.
        """
        for name, member in vars(Tables).items():
            if isinstance(member, cached_property) and name != "shares_ED":
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
    def _hosts_3N(self) -> np.ndarray:
        return hosts_of(self.hosts, self.quotas)

    @cached_property
    def expert_P(self) -> np.ndarray:
        """[P]: the logical expert that each physical one computes; -1 for none."""
        expert_P = np.full(len(self.home) * self.slots_per_rank, -1)
        expert_P[self.physical_N] = self.expert_N
        return expert_P

    @cached_property
    def physical_N(self) -> np.ndarray:
        """The physical experts of expert 0 by ascending rank, then those of expert 1, and so on."""
        slot_DS = np.concatenate([_table(self.home), _table(self.guests)], axis=1)
        (filled_P,) = (slot_DS.ravel() >= 0).nonzero()
        name_P = filled_P // self.slots_per_rank * len(self.hosts) + slot_DS.ravel()[filled_P]
        order_P = np.argsort(name_P)
        wanted_N = self.host_N * len(self.hosts) + self.expert_N
        return filled_P[order_P[np.searchsorted(name_P, wanted_N, sorter=order_P)]]

    @property
    def expert_N(self) -> np.ndarray:
        """The logical expert of each of `physical_N`."""
        return self._hosts_3N[0]

    @property
    def host_N(self) -> np.ndarray:
        """The rank of each of `physical_N`."""
        return self._hosts_3N[1]

    @property
    def share_N(self) -> np.ndarray:
        """How each of `physical_N` shares its expert's tokens: its part of `shares_ED`."""
        return self._hosts_3N[2]

    @cached_property
    def by_physical_N(self) -> np.ndarray:
        """Where the physical experts in use, in ascending order, are in `physical_N`."""
        return np.argsort(self.physical_N)

    @cached_property
    def first_E(self) -> np.ndarray:
        """[E + 1]: where each expert's physical experts begin in `physical_N`, and where the last ones end."""
        return np.searchsorted(self.expert_N, np.arange(len(self.hosts) + 1))

    @cached_property
    def primary_E(self) -> np.ndarray:
        """[E]: the host of tokens whose source rank is not a host."""
        return np.asarray(self.primary)

    @cached_property
    def hosting(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """`first_E`, `host_N`, `share_N` and `primary_E`: arguments of compiled loops."""
        return self.first_E, self.host_N, self.share_N, self.primary_E

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
        first_E1 = self.first_E[:-1, None]
        after_E1 = self.first_E[1:, None]
        return self.physical_N[np.minimum(first_E1 + np.arange((after_E1 - first_E1).max()), after_E1 - 1)]


def hosts_of(hosts: Sequence[Sequence[int]], quotas: Sequence[Sequence[int]]) -> np.ndarray:
    """Return [3, N] int64: experts, their hosts in ascending order, once each, and the hosts' shares of tokens.

    Args:
        quotas: empty if no expert has quotas.
    """
    expert_M = np.repeat(np.arange(len(hosts)), [len(row) for row in hosts])
    rank_M = _flat(hosts)
    share_M = np.ones_like(rank_M)
    if quotas:
        share_M = _flat([own or (1,) * len(row) for own, row in zip(quotas, hosts, strict=True)])
    # A host with several vExperts occurs several times
    (first_N,) = ((np.diff(expert_M, prepend=-1) != 0) | (np.diff(rank_M, prepend=-1) != 0)).nonzero()
    return np.stack([expert_M[first_N], rank_M[first_N], np.add.reduceat(share_M, first_N)])


def shares_of(hosts: Sequence[Sequence[int]], quotas: Sequence[Sequence[int]], num_ranks: int) -> np.ndarray:
    """Return `Tables.shares_ED` for experts with these hosts; `quotas` is empty if no expert has quotas."""
    expert_N, host_N, share_N = hosts_of(hosts, quotas)
    shares_ED = np.zeros((len(hosts), num_ranks), dtype=np.int64)
    shares_ED[expert_N, host_N] = share_N
    return shares_ED


def _table(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return [rows, columns] int64 of rows that have the same length, maybe 0."""
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64).reshape(len(rows), len(rows[0]))


def _flat(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64)
