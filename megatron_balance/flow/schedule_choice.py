"""Predicts the fastest parallel schedule from a cluster profile, equally on all ranks.

For s1 and s2, this is Parm's Algorithm 1, with two errors of the paper corrected. The rows of all experts are E * T = k
* f * B * L, which line 2 of Algorithm 1 multiplies by M. The overlapped part is `y / N_MP`, as in Eq. 14, and its
all-gather is part of the overlapped time, as in line 5. A time that the paper omits is added if the profile has it:
every tensor-parallel rank sorts all tokens' rows in s2 and megatron, but only a part of them in s1. `baseline` is never
chosen, because it sends the same rows as megatron from every shard of a host.
"""

import functools
from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.cost.network import Network
from megatron_balance.flow.parallel_schedule import Shape, TokenStep, volumes
from megatron_balance.profile.cluster_profile import ClusterProfile, Fit


def choices(shape: Shape, ranks: int) -> tuple[str, ...]:
    """Return the schedules that differ for this shape and are possible with `ranks` shards of all hosts together."""
    found = ["s1"]
    if shape.mp > 1 and ranks % shape.mp == 0:
        found.append("s2")
    if shape.mp > 1 or shape.esp > 1:
        found.append("megatron")
    return tuple(found)


def ranges(shape: Shape, element_bytes: int) -> dict[str, tuple[float, float]]:
    """Return the range of bytes for which ScheduleModel evaluates each line of ParallelLines."""
    s1, s2 = (dict(volumes(schedule, shape)) for schedule in ("s1", "s2"))
    exchanged = s1[TokenStep.EP_ESP_ALL_TO_ALL] * element_bytes
    rows = shape.rows * shape.hidden * element_bytes
    found: dict[str, tuple[float, float]] = {"all_to_all": (exchanged, exchanged), "gathered": (rows, rows)}
    if shape.mp > 1:
        low, high = sorted(each[TokenStep.MP_ALL_GATHER] * element_bytes for each in (s1, s2))
        found |= {"all_gather": (low, high), "simultaneous": (exchanged, exchanged), "sorting": (rows / shape.mp, rows)}
    return found


@dataclass(frozen=True)
class ScheduleModel:
    """Predicts the seconds of one layout's schedules from measured lines or, failing these, from the links' lines."""

    profile: ClusterProfile
    """Profile of the ranks of all shards of all hosts."""
    mp: int
    """Number of ranks with the same tokens."""
    esp: int

    def seconds(self, schedule: str, shape: Shape, element_bytes: int, simultaneous: bool) -> float:
        """Return the seconds of a forward pass beyond the experts of s1 (Eq. 13 and 14 for s1 and s2); a backward pass
        takes the same steps in reverse. `simultaneous`: whether s2 gathers rows while it receives more (SAA)."""
        sizes = dict(volumes(schedule, shape))
        rows_bytes = shape.rows * shape.hidden * element_bytes
        if schedule == "megatron":
            repeated = (self.mp - 1) * shape.rows * self.esp / self.mp
            return (
                self._sorting(rows_bytes)
                + self._there_and_back(rows_bytes)
                + self.profile.forward.seconds_per_token * repeated
            )
        exchanged = sizes[TokenStep.EP_ESP_ALL_TO_ALL] * element_bytes
        gathered = sizes.get(TokenStep.MP_ALL_GATHER, 0) * element_bytes
        there = self._sorting(rows_bytes / (self.mp if schedule == "s1" else 1)) + self._all_to_all(exchanged)
        if schedule == "s2" and simultaneous:
            return there + self._simultaneous(exchanged)
        return there + self._all_to_all(exchanged) + (self._all_gather(gathered) if gathered else 0.0)

    def _measured(self, line: str) -> Fit | None:
        lines = self.profile.parallel
        return getattr(lines, line) if lines is not None and (lines.mp, lines.esp) == (self.mp, self.esp) else None

    def _all_gather(self, num_bytes: float) -> float:
        line = self._measured("all_gather") or self._gather_line(self.mp)
        return line.seconds(num_bytes)

    def _all_to_all(self, num_bytes: float) -> float:
        if (line := self._measured("all_to_all")) is not None:
            return line.seconds(num_bytes)
        ranks = self.profile.num_ranks
        return ExchangeModel.of(self.profile).seconds(np.full((ranks, ranks), num_bytes / ranks))

    def _there_and_back(self, num_bytes: float) -> float:
        """Return the seconds to send rows to one shard each, all-gather them among shards, and return results."""
        if (line := self._measured("gathered")) is not None:
            return line.seconds(num_bytes)
        ranks = np.arange(self.profile.num_ranks)
        counterparts = ranks[:, None] % self.esp == ranks % self.esp
        each = num_bytes * self.esp / self.profile.num_ranks
        one_way = float(self._network.batch_seconds(np.where(counterparts, each, 0.0) * (ranks[:, None] != ranks)))
        if self.esp > 1:
            one_way += self._gather_line(self.esp).seconds(num_bytes * self.esp)
        return 2 * one_way

    def _simultaneous(self, num_bytes: float) -> float:
        if (line := self._measured("simultaneous")) is not None:
            return line.seconds(num_bytes)
        near, far = self._levels(num_bytes)
        gathering = self._all_gather(num_bytes * self.mp / self.esp)
        together = max(near + gathering, far) if self._in_node(self.mp) else max(near, far + gathering)
        return self._all_to_all(num_bytes) + together - max(near, far)

    def _sorting(self, num_bytes: float) -> float:
        """Return the seconds of one direction; the measured time covers both."""
        line = self._measured("sorting")
        return 0.0 if line is None else line.seconds(num_bytes) / 2

    def _gather_line(self, members: int) -> Fit:
        return self.profile.link("all_gather", "intra" if self._in_node(members) else "inter")

    def _in_node(self, members: int) -> bool:
        """Return whether `members` consecutive ranks always share a node."""
        return self.profile.node_size % members == 0

    def _levels(self, num_bytes: float) -> tuple[float, float]:
        """Return the seconds of an even all-to-all's messages within nodes, and of those between nodes."""
        network = self._network
        crossing = network.crossing(np.full((network.num_ranks, network.num_ranks), num_bytes / network.num_ranks))
        nothing_2D = 0 * crossing.near_2XD
        near = network.byte_seconds(crossing._replace(far_2XD=nothing_2D))
        far = network.byte_seconds(crossing._replace(near_2XD=nothing_2D))
        return float(near), float(far)

    @functools.cached_property
    def _network(self) -> Network:
        return Network.of(self.profile)
