"""Arrays derived from a placement, in one compiled loop that also finds out whether the placement is valid.

In shapes, N counts physical experts in use, X entries of hosts, Q quotas and M guests; K is the maximum number of hosts
of an expert.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Annotated, NamedTuple

import numpy as np

from megatron_balance.device.compiled import compiled
from megatron_balance.placement.text import EMPTY

MOST_TOKENS = 2**31 - 1
"""Maximum sum of an expert's quotas, and of its tokens, so a product of two such sums fits in int64."""

_Numbers = Annotated[np.ndarray, "int64[::1]"]
_Table = Annotated[np.ndarray, "int64[:,::1]"]


class Guests(NamedTuple):
    """Experts in guest slots, ordered by rank and slot."""

    owner_M: _Numbers
    expert_M: _Numbers
    rank_M: _Numbers


class HostTable(NamedTuple):
    """Hosts of all experts, ordered by expert, then by rank."""

    first_E: _Numbers
    """[E + 1]: index of each expert's first host, and the end of the last expert's hosts."""
    host_N: _Numbers
    share_N: _Numbers
    """Shares of the expert's tokens: see `Tables.shares_ED`."""
    primary_E: _Numbers


class Fields(NamedTuple):
    """The fields of a placement as arrays."""

    home_DS: _Table
    guests_DG: _Table
    hosts_E: _Numbers
    """Number of each expert's hosts; a rank counts once for each vExpert."""
    rank_X: _Numbers
    """Hosts of all experts, in order."""
    primary_E: _Numbers
    quotas_E: _Numbers
    """Number of each expert's quotas."""
    quota_Q: _Numbers


class Arrays(NamedTuple):
    """Arrays derived from a placement. They must not be changed."""

    is_valid: bool
    """Whether hosts, guest slots, primaries and quotas match; the arrays mean nothing otherwise."""
    num_ranks: int
    in_place: bool
    """Whether logical and physical experts have the same numbers."""
    guests: Guests
    """The experts in guest slots."""
    hosting: HostTable
    """The hosts of all experts, once each, and their shares of tokens."""
    expert_N: _Numbers
    """Logical expert of each entry of `physical_N`."""
    physical_N: _Numbers
    """Physical experts in use, ordered by logical expert, then by rank."""
    expert_P: _Numbers
    """[P]: logical expert of each physical expert; -1 for none."""
    by_physical_N: _Numbers
    """Indices into `physical_N` that sort it in ascending order."""


class Tables(Arrays):
    """The arrays of a valid placement, and those that are computed from them on demand."""

    @property
    def first_E(self) -> np.ndarray:
        """[E + 1]: index of each expert's first physical expert in `physical_N`, and the end of the last expert's."""
        return self.hosting.first_E

    @cached_property
    def shares_ED(self) -> np.ndarray:
        """[E, D] int64: relative shares of an expert's tokens (quotas or vExperts); 0 for ranks that are not hosts."""
        shares_ED = np.zeros((len(self.first_E) - 1, self.num_ranks), dtype=np.int64)
        shares_ED[self.expert_N, self.hosting.host_N] = self.hosting.share_N
        return shares_ED

    @cached_property
    def physicals_EK(self) -> np.ndarray:
        """[E, K]: physical experts of each logical expert; rows are padded with their last entry."""
        first_E1 = self.first_E[:-1, None]
        after_E1 = self.first_E[1:, None]
        return self.physical_N[np.minimum(first_E1 + np.arange((after_E1 - first_E1).max()), after_E1 - 1)]


