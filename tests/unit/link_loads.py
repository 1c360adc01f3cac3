"""Slow reference of `placement.links`: route by route, and link by link."""

import math
from collections import defaultdict

from tests.unit.slow_routes import Route, ends


class LinkLoads:
    """How busy routes keep every rank's links and every node's adapters: a lower bound on the time of Trans.

    A rank sends one piece at a time, and receives one. The first piece has to pass the links ahead of it on its route
    first, and the last piece has to pass the links behind it afterwards. The unit of time is a piece within a node.
    """

    def __init__(self, num_ranks: int, node_size: int, adapters: float) -> None:
        """
        Args:
            adapters: number of ranks of a node that can send to other nodes at their full rate at the same time.
        """
        self.num_ranks = num_ranks
        self.node_size = node_size
        self.adapters = adapters if adapters < node_size else None
        nodes = -(-num_ranks // node_size) if self.adapters else 0
        # Sending and receiving ranks, then sending and receiving nodes: busy time, least time before the first piece
        # and after the last one
        ends = 2 * (num_ranks + nodes)
        self._busy = [0.0] * ends
        self._before = [math.inf] * ends
        self._after = [math.inf] * ends
        self._nodes = nodes
        self._alone: dict[float, float] = {}
        """Pairs as in `lines`, from single ranks of single routes."""

    def add(self, route: Route) -> None:
        """Add an expert's route."""
        sends: defaultdict[tuple[int, float], list[tuple[float, float]]] = defaultdict(list)
        ranks = self.num_ranks
        for source, target, time, before, behind in route:
            sends[source, before].append((behind, time))
            self._use(source, time, before, behind)
            self._use(ranks + target, time, before, behind)
            if self.adapters and source // self.node_size != target // self.node_size:
                first = 2 * ranks
                self._use(first + source // self.node_size, time / self.adapters, before, behind)
                self._use(first + self._nodes + target // self.node_size, time / self.adapters, before, behind)
        for (_, before), behind in sends.items():
            for spent, end in ends(behind):
                self._alone[spent] = max(self._alone.get(spent, 0), before + end - spent)

    def _use(self, end: int, time: float, before: float, behind: float) -> None:
        self._busy[end] += time
        if before < self._before[end]:
            self._before[end] = before
        if behind < self._after[end]:
            self._after[end] = behind

    @property
    def lines(self) -> list[tuple[float, float]]:
        """Pairs (m, x), ascending: experts in c pieces take at least m * c + x. Empty without a route."""
        lines = self._alone.copy()
        for busy, before, after in zip(self._busy, self._before, self._after, strict=True):
            if busy and before + after > lines.get(busy, -1):
                lines[busy] = before + after
        return sorted(lines.items())
