"""Planners of other systems, re-implemented from their descriptions: references for benches and tests, slow and plain.

A planner decides how many tokens of each expert each rank computes: quotas [E, D] int64, whose rows add up to the
experts' tokens. An expert with a quota on a rank that does not own it is a guest there and occupies one of the rank's
slots. Planners are pure and deterministic: ties go to the lower index.

    ultraep      UltraEP (arXiv 2606.04101): fills receivers donor by donor, for the lowest target that its search finds
    moonep       MoonEP: Walker's alias method, one donor for each receiver
    llep         LLEP (arXiv 2601.17111): experts by load, each on its owner up to a capacity, then on the least loaded
    eplb         DeepSeek's EPLB: replicas by load, which share tokens equally, each on the least loaded rank
    interleaved  like ultraep, but the heaviest rank gives anew at each move, and targets are tried upward
    with_alias   interleaved, or moonep's exact plan if it needs no more slots than there are

The descriptions leave the following open:

- A target is a number of times the mean that no rank may exceed. Loads are whole numbers, so `limit_of` rounds the
  product down, but not below the mean rounded up, because no plan is below that.
- A plan may end before all ranks are within the limit: it does not fit. With the limit at the heaviest load without a
  plan, nothing has to move, so there is always a target that fits.
- MoonEP has as many slots as a rank has experts, which always suffice. Where a receiver has fewer, it takes as much as
  its donor's largest experts fill, and keeps the rest of its gap.
- UltraEP's minimum of tokens per guest is off.
- LLEP's tokens without a receiver stay with the owner, which has a slot for them. Its limits on small chunks and on
  small imbalances, which make plans cheaper and less even, are off.
- EPLB also moves the first replica of each expert. Here, owners keep it, and the other replicas fill the slots.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Protocol

import numpy as np

TARGET = 1.01
STEP = Fraction(1, 100)
"""Distance of the targets that are tried one after the other."""


class Planner(Protocol):
    """A planner that takes no target."""

    def __call__(self, tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, slots: int) -> np.ndarray: ...


class BoundedPlanner(Protocol):
    """A planner that aims at a load of `target` times the mean."""

    def __call__(
        self, tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, slots: int, target: float = TARGET
    ) -> np.ndarray: ...


def limit_of(tokens: int, num_ranks: int, target: float | Fraction) -> int:
    """Return the most tokens of a rank at `target` times the mean: rounded down, but at least the mean rounded up.

    The target's decimal digits count, so 1.01 is exactly 101/100.
    """
    return max(math.floor(Fraction(str(target)) * tokens / num_ranks), -(-tokens // num_ranks))


class Draft:
    """Quotas while a planner moves tokens from owners to guests."""

    def __init__(self, tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, slots: int) -> None:
        self.owner_E, self.tokens = owner_E, int(tokens_E.sum())
        self.quotas_ED = np.zeros((len(tokens_E), num_ranks), dtype=np.int64)
        self.quotas_ED[np.arange(len(tokens_E)), owner_E] = tokens_E
        self.load_D = self.quotas_ED.sum(0)
        self.free_D = np.full(num_ranks, slots)

    def left(self, expert: int) -> int:
        """Return the tokens of an expert that its owner still has."""
        return int(self.quotas_ED[expert, self.owner_E[expert]])

    def by_load(self, rank: int) -> list[int]:
        """Return the rank's own experts with tokens, by tokens that it still has, largest first."""
        own_A = np.flatnonzero(self.owner_E == rank)
        left_A = self.quotas_ED[own_A, rank]
        order_A = np.argsort(-left_A, kind="stable")
        return own_A[order_A[left_A[order_A] > 0]].tolist()

    def roomiest(self, expert: int, limit: int) -> int | None:
        """Return the least loaded rank below the limit that can take the expert as a new guest; None: there is none."""
        able_D = (self.free_D > 0) & (self.load_D < limit) & (self.quotas_ED[expert] == 0)
        able_D[self.owner_E[expert]] = False
        return int(np.where(able_D, self.load_D, np.iinfo(np.int64).max).argmin()) if able_D.any() else None

    def give(self, expert: int, rank: int, tokens: int) -> None:
        """Make the expert a new guest of a rank, which takes so many tokens from its owner."""
        owner = self.owner_E[expert]
        assert 0 < tokens <= self.quotas_ED[expert, owner] and self.free_D[rank] > 0
        assert rank != owner and self.quotas_ED[expert, rank] == 0
        self.quotas_ED[expert, [owner, rank]] += [-tokens, tokens]
        self.load_D[[owner, rank]] += [-tokens, tokens]
        self.free_D[rank] -= 1