def table(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return [rows, columns] int64 of rows of equal length, maybe 0."""
    return _flat(rows).reshape(len(rows), len(rows[0]))


def tables_of(
    home_DS: np.ndarray,
    guests: Sequence[Sequence[int]],
    hosts: Sequence[Sequence[int]],
    primary: Sequence[int],
    quotas: Sequence[Sequence[int]],
) -> Tables | None:
    """Return the tables of a placement with these fields, whose sizes match; None if the fields contradict each
    other."""
    fields = Fields(
        home_DS=home_DS,
        guests_DG=table(guests),
        hosts_E=_lengths(hosts),
        rank_X=_flat(hosts),
        primary_E=np.array(primary, np.int64),
        quotas_E=_lengths(quotas or ((),) * len(hosts)),
        quota_Q=_flat(quotas),
    )
    found = Tables(*tabulate(fields))
    return found if found.is_valid else None


def _flat(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64)


def _lengths(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(map(len, rows), np.int64, len(rows))


@compiled(None)
def _guests_of(home_DS: np.ndarray, guests_DG: np.ndarray) -> tuple[Guests, np.ndarray, np.ndarray, np.ndarray]:
    """Return the guests, [E] each expert's physical home, and [E + 1] and [M] the physical experts of guests by expert,
    then by rank. Entries that are no expert have the number of experts."""
    ranks, homes = home_DS.shape
    experts = ranks * homes
    slots = homes + guests_DG.shape[1]
    home_E = np.empty(experts, np.int64)
    for rank in range(ranks):
        for slot in range(homes):
            home_E[home_DS[rank, slot]] = rank * slots + slot
    first_E = np.zeros(experts + 2, np.int64)
    for expert in guests_DG.flat:
        if expert != EMPTY:
            first_E[(expert if 0 <= expert < experts else experts) + 1] += 1
    for expert in range(experts + 1):
        first_E[expert + 1] += first_E[expert]
    number = first_E[experts + 1]
    guests = Guests(np.empty(number, np.int64), np.empty(number, np.int64), np.empty(number, np.int64))
    physical_M = np.empty(number, np.int64)
    next_E = first_E.copy()
    m = 0
    for rank in range(ranks):
        for slot in range(guests_DG.shape[1]):
            expert = guests_DG[rank, slot]
            if expert != EMPTY:
                expert = expert if 0 <= expert < experts else experts
                guests.owner_M[m] = home_E[expert] // slots if expert < experts else EMPTY
                guests.expert_M[m] = expert
                guests.rank_M[m] = rank
                m += 1
                physical_M[next_E[expert]] = rank * slots + homes + slot
                next_E[expert] += 1
    return guests, home_E, first_E, physical_M


@compiled("Arrays(Fields)", Arrays, Fields)
def tabulate(fields: Fields) -> Arrays:
    """Return the arrays of a placement whose home slots hold each expert once."""
    ranks, homes = fields.home_DS.shape
    experts = ranks * homes
    slots = homes + fields.guests_DG.shape[1]
    guests, home_E, firsts_E, guest_M = _guests_of(fields.home_DS, fields.guests_DG)
    first_E = np.empty(experts + 1, np.int64)
    host_N = np.empty(len(fields.rank_X), np.int64)
    share_N = np.empty(len(fields.rank_X), np.int64)
    expert_N = np.empty(len(fields.rank_X), np.int64)
    physical_N = np.empty(len(fields.rank_X), np.int64)
    is_valid = firsts_E[experts] == firsts_E[experts + 1]
    n = 0
    x = 0
    q = 0
    for expert in range(experts):
        first_E[expert] = n
        owner = home_E[expert] // slots
        m = firsts_E[expert]
        has_primary = False
        quotas = fields.quotas_E[expert]
        total = 0
        last = -1
        for _ in range(fields.hosts_E[expert]):
            rank = fields.rank_X[x]
            x += 1
            if rank == last and n > first_E[expert] and not quotas:
                share_N[n - 1] += 1
                continue
            is_valid = is_valid and rank > last
            last = rank
            physical = home_E[expert]
            if rank != owner:
                has_slot = m < firsts_E[expert + 1] and guest_M[m] // slots == rank
                is_valid = is_valid and has_slot
                physical = guest_M[m] if has_slot else 0
                m += 1
            has_primary = has_primary or rank == fields.primary_E[expert]
            share_N[n] = 1
            if quotas:
                share_N[n] = fields.quota_Q[q] if q < len(fields.quota_Q) else 0
                q += 1
                is_valid = is_valid and 1 <= share_N[n] <= MOST_TOKENS
                total += share_N[n]
            host_N[n] = rank
            expert_N[n] = expert
            physical_N[n] = physical
            n += 1
        is_valid = is_valid and has_primary and m == firsts_E[expert + 1] and total <= MOST_TOKENS
        is_valid = is_valid and (not quotas or quotas == fields.hosts_E[expert])
    first_E[experts] = n
    expert_P = np.full(ranks * slots, EMPTY)
    by_physical_N = np.empty(n, np.int64)
    in_place = n == len(expert_P)
    if is_valid:
        index_P = np.empty(len(expert_P), np.int64)
        for i in range(n):
            expert_P[physical_N[i]] = expert_N[i]
            index_P[physical_N[i]] = i
        i = 0
        for physical in range(len(expert_P)):
            if expert_P[physical] != EMPTY:
                by_physical_N[i] = index_P[physical]
                i += 1
            in_place = in_place and expert_P[physical] == physical
    hosting = HostTable(first_E, host_N[:n], share_N[:n], fields.primary_E)
    return Arrays(is_valid, ranks, in_place, guests, hosting, expert_N[:n], physical_N[:n], expert_P, by_physical_N)
