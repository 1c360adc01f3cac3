"""Which rank sends which expert to which rank, round by round: what Trans executes, and Agg backwards."""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from megatron_balance.placement.placement import EMPTY, Placement


class Message(NamedTuple):
    """One expert's weights from a rank that holds them to a guest slot of another."""

    expert: int
    source: int
    target: int


@dataclass(frozen=True)
class TransferPlan:
    """How experts get from their owners to their guest slots, in rounds that follow each other.

    In one round a rank sends at most one message and receives at most one. A source is the expert's owner, or received
    the expert in an earlier round and relays it. Every occupied guest slot is the target of exactly one message.

    Trans runs the rounds forward: the source sends weights to the target. Agg runs them backward: the target sends
    gradients to the source, which adds what it receives to its own, so a relay passes on the sum of its subtree.
    """

    rounds: tuple[tuple[Message, ...], ...]


def plan_transfers(placement: Placement) -> TransferPlan:
    """A plan of few rounds: list scheduling, with a maximum matching of senders and receivers in every round.

    An expert with k guests takes ceil(log2(k + 1)) rounds rather than k, because guests relay. Ties go to the lower
    index. The number of rounds is no proven minimum; `fewest_rounds` bounds it from below.
    """
    state, rounds = _Transfers(placement), []
    while state.active:
        rounds.append(state.advance())
    return TransferPlan(tuple(rounds))


def fewest_rounds(placement: Placement) -> int:
    """A number of rounds that no plan can go below; a plan as short as this need not exist.

    A rank receives one expert per round, an owner starts one of its experts per round, and both the senders of one
    owner's experts and those of all experts at most double from round to round.
    """
    received = [sum(expert != EMPTY for expert in row) for row in placement.guests]
    started, copies = [0] * placement.num_ranks, [0] * placement.num_ranks
    for expert, ranks in _guest_ranks(placement).items():
        started[placement.owner(expert)] += 1
        copies[placement.owner(expert)] += len(ranks)
    alone = max(copies).bit_length()
    return max(*received, *started, alone, doubling_rounds(sum(copies), sum(map(bool, copies)), placement.num_ranks))


def doubling_rounds(messages: float, senders: float, num_ranks: int) -> int:
    """Rounds in which so many messages are sent, if every rank that received one sends one from the next round on."""
    rounds = 0
    while messages > 0:
        messages -= senders
        senders = min(2 * senders, num_ranks)
        rounds += 1
    return rounds


def _guest_ranks(placement: Placement) -> dict[int, list[int]]:
    """Ranks that keep each expert as a guest, ascending; experts without guests are left out."""
    ranks_of: defaultdict[int, list[int]] = defaultdict(list)
    for rank, row in enumerate(placement.guests):
        for expert in row:
            if expert != EMPTY:
                ranks_of[expert].append(rank)
    return dict(sorted(ranks_of.items()))


class _Transfers:
    """What every rank holds and wants between two rounds."""

    def __init__(self, placement: Placement) -> None:
        ranks_of = _guest_ranks(placement)
        self.missing = {expert: len(ranks) for expert, ranks in ranks_of.items()}
        """Guests that each expert has to reach."""
        self.holders = {expert: [placement.owner(expert)] for expert in ranks_of}
        """Ranks that have the expert, in the order in which they got it."""
        self.wants = [[expert for expert in row if expert != EMPTY] for row in placement.guests]
        self.active = list(ranks_of)
        """Experts that have to reach somebody still, by index."""

    def advance(self) -> tuple[Message, ...]:
        """The messages of the next round; the state is the one after it."""
        pairs = _Matching(self.wants, self.holders)
        senders = len(set().union(*(self.holders[expert] for expert in self.active)))
        for rank in self._by_urgency():
            pairs.add(rank)
            if len(pairs.served) == senders:
                break
        messages = sorted(Message(expert, source, target) for source, (target, expert) in pairs.served.items())
        for expert, _, target in messages:
            self.wants[target].remove(expert)
            self.holders[expert].append(target)
            self.missing[expert] -= 1
        self.active = [expert for expert in self.active if self.missing[expert]]
        return tuple(messages)

    def _by_urgency(self) -> list[int]:
        """Ranks that want something, the most urgent first; what each wants is put in that order, too.

        Urgency is the number of rounds that are needed at least: to double an expert until all have it, to start all
        experts of its owner, to receive all that a rank wants.
        """
        urgency: dict[int, int] = {}
        unsent: defaultdict[int, list[int]] = defaultdict(list)
        for expert in self.active:
            holders = self.holders[expert]
            urgency[expert] = ((self.missing[expert] + len(holders) - 1) // len(holders)).bit_length()
            if len(holders) == 1:
                unsent[holders[0]].append(expert)
        for experts in unsent.values():
            if len(experts) > 1:
                experts.sort(key=lambda expert: -urgency[expert])
                rounds = max(index + urgency[expert] for index, expert in enumerate(experts))
                for index, expert in enumerate(experts):
                    urgency[expert] = max(urgency[expert], rounds - index)
        by_urgency = sorted(self.active, key=lambda expert: (-urgency[expert], -self.missing[expert]))
        position = {expert: index for index, expert in enumerate(by_urgency)}
        keys = []
        for rank, wanted in enumerate(self.wants):
            if wanted:
                if len(wanted) > 1:
                    wanted.sort(key=position.__getitem__)
                first = urgency[wanted[0]]
                keys.append((-max(len(wanted), first), -len(wanted) - first, rank))
        return [rank for *_, rank in sorted(keys)]


class _Matching:
    """Who sends what to whom in one round: a bipartite matching that grows by augmenting paths.

    A rank that was added once stays served, so ranks added first have precedence, and no matching serves more ranks.
    """

    def __init__(self, wants: list[list[int]], holders: dict[int, list[int]]) -> None:
        self.wants, self.holders = wants, holders
        self.served: dict[int, tuple[int, int]] = {}
        """Receiving rank and expert by sending rank."""
        self.source: dict[int, int] = {}
        """Sending rank by receiving rank."""
        self.idle: dict[int, list[int]] = {}
        """Holders that may have nothing to send, per expert; the owner comes last, it may have more to send."""
        self.stuck: set[int] = set()
        """Experts whose holders cannot be freed, until another rank is served."""

    def add(self, rank: int) -> None:
        """Serve a rank if any exchange of senders among those already served allows it."""
        path: dict[int, tuple[int, int]] = {}
        queue = [rank]
        for receiver in queue:
            for expert in self.wants[receiver]:
                if expert in self.stuck:
                    continue
                sender = self._idle_holder(expert)
                if sender is not None:
                    path[sender] = receiver, expert
                    self._switch(sender, path)
                    return
            for expert in self.wants[receiver]:
                if expert not in self.stuck:
                    self.stuck.add(expert)
                    for sender in self.holders[expert]:
                        if sender not in path:
                            path[sender] = receiver, expert
                            queue.append(self.served[sender][0])

    def _idle_holder(self, expert: int) -> int | None:
        idle = self.idle.setdefault(expert, self.holders[expert].copy())
        while idle and idle[-1] in self.served:
            idle.pop()
        return idle[-1] if idle else None

    def _switch(self, sender: int | None, path: dict[int, tuple[int, int]]) -> None:
        """Give each receiver on the path the sender that was found for it, from an idle one back to the first."""
        while sender is not None:
            receiver, _ = self.served[sender] = path[sender]
            previous, self.source[receiver] = self.source.get(receiver), sender
            sender = previous
        self.stuck.clear()
