"""Executes the programs of all teams of a job, event by event.

A program is an iterator of commands. All ranks of its team execute them in order, each at its own time. A collective
begins when all its ranks have reached it and the preceding collectives on the same lane have ended. Concurrent
collectives share resources fairly (`speeds`). A collective ends at the same time on all its ranks.

In shapes, R counts the ranks of a team, N resources, and C collectives in progress.
"""

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron_balance.simulate.result import Recorder

ROUNDING = 1e-12
"""A collective may end, and a resource is used up, when less than this fraction of it remains."""


class Work(NamedTuple):
    """Needs of a collective: a latency without any resource, then time on all its resources at once."""

    latency: float
    resources: np.ndarray
    """[N] int64 numbers of the resources, each at most once."""
    seconds: np.ndarray
    """[N] seconds of work of each resource, above zero. A collective that runs alone takes the longest of them."""

    @property
    def alone(self) -> float:
        """Seconds of the collective if it shares nothing."""
        return self.latency + float(self.seconds.max(initial=0.0))


NOTHING = Work(0.0, np.zeros(0, dtype=np.int64), np.zeros(0))


class Compute(NamedTuple):
    """Every rank computes."""

    label: str
    seconds_R: np.ndarray


class Start(NamedTuple):
    """Start a collective in the background. Every rank may continue at once."""

    key: Hashable
    """Identifies the collective among all teams; teams that start the same key take part in the same collective."""
    label: str
    work: Work
    lane: str = "exchange"
    """A team's collectives on one lane run one after another, in the order of their commands."""
    teams: int = 1
    """Number of teams that take part."""


class Wait(NamedTuple):
    """Every rank waits until a collective that its team has started ends."""

    key: Hashable


class Send(NamedTuple):
    """Every rank sends a message to the rank with the same position in another team, in the background."""

    key: Hashable
    label: str
    seconds: float


class Receive(NamedTuple):
    """Every rank waits for the message sent to it."""

    key: Hashable


Command = Compute | Start | Wait | Send | Receive

Program = Iterator[Command]


class DeadlockError(RuntimeError):
    """No team can continue; the message says what each team waits for."""


@dataclass(eq=False)
class _Collective:
    command: Start
    teams: list[int] = field(default_factory=list)
    """Teams that have started it."""
    ready: float = 0.0
    """Time at which the last rank reached it."""
    start: float = 0.0
    end: float | None = None
    waiting: list[int] = field(default_factory=list)
    """Teams that wait for its end."""
    left: float = 1.0
    """Fraction of the bytes not sent yet, at time `since`."""
    speed: float = 0.0
    since: float = 0.0
    """Time of the last change of `left`."""
    version: int = 0
    """Number of changes of the speed; an end expected before the latest change is void."""


@dataclass(eq=False)
class _Team:
    program: Program
    now_R: np.ndarray
    blocked: Command | None = None
    over: bool = False


