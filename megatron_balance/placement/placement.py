"""Which ranks own and which ranks host the experts of one MoE layer."""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from megatron_balance.placement.tables import MOST_TOKENS, Tables, table, tables_of
from megatron_balance.placement.text import EMPTY, IntRows, parsed, printed


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
        if self._tables is None:
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
        owners, alone = (self.owners, self._alone) if home is None else _owned(home, self.num_experts)[:2]
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

    def with_quotas(
        self, expert_N: np.ndarray, host_N: np.ndarray, quota_N: np.ndarray, *, kept_slots: int, guest_slots: int
    ) -> "Placement":
        """Return a placement in which some experts have other hosts, with quotas. It is several times faster than
        `rehost`, for plans that a forward pass waits for.

        Args:
            expert_N, host_N, quota_N: all hosts of these experts, ordered by expert, then by rank, and their quotas. If
                an expert's primary is no longer a host, the first host is.
            kept_slots: number of a rank's guest slots that keep their experts; guests that `self` does not have there
                take the following slots, in the order of experts.
            guest_slots: number of a rank's guest slots.

        Raises:
            ValueError: a rank lacks a free guest slot, or the placement is invalid.
        """
        hosts = [*self.hosts]
        primary = [*self.primary]
        quotas = [*self.quotas] or [()] * self.num_experts
        rows = [[*row[:kept_slots]] for row in self.guests]
        ranks = host_N.tolist()
        shares = quota_N.tolist()
        experts = expert_N.tolist()
        ends = [0, *(1 + np.flatnonzero(expert_N[1:] != expert_N[:-1])).tolist(), len(ranks)]
        for first, after in itertools.pairwise(ends if ranks else ()):
            expert = experts[first]
            hosts[expert] = own = (*ranks[first:after],)
            quotas[expert] = (*shares[first:after],)
            if primary[expert] not in own:
                primary[expert] = own[0]
            owner = self.owners[expert]
            for rank in own:
                if rank != owner and expert not in rows[rank]:
                    rows[rank].append(expert)
        empty = (EMPTY,) * guest_slots
        return Placement(
            num_experts=self.num_experts,
            home=self.home,
            guests=tuple((*row, *empty[len(row) :]) for row in rows),
            hosts=tuple(hosts),
            primary=tuple(primary),
            quotas=tuple(quotas) if any(quotas) else (),
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
        return _owned(self.home, self.num_experts).owners

    @property
    def owner_E(self) -> np.ndarray:
        """[E] int64: `owners` as an array, which must not be changed."""
        return _owned(self.home, self.num_experts).owner_E

    @property
    def home_DS(self) -> np.ndarray:
        """[D, E/D] int64: `home` as an array, which must not be changed."""
        return _owned(self.home, self.num_experts).home_DS

    @cached_property
    def _alone(self) -> tuple[tuple[int], ...]:
        """[E]: `hosts` if only owners compute."""
        return _owned(self.home, self.num_experts).alone

    @property
    def tables(self) -> Tables:
        """Arrays derived from this placement."""
        assert self._tables is not None
        return self._tables

    @cached_property
    def _tables(self) -> Tables | None:
        """The tables of a valid placement, which are computed to find out whether it is valid; otherwise None."""
        try:
            return tables_of(self.home_DS, self.guests, self.hosts, self.primary, self.quotas)
        except OverflowError:
            return None

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
        _owned(self.home, self.num_experts)
        if len(self.guests) != self.num_ranks or len({*map(len, self.guests)}) != 1:
            raise ValueError(f"guests {self.guests}: {self.num_ranks} ranks need equally many guest slots")
        if not len(self.hosts) == len(self.primary) == self.num_experts:
            sizes = f"hosts of {len(self.hosts)} experts, primaries of {len(self.primary)}"
            raise ValueError(f"{sizes}: each of {self.num_experts} experts needs one entry")
        if len(self.quotas) not in (0, self.num_experts):
            raise ValueError(f"quotas of {len(self.quotas)} experts: give those of all {self.num_experts}, or none")

    def _check_hosts(self) -> None:
        hosted: list[list[int]] = [[] for _ in self.home]
        for expert, (ranks, primary, owner) in enumerate(zip(self.hosts, self.primary, self.owners, strict=True)):
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


class _Owned(NamedTuple):
    """Values derived from home slots."""

    owners: tuple[int, ...]
    """See `Placement.owners`."""
    alone: tuple[tuple[int], ...]
    """A tuple of each owner alone."""
    owner_E: np.ndarray
    home_DS: np.ndarray


@lru_cache(maxsize=64)
def _owned(home: IntRows, num_experts: int) -> _Owned:
    """Raises ValueError: see `Placement`."""
    owned = sorted(itertools.chain.from_iterable(home))
    if not owned or owned != list(range(num_experts)) or len({*map(len, home)}) != 1:
        raise ValueError(f"home {home}: must hold each of {num_experts} experts once, evenly over ranks")
    rank_of = {expert: rank for rank, row in enumerate(home) for expert in row}
    owners = tuple(rank_of[expert] for expert in range(num_experts))
    return _Owned(owners, tuple(zip(owners, strict=True)), np.array(owners), table(home))


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
