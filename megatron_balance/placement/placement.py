"""Which ranks own and which ranks host the experts of one MoE layer."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise

from megatron_balance.placement.tables import Tables

EMPTY = -1
"""Content of an empty slot."""

MOST_TOKENS = 2**31 - 1
"""Maximum sum of an expert's quotas, and of its tokens, so that a product of two fits an int64."""

_SLOT = re.compile(r"(?P<expert>\d+)(x(?P<times>\d+)|:(?P<tokens>\d+))?(?P<primary>!)?")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which ranks own and which ranks host the experts of one MoE layer, as a frozen value.

    A slot is room for one expert's weights on a rank: E/D home slots, then G guest slots. A physical expert is a
    (rank, slot) pair with the index `rank * slots_per_rank + slot`. An expert is lent if its owner does not
    host it.

    Raises:
        ValueError: `home` does not divide the experts evenly; an expert has no host, or a host without a slot for it; a
            guest slot holds an expert that its rank owns, holds twice or does not host; a primary is not a host; quotas
            do not fit the hosts.
    """

    num_experts: int
    """E: number of logical experts, among which the router chooses."""

    home: tuple[tuple[int, ...], ...]
    """[D][E/D]: the logical expert whose parameters are in each home slot."""

    guests: tuple[tuple[int, ...], ...]
    """[D][G]: the logical expert in each guest slot; -1 if empty."""

    hosts: tuple[tuple[int, ...], ...]
    """[E]: ranks that compute each expert, ascending. A rank that appears n times holds n vExperts in one slot."""

    primary: tuple[int, ...]
    """[E]: the host of tokens whose source rank is not a host."""

    quotas: tuple[tuple[int, ...], ...] = ()
    """[E]: how many of an expert's tokens each of its hosts computes, relative to the others; empty for an expert whose
    vExperts share its tokens evenly. () stands for no quotas at all. A host with a quota has no second vExpert."""

    def __getstate__(self) -> dict[str, object]:
        """Return the fields alone, so that a pickle stays small: all that is cached follows from them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_guests()
        self._check_hosts()
        self._check_quotas()

    @classmethod
    def identity(cls, num_experts: int, num_ranks: int, guest_slots: int = 0) -> "Placement":
        """Return the placement in which rank e // (E/D) owns expert e, and only owners compute."""
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
        """Return this placement with one more vExpert for each (expert, rank); guests keep their slots.

        The order of `additions` does not matter.

        Raises:
            ValueError: an expert or rank does not exist, or a rank has no free guest slot.
        """
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
        home: tuple[tuple[int, ...], ...] | None = None,
        quotas: Sequence[Sequence[int]] = (),
    ) -> "Placement":
        """Return a placement with other hosts, and with other owners if `home` is given.

        A guest that stays on its rank keeps its slot. New guests take the free slots of their rank in ascending order
        of expert and slot.

        Args:
            hosts: [E] ranks in any order.
            primary: [E]; by default the current primary if it is still a host, else the owner, else the first host.
            home: as in Placement; None: the same owners.
            quotas: as in Placement, in the order of `hosts`; those of the same rank are added up.

        Raises:
            ValueError: a rank lacks a free guest slot, or the placement is invalid.
        """
        for what, number in (("hosts", len(hosts)), ("quotas", len(quotas) or self.num_experts)):
            if number != self.num_experts:
                raise ValueError(f"{number} lists of {what} for {self.num_experts} experts")
        owners, alone = (self.owners, self._alone) if home is None else _owners(home, self.num_experts)
        # Most experts are computed by their owner alone, and Python's loop over the others is much shorter
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
        """This placement without the last guest slots, where they are empty on every rank.

        The other slots keep their index on their rank.
        """
        used = max(index + 1 for row in self.guests for index, expert in enumerate((0, *row)) if expert != EMPTY) - 1
        if used == self.guest_slots:
            return self
        return replace(self, guests=tuple(row[:used] for row in self.guests))

    @property
    def num_ranks(self) -> int:
        """D: number of expert-parallel ranks."""
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
        """Number of (expert, rank) pairs where a rank computes an expert that it does not own."""
        return sum(expert != EMPTY for row in self.guests for expert in row)

    @property
    def is_identity(self) -> bool:
        """Whether every expert is computed by its owner alone. Home slots may be in any order."""
        return self.hosts == self._alone

    def owner(self, expert: int) -> int:
        """Return the rank that keeps the expert's parameters."""
        return self.owners[expert]

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Return the logical expert in each home slot of a rank."""
        return self.home[rank]

    def physical(self, rank: int, expert: int) -> int:
        """Return the index of the physical expert: the home slot if the rank owns the expert, else a guest slot.

        Raises:
            ValueError: the rank has no slot with this expert.
        """
        return rank * self.slots_per_rank + self.slot(rank, expert)

    def slot(self, rank: int, expert: int) -> int:
        """Return the index of an expert among its rank's slots, home slots first.

        Raises:
            ValueError: the rank has no slot with this expert.
        """
        return (self.home[rank] + self.guests[rank]).index(expert)

    @cached_property
    def physicals(self) -> tuple[tuple[int, ...], ...]:
        """[E]: the physical experts that compute each logical expert, once each, by ascending rank."""
        physical_N = self.tables.physical_N.tolist()
        first_E = self.tables.first_E.tolist()
        return tuple(tuple(physical_N[first:after]) for first, after in pairwise(first_E))

    @cached_property
    def expert_of_physical(self) -> tuple[int, ...]:
        """[P]: the logical expert that each physical one computes; -1 for empty slots and lent experts' home slots."""
        return tuple(self.tables.expert_P.tolist())

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """[E]: the rank that owns each expert."""
        return _owners(self.home, self.num_experts)[0]

    @cached_property
    def _alone(self) -> tuple[tuple[int], ...]:
        """[E]: `hosts` if only owners compute."""
        return _owners(self.home, self.num_experts)[1]

    @cached_property
    def tables(self) -> Tables:
        """Arrays that this placement alone determines."""
        return Tables(
            home=self.home,
            guests=self.guests,
            owners=self.owners,
            hosts=self.hosts,
            quotas=self.quotas,
            primary=self.primary,
        )

    def __str__(self) -> str:
        """Return the home slots, a plus and the guest slots of each rank: `0 1:5 + 3! . | 2x2 3x0 + 1:7 .`

        `x2` is two vExperts, `x0` none (a lent expert), `:5` a quota, `.` an empty slot, `!` the primary if it is not
        the owner.
        """
        rows = []
        for rank, (home, guests) in enumerate(zip(self.home, self.guests, strict=True)):
            slots = [*(self._slot(rank, expert) for expert in home)]
            if guests:
                slots += ["+", *(self._slot(rank, expert) for expert in guests)]
            rows.append(" ".join(slots))
        return " | ".join(rows)

    def _slot(self, rank: int, expert: int) -> str:
        if expert == EMPTY:
            return "."
        times = self.hosts[expert].count(rank)
        primary = "!" if self.primary[expert] == rank != self.owner(expert) else ""
        if times and self.quotas and (quotas := self.quotas[expert]):
            return f"{expert}:{quotas[self.hosts[expert].index(rank)]}{primary}"
        return f"{expert}{f'x{times}' if times != 1 else ''}{primary}"

    @classmethod
    def parse(cls, text: str) -> "Placement":
        """Return the placement that prints as `text`.

        Raises:
            ValueError: `text` is not a placement.
        """
        halves = [[half.split() for half in row.split("+")] for row in text.split("|")]
        rows = [[[_parse_slot(slot) for slot in half] for half in (*row, [])[:2]] for row in halves]
        home, guests = (tuple(tuple(expert for expert, *_ in row[half]) for row in rows) for half in (0, 1))
        hosts: dict[int, list[int]] = {}
        quotas: dict[int, tuple[int, ...]] = {}
        primary = {expert: rank for rank, row in enumerate(home) for expert in row}
        for rank, (own, other) in enumerate(rows):
            for expert, times, quota, is_primary in own + other:
                hosts.setdefault(expert, []).extend([rank] * times)
                if quota is not None:
                    quotas[expert] = (*quotas.get(expert, ()), quota)
                if is_primary:
                    primary[expert] = rank
        experts = sorted(primary)
        placement = cls(
            num_experts=len(experts),
            home=home,
            guests=guests,
            hosts=tuple(tuple(hosts[expert]) for expert in experts),
            primary=tuple(primary[expert] for expert in experts),
            quotas=tuple(quotas.get(expert, ()) for expert in experts) if quotas else (),
        )
        if text.split() != str(placement).split():
            raise ValueError(f"{text!r}: prints as {placement}")
        return placement

    def digest(self) -> str:
        """Return 32 hexadecimal digits, equal on all ranks and in all runs for equal placements only."""
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

    def _check_guests(self) -> None:
        empty = (EMPTY,) * self.guest_slots
        for rank, row in enumerate(self.guests):
            if row == empty:
                continue
            experts = [expert for expert in row if expert != EMPTY]
            if len({*experts}) < len(experts):
                times, expert = max((experts.count(expert), expert) for expert in experts)
                raise ValueError(f"rank {rank}: expert {expert} fills {times} guest slots; vExperts share one")
            for expert in experts:
                if not 0 <= expert < self.num_experts:
                    raise ValueError(f"rank {rank}: its guest {expert} is not one of {self.num_experts} experts")
                if expert in self.home[rank]:
                    raise ValueError(f"rank {rank}: owns expert {expert} and keeps it as a guest")
                if rank not in self.hosts[expert]:
                    raise ValueError(f"rank {rank}: keeps the guest {expert}, but the hosts are {self.hosts[expert]}")

    def _check_hosts(self) -> None:
        num_ranks = self.num_ranks
        rows = zip(self.hosts, self._alone, self.primary, self.owners, strict=True)
        moved = [expert for expert, row in enumerate(rows) if row[0] != row[1] or row[2] != row[3]]
        for expert in moved:
            ranks = self.hosts[expert]
            owner = self.owners[expert]
            primary = self.primary[expert]
            if not ranks:
                raise ValueError(f"expert {expert}: has no host")
            if list(ranks) != sorted(ranks):
                raise ValueError(f"expert {expert}: its hosts {ranks} must ascend")
            for rank in ranks:
                if rank != owner and (not 0 <= rank < num_ranks or expert not in self.guests[rank]):
                    raise ValueError(f"expert {expert}: its host {rank} has no slot for it")
            if primary not in ranks:
                raise ValueError(f"expert {expert}: its primary {primary} is not one of its hosts {ranks}")

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
def _owners(home: tuple[tuple[int, ...], ...], num_experts: int) -> tuple[tuple[int, ...], tuple[tuple[int], ...]]:
    """Return `Placement.owners`, and each one of them alone."""
    rank_of = {expert: rank for rank, row in enumerate(home) for expert in row}
    owners = tuple(rank_of[expert] for expert in range(num_experts))
    return owners, tuple(zip(owners, strict=True))


def _assign(rank: int, slots: tuple[int, ...], wanted: Sequence[int]) -> tuple[int, ...]:
    """Return a rank's guest slots with the wanted experts: current guests keep their slots, others fill free ones."""
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


def _parse_slot(text: str) -> tuple[int, int, int | None, bool]:
    """Return an expert, its number of vExperts, its quota if there is one, and whether it is marked as primary."""
    if text == ".":
        return EMPTY, 0, None, False
    match = _SLOT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r}: a slot is an expert such as 3, 3x2, 3:40 or 3x2!, or a dot")
    quota = None if match["tokens"] is None else int(match["tokens"])
    return int(match["expert"]), int(match["times"] or 1), quota, match["primary"] is not None