def ultraep(
    tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, slots: int, target: float = TARGET
) -> np.ndarray:
    """Fill receivers donor by donor; try the target and the next two, then bisect between these and the plain load.

    The search ends when the limits that fit and do not are within a hundredth of the mean, UltraEP's default tolerance.
    """
    tokens = int(tokens_E.sum())

    def fitting(limit: int) -> np.ndarray | None:
        draft = Draft(tokens_E, owner_E, num_ranks, slots)
        return draft.quotas_ED if _donor_by_donor(draft, limit) else None

    low = 0
    for step in range(3):
        low = limit_of(tokens, num_ranks, Fraction(str(target)) + step * STEP)
        if (quotas_ED := fitting(low)) is not None:
            return quotas_ED
    plain = Draft(tokens_E, owner_E, num_ranks, slots)
    best_ED = plain.quotas_ED
    high = int(plain.load_D.max())
    while high - low > max(1, STEP * tokens / num_ranks):
        middle = (low + high) // 2
        if (quotas_ED := fitting(middle)) is None:
            low = middle
        else:
            best_ED = quotas_ED
            high = middle
    return best_ED


def _donor_by_donor(draft: Draft, limit: int) -> bool:
    """Move tokens until all loads are within the limit; return whether they are."""
    donors = [rank for rank in np.argsort(-draft.load_D, kind="stable").tolist() if draft.load_D[rank] > limit]
    for donor in donors:
        for expert in draft.by_load(donor):
            while (excess := int(draft.load_D[donor]) - limit) > 0 and draft.left(expert):
                receiver = draft.roomiest(expert, limit)
                if receiver is None:
                    return False
                draft.give(expert, receiver, min(excess, draft.left(expert), limit - int(draft.load_D[receiver])))
    return True


def interleaved(
    tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, slots: int, target: float = TARGET
) -> np.ndarray:
    """Let the heaviest rank give its largest expert at each move; take the first target that fits.

    A plan may fit a target and not a higher one, so targets are tried upward and not bisected.
    """
    wanted = Fraction(str(target))
    while True:
        draft = Draft(tokens_E, owner_E, num_ranks, slots)
        if _heaviest_first(draft, limit_of(draft.tokens, num_ranks, wanted)):
            return draft.quotas_ED
        wanted += STEP


def _heaviest_first(draft: Draft, limit: int) -> bool:
    """Move tokens until all loads are within the limit; return whether they are."""
    while (excess := int(draft.load_D.max()) - limit) > 0:
        expert = draft.by_load(int(draft.load_D.argmax()))[0]
        receiver = draft.roomiest(expert, limit)
        if receiver is None:
            return False
        draft.give(expert, receiver, min(excess, draft.left(expert), limit - int(draft.load_D[receiver])))
    return True


def with_alias(
    tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, slots: int, target: float = TARGET
) -> np.ndarray:
    """Return `interleaved`'s plan for the target; if it does not fit, `moonep`'s exact plan if that one does."""
    draft = Draft(tokens_E, owner_E, num_ranks, slots)
    if _heaviest_first(draft, limit_of(draft.tokens, num_ranks, target)):
        return draft.quotas_ED
    exact_ED = moonep(tokens_E, owner_E, num_ranks, len(tokens_E))
    if guests_of(exact_ED, owner_E).sum(0).max() <= slots:
        return exact_ED
    return interleaved(tokens_E, owner_E, num_ranks, slots, target)


