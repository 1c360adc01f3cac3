"""Activities of an iteration's ranks: sums, and spans of some ranks."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

COMPUTING = ("experts", "other computation", "optimizer", "codec")
WAITING = (
    *("exchange", "others' experts", "gathers", "context", "Trans", "Agg", "Plan", "Transfer", "pipeline", "reduction"),
    "launches",
)
"""Parts of a rank's time: computing and waiting. "others' experts": before an exchange or gather starts, a rank waits
for the slowest one. Gathers are those of tensor-parallel ranks and of the shards of experts; in "context", attention
waits for exchanges of context-parallel ranks. In "launches", the device waits for the host to launch kernels."""

PARTS = (*COMPUTING, *WAITING)

_WORDS = {
    "experts": ("FEC", "BEC", "experts"),
    "other computation": ("FNEC", "BNEC", "layers"),
    "exchange": ("A2A", "dispatch", "combine"),
    "gathers": ("gathers",),
    "context": ("context",),
    "Trans": ("TRANS", "BTRANS"),
    "Agg": ("AGG",),
    "Plan": ("PLAN",),
    "Transfer": ("TRANSFER",),
    "pipeline": ("message",),
    "reduction": ("reduction", "gather"),
    "optimizer": ("optimizer",),
    "codec": ("codec",),
    "launches": ("launches",),
}
"""Part -> words in the labels of its activities."""

_PART = {word: part for part, words in _WORDS.items() for word in words}


class RankSpan(NamedTuple):
    """An activity of a rank."""

    rank: int
    lane: str
    label: str
    start: float
    end: float


class Recorder:
    """Adds up the teams' activities, which come in no particular order of time."""

    def __init__(self, ranks: Sequence[np.ndarray], spans_of: Collection[int] = ()) -> None:
        """Create a recorder for the ranks of each team; it keeps the spans of some ranks."""
        self.ranks = ranks
        self.spans_of = frozenset(spans_of)
        num_ranks = 1 + max(int(ranks_R.max()) for ranks_R in ranks)
        self.seconds: defaultdict[str, np.ndarray] = defaultdict(lambda: np.zeros(num_ranks))
        """Seconds of each rank in each of PARTS."""
        self.in_progress: defaultdict[str, float] = defaultdict(float)
        """Seconds of each part's collectives, whether or not anyone waited for them."""
        self.spans: list[RankSpan] = []

    def computed(self, team: int, label: str, begin_R: np.ndarray, end_R: np.ndarray) -> None:
        """Add a computation of the team's ranks."""
        self.seconds[part_of(label)][self.ranks[team]] += end_R - begin_R
        self._keep(team, "computation", label, begin_R, end_R)

    def waited(self, team: int, label: str, begin_R: np.ndarray, start: float | np.ndarray, end_R: np.ndarray) -> None:
        """Add a wait of the team's ranks for something that started at `start`: a number, or one for each rank."""
        part = part_of(label)
        waited_R = end_R - begin_R
        if part in ("exchange", "gathers", "context"):
            idle_R = np.clip(start - begin_R, 0.0, waited_R)
            self.seconds["others' experts"][self.ranks[team]] += idle_R
            waited_R = waited_R - idle_R
        self.seconds[part][self.ranks[team]] += waited_R
        self._keep(team, "waits", label, begin_R, end_R)

    def communicated(self, teams: Sequence[int], label: str, lane: str, start: float, end: float) -> None:
        """Add the time for which a collective of these teams was in progress."""
        self.in_progress[part_of(label)] += (end - start) / len(teams)
        for team in teams:
            ranks_R = self.ranks[team]
            self._keep(team, lane, label, np.full(len(ranks_R), start), np.full(len(ranks_R), end))

    def _keep(self, team: int, lane: str, label: str, begin_R: np.ndarray, end_R: np.ndarray) -> None:
        if self.spans_of:
            for rank, begin, end in zip(self.ranks[team].tolist(), begin_R.tolist(), end_R.tolist(), strict=True):
                if rank in self.spans_of and end > begin:
                    self.spans.append(RankSpan(rank, lane, label, begin, end))


def part_of(label: str) -> str:
    """Return the member of PARTS that an activity with this label belongs to."""
    for word in reversed(label.split()):
        found = _PART.get(word.partition(".")[0])
        if found is not None:
            return found
    raise ValueError(f"label {label!r}: belongs to no part")
