"""Predicts whether s1 or s2 takes less time: Parm's Algorithm 1, from a cluster profile, the same on all ranks.

Experts compute the same rows in both; the exchanges differ. Two slips of the paper are corrected. The rows of all
experts are E * T = k * f * B * L (line 2 of Algorithm 1 multiplies them by M). The overlapped part is `y / N_MP`, as in
Eq. 14, and its all-gather is part of the overlapped time, as in line 5. If the profile
has it, a time that the paper omits is added: every tensor-parallel rank sorts all tokens' rows in s2, a part in s1.
"""

from dataclasses import dataclass

import numpy as np

from megatron_balance.comm.auto import predict
from megatron_balance.flow.parallel_schedule import Shape, TokenStep, volumes
from megatron_balance.profile.cluster_profile import ClusterProfile, ParallelLines


def ranges(shape: Shape, element_bytes: int) -> dict[str, tuple[float, float]]:
    """Return, for each line of ParallelLines, the fewest and the most bytes for which ScheduleModel needs its time."""
    s1, s2 = (dict(volumes(schedule, shape)) for schedule in ("s1", "s2"))
    gathered = sorted(found[TokenStep.MP_ALL_GATHER] * element_bytes for found in (s1, s2))
    exchanged, rows = s1[TokenStep.EP_ESP_ALL_TO_ALL] * element_bytes, shape.rows * shape.hidden * element_bytes
    return {
        "all_gather": (gathered[0], gathered[1]),
        "all_to_all": (exchanged, exchanged),
        "simultaneous": (exchanged, exchanged),
        "sorting": (rows / shape.mp, rows),
    }


@dataclass(frozen=True)
class ScheduleModel:
    """Predicts the seconds of one layout's exchanges, from measured lines or else from the lines of its links."""

    profile: ClusterProfile
    """Profile of the ranks of all shards of all hosts."""
    mp: int
    esp: int

    def seconds(self, schedule: str, shape: Shape, element_bytes: int, simultaneous: bool) -> float:
        """Return the seconds of a forward pass; a backward pass does the same in reverse.

        Args:
            schedule: s1 (Eq. 13) or s2 (Eq. 14).
            simultaneous: whether s2 gathers rows while it receives others (SAA).
        """
        sizes = [(step, elements * element_bytes) for step, elements in volumes(schedule, shape)]
        total = self._sorting(shape.rows * shape.hidden * element_bytes / (self.mp if schedule == "s1" else 1))
        if schedule == "s2" and simultaneous:
            *sizes, (_, rows_bytes), _ = sizes
            total += self._simultaneous(rows_bytes)
        of = {TokenStep.EP_ESP_ALL_TO_ALL: self._all_to_all, TokenStep.MP_ALL_GATHER: self._all_gather}
        return total + sum(of[step](num_bytes) for step, num_bytes in sizes)

    @property
    def _measured(self) -> ParallelLines | None:
        lines = self.profile.parallel
        return lines if lines is not None and (lines.mp, lines.esp) == (self.mp, self.esp) else None

    def _all_gather(self, num_bytes: float) -> float:
        if self._measured is not None:
            return self._measured.all_gather.seconds(num_bytes)
        return self.profile.link("all_gather", "intra" if self._in_node else "inter").seconds(num_bytes)

    def _all_to_all(self, num_bytes: float) -> float:
        if self._measured is not None:
            return self._measured.all_to_all.seconds(num_bytes)
        return max(self._levels(num_bytes))

    def _simultaneous(self, num_bytes: float) -> float:
        if self._measured is not None:
            return self._measured.simultaneous.seconds(num_bytes)
        near, far = self._levels(num_bytes)
        gathering = self._all_gather(num_bytes * self.mp / self.esp)
        return max(near + gathering, far) if self._in_node else max(near, far + gathering)

    def _sorting(self, num_bytes: float) -> float:
        """Return half of the measured time, which covers both directions."""
        return 0.0 if self._measured is None else self._measured.sorting.seconds(num_bytes) / 2

    @property
    def _in_node(self) -> bool:
        """Whether tensor-parallel ranks, which have consecutive numbers, share a node."""
        return self.profile.node_size % self.mp == 0

    def _levels(self, num_bytes: float) -> tuple[float, float]:
        """Return the seconds of an even all-to-all inside nodes, and between nodes."""
        ranks = self.profile.num_ranks
        bytes_DD, node = np.full((ranks, ranks), num_bytes / ranks), np.arange(ranks) // self.profile.node_size
        same_node = node[:, None] == node
        near, far = (predict(["p2p"], bytes_DD * level, self.profile)["p2p"] for level in (same_node, ~same_node))
        return near, far