def moonep(tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, slots: int) -> np.ndarray:
    """Let the rank furthest above its share close the gap of the rank furthest below it, as often as there are gaps.

    A rank's share is the mean rounded down; the first ranks have one token more. A donor may end below its share, and
    receive later. A rank that has received neither gives nor receives any more.
    """
    draft = Draft(tokens_E, owner_E, num_ranks, slots)
    share_D = draft.tokens // num_ranks + (np.arange(num_ranks) < draft.tokens % num_ranks)
    done_D = np.zeros(num_ranks, dtype=bool)
    while True:
        excess_D = draft.load_D - share_D
        gap_D = np.where(done_D, 0, -excess_D)
        donor = int(excess_D.argmax())
        receiver = int(gap_D.argmax())
        if excess_D[donor] <= 0 or gap_D[receiver] <= 0:
            return draft.quotas_ED
        for expert in draft.by_load(donor)[:slots]:
            gap = int(share_D[receiver] - draft.load_D[receiver])
            if gap > 0:
                draft.give(expert, receiver, min(gap, draft.left(expert)))
        done_D[receiver] = True


def llep(tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, slots: int, target: float = 1.0) -> np.ndarray:
    """Place experts by load, largest first: on the owner up to the capacity, the rest on the least loaded ranks.

    The capacity is `target` times the mean. The load of a rank counts its own experts that are still to be placed, so
    the largest experts leave a heavy rank, and its small ones stay.
    """
    draft = Draft(tokens_E, owner_E, num_ranks, slots)
    capacity = limit_of(draft.tokens, num_ranks, target)
    for expert in np.argsort(-tokens_E, kind="stable").tolist():
        while (excess := int(draft.load_D[owner_E[expert]]) - capacity) > 0 and draft.left(expert):
            receiver = draft.roomiest(expert, capacity)
            if receiver is None:
                break
            draft.give(expert, receiver, min(excess, draft.left(expert), capacity - int(draft.load_D[receiver])))
    return draft.quotas_ED


def eplb(tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, slots: int) -> np.ndarray:
    """Add replicas of the expert with the most tokens per replica; put the largest on the least loaded rank first.

    All slots are filled, so a plan may be less even than none. A replica that finds no rank is dropped.
    """
    replicas_E = np.ones(len(tokens_E), dtype=np.int64)
    for _ in range(num_ranks * slots):
        each_E = np.where(replicas_E < num_ranks, tokens_E / replicas_E, 0)
        replicas_E[each_E.argmax()] += each_E.max() > 1
    each_E = tokens_E // replicas_E
    load_D = np.bincount(owner_E, weights=tokens_E - each_E * (replicas_E - 1), minlength=num_ranks)
    hosts_ED = owner_E[:, None] == np.arange(num_ranks)
    free_D = np.full(num_ranks, slots)
    for expert in np.argsort(-each_E, kind="stable").tolist():
        for _ in range(replicas_E[expert] - 1):
            able_D = (free_D > 0) & ~hosts_ED[expert]
            if able_D.any():
                rank = int(np.where(able_D, load_D, np.inf).argmin())
                hosts_ED[expert, rank] = True
                load_D[rank] += each_E[expert]
                free_D[rank] -= 1
    return _equal(tokens_E, owner_E, hosts_ED)


def _equal(tokens_E: np.ndarray, owner_E: np.ndarray, hosts_ED: np.ndarray) -> np.ndarray:
    """Return quotas that differ by one token at most among an expert's hosts: larger on the owner, then by rank."""
    experts = np.arange(len(tokens_E))
    order_ED = np.cumsum(hosts_ED, axis=1)
    order_ED += order_ED <= order_ED[experts, owner_E][:, None]
    order_ED[experts, owner_E] = 1
    each_E, rest_E = np.divmod(tokens_E, hosts_ED.sum(1))
    return np.where(hosts_ED, each_E[:, None] + (order_ED <= rest_E[:, None]), 0)


def guests_of(quotas_ED: np.ndarray, owner_E: np.ndarray) -> np.ndarray:
    """Return bool [E, D]: where an expert has a quota but not its owner."""
    return (quotas_ED > 0) & (owner_E[:, None] != np.arange(quotas_ED.shape[1]))