class Engine:
    """Executes programs. Collectives are processed in order of time; programs run ahead as far as possible."""

    def __init__(self, programs: Sequence[tuple[int, Program]], num_resources: int, recorder: Recorder) -> None:
        """Create an engine for each team's number of ranks and program; resources are numbered from 0."""
        self._teams = [_Team(program, np.zeros(ranks)) for ranks, program in programs]
        self._recorder = recorder
        self._lanes: defaultdict[tuple[int, str], deque[_Collective]] = defaultdict(deque)
        self._collectives: dict[Hashable, _Collective] = {}
        self._messages: dict[Hashable, tuple[str, np.ndarray, np.ndarray]] = {}
        self._receivers: dict[Hashable, int] = {}
        self._runnable = deque(range(len(programs)))
        """Teams that can continue."""
        self._events: list[tuple[float, int, str, _Collective, int]] = []
        self._order = itertools.count()
        self._users: list[list[_Collective]] = [[] for _ in range(num_resources)]
        """Collectives in progress on each resource."""
        self.busy_seconds = np.zeros(num_resources)
        """Seconds of work of each resource, as if nothing were shared."""

    def run(self) -> float:
        """Execute all programs and return the time at which the last rank ends, or raise DeadlockError."""
        while self._runnable or self._events:
            while self._runnable:
                self._advance(self._runnable.popleft())
            if self._events:
                now, _, kind, collective, version = heapq.heappop(self._events)
                if kind == "begin":
                    self._begin(collective, now)
                elif version == collective.version:
                    self._finish(collective, now)
        stuck = {number: team.blocked for number, team in enumerate(self._teams) if not team.over}
        if stuck:
            raise DeadlockError("; ".join(f"team {number} waits for {command}" for number, command in stuck.items()))
        return max(float(team.now_R.max()) for team in self._teams)

    def _advance(self, number: int) -> None:
        """Run a team's program until it must wait for something whose time is unknown."""
        team = self._teams[number]
        while True:
            command = team.blocked or next(team.program, None)
            team.blocked = None
            if command is None:
                team.over = True
                return
            if not self._execute(number, team, command):
                team.blocked = command
                return

    def _execute(self, number: int, team: _Team, command: Command) -> bool:
        """Execute a command; return False if it must be repeated later."""
        if isinstance(command, Compute):
            begin_R = team.now_R
            team.now_R = team.now_R + command.seconds_R
            self._recorder.computed(number, command.label, begin_R, team.now_R)
        elif isinstance(command, Start):
            self._start(number, team, command)
        elif isinstance(command, Wait):
            collective = self._collectives[command.key]
            if collective.end is None:
                collective.waiting.append(number)
                return False
            begin_R, team.now_R = team.now_R, np.maximum(team.now_R, collective.end)
            self._recorder.waited(number, collective.command.label, begin_R, collective.start, team.now_R)
        elif isinstance(command, Send):
            self._messages[command.key] = command.label, team.now_R, team.now_R + command.seconds
            if command.key in self._receivers:
                self._runnable.append(self._receivers.pop(command.key))
        else:
            if command.key not in self._messages:
                self._receivers[command.key] = number
                return False
            label, sent_R, arrived_R = self._messages.pop(command.key)
            begin_R, team.now_R = team.now_R, np.maximum(team.now_R, arrived_R)
            self._recorder.waited(number, label, begin_R, sent_R, team.now_R)
        return True

    def _start(self, number: int, team: _Team, command: Start) -> None:
        found = self._collectives.setdefault(command.key, _Collective(command))
        found.teams.append(number)
        assert len(found.teams) <= command.teams, f"{command.key}: more than {command.teams} teams take part"
        found.ready = max(found.ready, float(team.now_R.max()))
        self._lanes[number, command.lane].append(found)
        self._offer(found, 0.0)

    def _offer(self, collective: _Collective, now: float) -> None:
        """Let a collective begin if all its teams have reached it and it is the first on their lanes."""
        command = collective.command
        first = all(self._lanes[team, command.lane][0] is collective for team in collective.teams)
        if first and len(collective.teams) == command.teams:
            self._push(max(now, collective.ready), "begin", collective)

    def _push(self, time: float, kind: str, collective: _Collective) -> None:
        heapq.heappush(self._events, (time, next(self._order), kind, collective, collective.version))

    def _begin(self, collective: _Collective, now: float) -> None:
        """Begin a collective: first its latency, then its work on resources."""
        latency, resources, seconds = collective.command.work
        if collective.version == 0:
            collective.start = now
            collective.version = 1
            if latency and len(resources):
                self._push(now + latency, "begin", collective)
                return
        if not len(resources):
            self._push(now + latency, "end", collective)
            return
        self.busy_seconds[resources] += seconds
        collective.since = now
        for resource in resources.tolist():
            self._users[resource].append(collective)
        self._share(collective, now)

    def _finish(self, collective: _Collective, now: float) -> None:
        collective.end = now
        collective.left = 0.0
        command = collective.command
        resources = command.work.resources
        for resource in resources.tolist():
            self._users[resource].remove(collective)
        # Collectives are compared by identity
        sharers = {one: None for resource in resources.tolist() for one in self._users[resource]}
        while sharers:
            for one in self._share(sharers.popitem()[0], now):
                sharers.pop(one, None)
        self._recorder.communicated(collective.teams, command.label, command.lane, collective.start, now)
        for team in collective.teams:
            lane = self._lanes[team, command.lane]
            lane.popleft()
            if lane:
                self._offer(lane[0], now)
        self._runnable += collective.waiting

    def _share(self, collective: _Collective, now: float) -> list[_Collective]:
        """Update and return this collective and those that share resources with it, directly or indirectly."""
        together = [collective]
        found = {collective}
        for one in together:
            for resource in one.command.work.resources.tolist():
                new = [other for other in self._users[resource] if other not in found]
                together += new
                found.update(new)
        for one, speed in zip(together, _speeds(together), strict=True):
            seconds = float(one.command.work.seconds.max())
            one.left -= one.speed * (now - one.since) / seconds
            one.speed = speed
            one.since = now
            one.version += 1
            remaining = one.left if one.left > ROUNDING else 0.0
            self._push(now + remaining * seconds / speed, "end", one)
        return together


def _speeds(together: Sequence[_Collective]) -> list[float]:
    if len(together) == 1:
        return [1.0]
    resources = np.unique(np.concatenate([one.command.work.resources for one in together]))
    use_CN = np.zeros((len(together), len(resources)))
    for use_N, one in zip(use_CN, together, strict=True):
        use_N[np.searchsorted(resources, one.command.work.resources)] = (
            one.command.work.seconds / one.command.work.seconds.max()
        )
    return speeds(use_CN).tolist()


def speeds(use_CN: np.ndarray) -> np.ndarray:
    """Return [C] each collective's speed, at most 1, by max-min fairness.

    The speeds of all collectives grow equally until a resource is used up. Then the collectives on this resource keep
    their speed, and the others continue to grow, up to 1.

    Args:
        use_CN: share of each resource that a collective uses at speed 1; 1 for its busiest resource.
    """
    speed_C = np.zeros(len(use_CN))
    grows_C = np.ones(len(use_CN), dtype=bool)
    left_N = np.ones(use_CN.shape[1])
    while grows_C.any():
        wanted_N = use_CN[grows_C].sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = np.where(wanted_N > 0, left_N / wanted_N, np.inf).min(initial=np.inf)
        step = min(step, 1.0 - speed_C[grows_C].max())
        speed_C[grows_C] += step
        left_N = np.maximum(left_N - step * wanted_N, 0.0)
        used_up_N = left_N <= ROUNDING
        grows_C &= (speed_C < 1.0 - ROUNDING) & ~(use_CN[:, used_up_N] > 0).any(1)
    return speed_C
