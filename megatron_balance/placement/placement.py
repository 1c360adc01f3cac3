"""Which ranks own and which ranks host the experts of one MoE layer."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import Annotated, NamedTuple

import numpy as np

from megatron_balance.placement.text import EMPTY, IntRows, parsed, printed

MOST_TOKENS = 2**31 - 1
"""Maximum sum of an expert's quotas, and of its tokens, so a product of two such sums fits in int64."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which ranks own and which ranks host the experts of one MoE layer, as a frozen value.

    A *slot* is room for one expert's weights on a rank: E/D home slots, then G guest slots. A *physical expert* is a
    (rank, slot) pair with the index `rank * slots_per_rank + slot`. A *replica* is an expert that several ranks
    compute; a *guest* is a replica on a rank that does not own the expert. An expert is *lent* if its owner does not
    host it.

    In the examples below, eight experts are on four ranks, and rank 0 is a second host of expert 5. They print as `0 1
    + 5 | 2 3 + . | 4 5 + . | 6 7 + .`: home slots, a plus, guest slots of each rank.

    Raises:
        ValueError: `home` does not divide the experts evenly; an expert has no host; a rank's guest slots do not hold
            the experts that it hosts and does not own, each once; a primary is not a host; quotas do not match hosts.
    """

    num_experts: int
    """E: number of logical experts, among which the router chooses. Example: 8."""

    home: IntRows
    """[D][E/D]: logical expert in each home slot. Example: ((0, 1), (2, 3), (4, 5), (6, 7)); rank 2 owns experts 4 and
    5, and its optimizer updates them."""

    guests: IntRows
    """[D][G]: the logical expert in each guest slot; -1 if empty. Example: ((5,), (-1,), (-1,), (-1,))."""

    hosts: IntRows
    """[E]: ranks that compute each expert, ascending. A rank that appears n times holds n vExperts in one slot.
    Example: ((0,), (0,), (1,), (1,), (2,), (0, 2), (3,), (3,))."""

    primary: tuple[int, ...]
    """[E]: host of tokens from ranks that are not hosts. Example: (0, 0, 1, 1, 2, 2, 3, 3); under `local_first`, rank 2
    also computes the tokens of ranks 1 and 3 for expert 5."""

    quotas: IntRows = ()
    """[E]: relative numbers of an expert's tokens that its hosts compute; empty for an expert whose vExperts share
    tokens evenly. (): no expert has quotas. A host with a quota has one vExpert. Example: ((), (), (), (), (), (1, 3),
    (), ()): rank 0 computes a quarter of expert 5's tokens."""

    def __getstate__(self) -> dict[str, object]:
        """Return the fields without cached values, which follow from them; so pickles stay small."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_hosts()
        self._check_quotas()

    @classmethod
    def identity(cls, num_experts: int, num_ranks: int, guest_slots: int = 0) -> "Placement":
        """Return the placement in which rank e // (E/D) owns expert e, and owners alone compute."""
        if num_experts % num_ranks:
            raise ValueError(
                f"--num-experts {num_experts}: must be a multiple of --expert-model-parallel-size {num_ranks}"
            )
        slots = num_experts // num_ranks
        home = tuple(tuple(range(rank * slots, (rank + 1) * slots)) for rank in range(num_ranks))
        owners = tuple(expert // slots for expert in range(num_experts))
        guests = ((EMPTY,) * guest_slots,) * num_ranks
        hosts = tuple((owner,) for owner in owners)
        return cls(num_experts=num_experts, home=home, guests=guests, hosts=hosts, primary=owners)

    def with_hosts(self, additions: Iterable[tuple[int, int]]) -> "Placement":
        """Return this placement with one more vExpert for each (expert, rank); see `rehost`."""
        hosts = [list(ranks) for ranks in self.hosts]
        for expert, rank in additions:
            if not 0 <= expert < self.num_experts:
                raise ValueError(f"expert {expert} on rank {rank}: there are {self.num_experts} experts")
            hosts[expert].append(rank)
        return self.rehost(hosts)

    def rehost(
        self,
        hosts: Sequence[Sequence[int]],
        primary: Sequence[int] | None = None,
        home: IntRows | None = None,
        quotas: Sequence[Sequence[int]] = (),
    ) -> "Placement":
        """Return a placement with other hosts, and with other owners if `home` is given.

        A guest that stays on its rank keeps its slot. New guests fill their rank's free slots in ascending order.

        Args:
            hosts: [E] ranks in any order.
            primary: [E]; by default the current primary if it is still a host, else the owner, else the first host.
            quotas: as in Placement, in the order of `hosts`; quotas of the same rank are added up.

        Raises:
            ValueError: a rank lacks a free guest slot, or the placement is invalid.
        """
        owners, alone = (self.owners, self._alone) if home is None else _owners(home, self.num_experts)
        # Most experts are computed by their owner alone, so loop over the others only
        moved = [expert for expert, (ranks, own) in enumerate(zip(hosts, alone, strict=True)) if ranks != own]
        ascending: list[tuple[int, ...]] = [*alone]
        ordered: list[tuple[int, ...]] = [()] * len(quotas)
        for expert in moved:
            ascending[expert] = (*sorted(hosts[expert]),)
        for expert in (expert for expert, row in enumerate(quotas) if row):
            total: dict[int, int] = {}
            for rank, quota in zip(hosts[expert], quotas[expert], strict=True):
                total[rank] = total.get(rank, 0) + quota
            ascending[expert], ordered[expert] = zip(*sorted(total.items()), strict=True)
        if primary is None:
            primary = [*owners]
            for expert in moved:
                favorites = (self.primary[expert], owners[expert], *ascending[expert])
                primary[expert] = next((rank for rank in favorites if rank in ascending[expert]), EMPTY)
        wanted: list[list[int]] = [[] for _ in self.home]
        for expert in moved:
            for rank in {*ascending[expert]} - {owners[expert]}:
                if not 0 <= rank < len(wanted):
                    raise ValueError(f"expert {expert} on rank {rank}: there are {len(wanted)} ranks")
                wanted[rank].append(expert)
        return replace(
            self,
            home=home or self.home,
            guests=tuple(map(_assign, range(len(wanted)), self.guests, wanted)),
            hosts=tuple(ascending),
            primary=tuple(primary),
            quotas=tuple(ordered) if any(ordered) else (),
        )

    @cached_property
    def trimmed(self) -> "Placement":
        """This placement without trailing guest slots that are empty on every rank."""
        used = max(index + 1 for row in self.guests for index, expert in enumerate((0, *row)) if expert != EMPTY) - 1
        if used == self.guest_slots:
            return self
        return replace(self, guests=tuple(row[:used] for row in self.guests))

    @property
    def num_ranks(self) -> int:
        """D: expert-parallel ranks."""
        return len(self.home)

    @property
    def home_slots(self) -> int:
        """E/D: slots per rank for the experts that it owns."""
        return self.num_experts // self.num_ranks

    @property
    def guest_slots(self) -> int:
        """G: slots per rank for other ranks' experts."""
        return len(self.guests[0])

    @property
    def slots_per_rank(self) -> int:
        return self.home_slots + self.guest_slots

    @property
    def num_physical(self) -> int:
        """P: number of physical experts over all ranks."""
        return self.num_ranks * self.slots_per_rank

    @property
    def added_hosts(self) -> int:
        """Number of (expert, rank) pairs in which the rank computes an expert that it does not own."""
        return sum(expert != EMPTY for row in self.guests for expert in row)

    @property
    def is_identity(self) -> bool:
        """Whether each expert is computed by its owner alone; home slots may be in any order."""
        return self.hosts == self._alone

    def owner(self, expert: int) -> int:
        """Return the rank that keeps the expert's parameters."""
        return self.owners[expert]

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Return the logical expert in each home slot of a rank."""
        return self.home[rank]

    def physical(self, rank: int, expert: int) -> int:
        """Return the index of a rank's physical expert, given an expert that has a slot on the rank."""
        return rank * self.slots_per_rank + self.slot(rank, expert)

    def slot(self, rank: int, expert: int) -> int:
        """Return an expert's index among the slots of a rank, home slots first; the expert must have one."""
        return (self.home[rank] + self.guests[rank]).index(expert)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """[E]: the rank that owns each expert."""
        return _owners(self.home, self.num_experts)[0]

    @cached_property
    def _alone(self) -> tuple[tuple[int], ...]:
        """[E]: `hosts` if only owners compute."""
        return _owners(self.home, self.num_experts)[1]

    @cached_property
    def tables(self) -> "Tables":
        """Arrays derived from this placement."""
        return Tables(self)

    def __str__(self) -> str:
        """Return the home slots, a plus and the guest slots of each rank, such as `0 1:5 + 3! . | 2x2 3x0 + 1:7 .`
        `x2`: two vExperts; `x0`: a lent expert; `:5`: a quota; `.`: empty; `!`: the primary if it is not the owner."""
        return printed(self.home, self.guests, self.hosts, self.primary, self.quotas)

    @classmethod
    def parse(cls, text: str) -> "Placement":
        """Return the placement that prints as `text`, or raise a ValueError."""
        home, guests, hosts, primary, quotas = parsed(text)
        placement = cls(num_experts=len(hosts), home=home, guests=guests, hosts=hosts, primary=primary, quotas=quotas)
        if text.split() != str(placement).split():
            raise ValueError(f"{text!r}: the same placement is written {placement}")
        return placement

    def digest(self) -> str:
        """Return 32 hexadecimal digits, which on all ranks and in all runs are equal exactly for equal placements."""
        return hashlib.blake2b(str(self).encode(), digest_size=16).hexdigest()

    def _check_sizes(self) -> None:
        owned = sorted(chain.from_iterable(self.home))
        if not owned or owned != list(range(self.num_experts)) or len({*map(len, self.home)}) != 1:
            raise ValueError(f"home {self.home}: must hold each of {self.num_experts} experts once, evenly over ranks")
        if len(self.guests) != self.num_ranks or len({*map(len, self.guests)}) != 1:
            raise ValueError(f"guests {self.guests}: {self.num_ranks} ranks need equally many guest slots")
        if not len(self.hosts) == len(self.primary) == self.num_experts:
            sizes = f"hosts of {len(self.hosts)} experts, primaries of {len(self.primary)}"
            raise ValueError(f"{sizes}: each of {self.num_experts} experts needs one entry")

    def _check_hosts(self) -> None:
        hosted: list[list[int]] = [[] for _ in self.home]
        rows = zip(self.hosts, self._alone, self.primary, self.owners, strict=True)
        # Most experts are computed by their owner alone; a comprehension passes over them quickly
        shared = [
            (expert, ranks, primary, owner)
            for expert, (ranks, alone, primary, owner) in enumerate(rows)
            if primary != owner or (ranks is not alone and ranks != alone)
        ]
        for expert, ranks, primary, owner in shared:
            if not ranks:
                raise ValueError(f"expert {expert}: has no host")
            if list(ranks) != sorted(ranks):
                raise ValueError(f"expert {expert}: its hosts {ranks} must ascend")
            if primary not in ranks:
                raise ValueError(f"expert {expert}: its primary {primary} is not one of its hosts {ranks}")
            for rank in {*ranks} - {owner}:
                if not 0 <= rank < self.num_ranks:
                    raise ValueError(f"expert {expert}: its host {rank} is not one of {self.num_ranks} ranks")
                hosted[rank].append(expert)
        for rank, (slots, experts) in enumerate(zip(self.guests, hosted, strict=True)):
            guests = sorted(expert for expert in slots if expert != EMPTY)
            if guests != experts:
                raise ValueError(f"rank {rank}: its guest slots hold experts {guests}, but it must host {experts}")

    def _check_quotas(self) -> None:
        if len(self.quotas) not in (0, self.num_experts):
            raise ValueError(f"quotas of {len(self.quotas)} experts: give those of all {self.num_experts}, or none")
        for expert, quotas in enumerate(self.quotas):
            if not quotas:
                continue
            ranks = self.hosts[expert]
            if len({*ranks}) != len(quotas) or len(ranks) != len(quotas):
                raise ValueError(f"expert {expert}: its quotas {quotas} must be one for each of its hosts {ranks}")
            if min(quotas) < 1 or sum(quotas) > MOST_TOKENS:
                raise ValueError(
                    f"expert {expert}: its quotas {quotas} must be at least 1, and {MOST_TOKENS} at most together"
                )


@lru_cache(maxsize=64)
def _owners(home: IntRows, num_experts: int) -> tuple[tuple[int, ...], tuple[tuple[int], ...]]:
    """Return `Placement.owners`, and a tuple of each owner alone."""
    rank_of = {expert: rank for rank, row in enumerate(home) for expert in row}
    owners = tuple(rank_of[expert] for expert in range(num_experts))
    return owners, tuple(zip(owners, strict=True))


def _assign(rank: int, slots: tuple[int, ...], wanted: Sequence[int]) -> tuple[int, ...]:
    """Return a rank's guest slots for the wanted experts; current guests keep their slots."""
    if max(slots, default=EMPTY) == EMPTY and len(wanted) <= len(slots):
        return (*wanted, *slots[len(wanted) :])
    new = [expert for expert in wanted if expert not in slots]
    filled = []
    left = new[::-1]
    for expert in slots:
        filled.append(expert if expert in wanted and expert != EMPTY else left.pop() if left else EMPTY)
    if left:
        raise ValueError(f"rank {rank}: no free guest slot of {len(slots)} for experts {left[::-1]}")
    return tuple(filled)


class Guests(NamedTuple):
    """Experts in guest slots, ordered by rank and slot, int64."""

    owner_M: np.ndarray
    expert_M: np.ndarray
    rank_M: np.ndarray


class HostTable(NamedTuple):
    """Hosts of all experts, int64, ordered by expert, then by rank."""

    first_E: Annotated[np.ndarray, "int64[::1]"]
    """[E + 1]: index of each expert's first host, and the end of the last expert's hosts."""
    host_N: Annotated[np.ndarray, "int64[::1]"]
    share_N: Annotated[np.ndarray, "int64[::1]"]
    """Shares of the expert's tokens: see `Tables.shares_ED`."""
    primary_E: Annotated[np.ndarray, "int64[::1]"]


@dataclass(frozen=True, eq=False)
class Tables:
    """Arrays derived from a placement. They must not be changed. In shapes, N counts physical experts in use, K is the
    maximum number of hosts of an expert, and M counts guests."""

    placement: Placement

    def complete(self) -> None:
        """Compute the arrays for a forward pass: all but `shares_ED`, which policies and dispatch on the device use."""
        for name, member in vars(Tables).items():
            if isinstance(member, cached_property) and name != "shares_ED":
                getattr(self, name)

    @cached_property
    def guests(self) -> Guests:
        """The experts in guest slots."""
        guests_DG = _table(self.placement.guests)
        rank_M, slot_M = (guests_DG >= 0).nonzero()
        expert_M = guests_DG[rank_M, slot_M]
        return Guests(np.array(self.placement.owners, dtype=np.int64)[expert_M], expert_M, rank_M)

    @cached_property
    def hosting(self) -> HostTable:
        """The hosts of all experts, once each, and their shares of tokens."""
        hosts = self.placement.hosts
        quotas = self.placement.quotas
        expert_M = np.repeat(np.arange(len(hosts)), [*map(len, hosts)])
        rank_M = _flat(hosts)
        share_M = np.ones_like(rank_M)
        if quotas:
            share_M = _flat([own or (1,) * len(row) for own, row in zip(quotas, hosts, strict=True)])
        # A host with several vExperts is listed several times
        (first_N,) = ((np.diff(expert_M, prepend=-1) != 0) | (np.diff(rank_M, prepend=-1) != 0)).nonzero()
        return HostTable(
            first_E=np.searchsorted(expert_M[first_N], np.arange(len(hosts) + 1)),
            host_N=rank_M[first_N],
            share_N=np.add.reduceat(share_M, first_N),
            primary_E=np.asarray(self.placement.primary),
        )

    @property
    def first_E(self) -> np.ndarray:
        """[E + 1]: index of each expert's first physical expert in `physical_N`, and the end of the last expert's."""
        return self.hosting.first_E

    @cached_property
    def expert_N(self) -> np.ndarray:
        """Logical expert of each entry of `physical_N`."""
        return np.repeat(np.arange(self.placement.num_experts), np.diff(self.first_E))

    @cached_property
    def physical_N(self) -> np.ndarray:
        """Physical experts in use, ordered by logical expert, then by rank."""
        experts = self.placement.num_experts
        slot_DS = np.concatenate([_table(self.placement.home), _table(self.placement.guests)], axis=1)
        (filled_P,) = (slot_DS.ravel() >= 0).nonzero()
        name_P = filled_P // self.placement.slots_per_rank * experts + slot_DS.ravel()[filled_P]
        order_P = np.argsort(name_P)
        wanted_N = self.hosting.host_N * experts + self.expert_N
        return filled_P[order_P[np.searchsorted(name_P, wanted_N, sorter=order_P)]]

    @cached_property
    def expert_P(self) -> np.ndarray:
        """[P]: logical expert of each physical expert; -1 for none."""
        expert_P = np.full(self.placement.num_physical, EMPTY)
        expert_P[self.physical_N] = self.expert_N
        return expert_P

    @cached_property
    def by_physical_N(self) -> np.ndarray:
        """Indices into `physical_N` that sort it in ascending order."""
        return np.argsort(self.physical_N)

    @cached_property
    def in_place(self) -> bool:
        """Whether logical and physical experts have the same numbers."""
        return len(self.physical_N) == len(self.expert_P) and bool((np.diff(self.expert_P) == 1).all())

    @cached_property
    def shares_ED(self) -> np.ndarray:
        """[E, D] int64: relative shares of an expert's tokens (quotas or vExperts); 0 for ranks that are not hosts."""
        shares_ED = np.zeros((self.placement.num_experts, self.placement.num_ranks), dtype=np.int64)
        shares_ED[self.expert_N, self.hosting.host_N] = self.hosting.share_N
        return shares_ED

    @cached_property
    def physicals_EK(self) -> np.ndarray:
        """[E, K]: physical experts of each logical expert; rows are padded with their last entry."""
        first_E1 = self.first_E[:-1, None]
        after_E1 = self.first_E[1:, None]
        return self.physical_N[np.minimum(first_E1 + np.arange((after_E1 - first_E1).max()), after_E1 - 1)]


def _table(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Return [rows, columns] int64 of rows of equal length, maybe 0."""
    return _flat(rows).reshape(len(rows), len(rows[0]))


def _flat(rows: Sequence[Sequence[int]]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64)