BOUNDED: Mapping[str, BoundedPlanner] = {
    "ultraep": ultraep,
    "llep": llep,
    "interleaved": interleaved,
    "with_alias": with_alias,
}
"""Planners that take a target, by name."""

PLANNERS: Mapping[str, Planner] = {**BOUNDED, "moonep": moonep, "eplb": eplb}
"""All planners by name, with their own targets."""


def floor_of(tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, slots: int) -> int:
    """Return a lower bound of the heaviest rank's tokens over all plans with so many slots, also with lent experts.

    It is the smallest limit that no counting argument excludes; see `_may_fit`.
    """
    load_D = np.bincount(owner_E, weights=tokens_E, minlength=num_ranks).astype(np.int64)
    low = int(-(-load_D.sum() // num_ranks))
    high = int(load_D.max())
    while low < high:
        middle = (low + high) // 2
        if _may_fit(middle, tokens_E, owner_E, load_D, slots):
            high = middle
        else:
            low = middle + 1
    return low


def _may_fit(limit: int, tokens_E: np.ndarray, owner_E: np.ndarray, load_D: np.ndarray, slots: int) -> bool:
    """Return False only if no plan keeps all ranks within the limit; if True, so is the result for higher limits.

    All guests need slots, those of one rank's experts on other ranks, and a rank below the limit receives at most what
    the guests in its slots can take.
    """
    needed_D = _needed(limit, tokens_E, owner_E, load_D)
    most = int(np.minimum(np.sort(tokens_E)[-slots:], limit).sum()) if slots else 0
    taken = np.minimum(limit - load_D[load_D < limit], most).sum()
    return bool(
        max(needed_D.sum(), _receptions(limit, load_D)) <= len(load_D) * slots
        and needed_D.max() <= (len(load_D) - 1) * slots
        and taken >= (load_D - limit).clip(0).sum()
    )


def fewest_copies(tokens_E: np.ndarray, owner_E: np.ndarray, num_ranks: int, target: float) -> int:
    """Return a lower bound of the guests of all plans within a target, whatever the number of slots."""
    load_D = np.bincount(owner_E, weights=tokens_E, minlength=num_ranks).astype(np.int64)
    limit = limit_of(int(load_D.sum()), num_ranks, target)
    return max(_receptions(limit, load_D), int(_needed(limit, tokens_E, owner_E, load_D).sum()))


def _receptions(limit: int, load_D: np.ndarray) -> int:
    """Return a lower bound of the guests, from the tokens that ranks below the limit have room for.

    Let S(k) be the k largest rooms. All excess X needs at least K(X) receivers, the fewest with S(K) >= X. Draw an edge
    from owner to host for each guest: n donors and the receivers that a connected part of the graph has need at least
    n + K(X) - 1 edges, for the excess X of these donors. As S is concave, K(x + y) >= K(x) + K(y) - 1, so this is at
    least the sum of K(x) over the donors.
    """
    room_D = np.cumsum(np.sort((limit - load_D).clip(0))[::-1])
    excess_A = load_D[load_D > limit] - limit
    receivers_A = 1 + np.searchsorted(room_D, excess_A)
    return max(int(receivers_A.sum()), 1 + int(np.searchsorted(room_D, excess_A.sum()))) if len(excess_A) else 0


def _needed(limit: int, tokens_E: np.ndarray, owner_E: np.ndarray, load_D: np.ndarray) -> np.ndarray:
    """Return [D] a lower bound of the guests of each rank's experts if all ranks are within the limit.

    A guest takes at most the limit, and at most its expert's tokens.
    """
    needed_D = np.zeros(len(load_D), dtype=np.int64)
    for rank in np.flatnonzero(load_D > limit).tolist():
        whole_A, rest_A = np.divmod(tokens_E[owner_E == rank], limit)
        pieces = [limit] * int(whole_A.sum()) + sorted(rest_A.tolist(), reverse=True)
        needed_D[rank] = 1 + np.searchsorted(np.cumsum(pieces), load_D[rank] - limit)
    return needed_D
