"""Which of s1 and s2 takes less time: Parm's Algorithm 1, from a cluster profile, so that all ranks say the same.

Experts compute as much in either; what differs is exchanges. Two slips of the paper are mended: the rows of all experts
are E * T = k * f * B * L (line 2 of Algorithm 1 has them times M), and what overlaps is `y / N_MP`, as in Eq. 14, whose
all-gather is part of the overlapped time, as in line 5. And one thing is added that the paper leaves out, where it was
measured: s2 sorts the rows of all tokens on every tensor-parallel rank, s1 those of a part.
"""

from dataclasses import dataclass

import numpy as np

from megatron_balance.comm.auto import predict
from megatron_balance.flow.parallel_schedule import Shape, TokenStep, volumes
from megatron_balance.profile.cluster_profile import ClusterProfile, ParallelLines


def ranges(shape: Shape, element_bytes: int) -> dict[str, tuple[float, float]]:
    """By line of ParallelLines, the fewest and the most bytes that ScheduleModel asks about for layers of a shape."""
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
    """Seconds of the exchanges of one layout: from measured lines, or else from those of its links."""

    profile: ClusterProfile
    """Of all shards of all hosts."""
    mp: int
    esp: int

    def seconds(self, schedule: str, shape: Shape, element_bytes: int, simultaneous: bool) -> float:
        """Of a forward pass; a backward pass does the same in reverse.

        Args:
            schedule: s1 (Eq. 13) or s2 (Eq. 14).
            simultaneous: whether s2 gathers rows while others come (SAA).
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
        """Half of both ways."""
        return 0.0 if self._measured is None else self._measured.sorting.seconds(num_bytes) / 2

    @property
    def _in_node(self) -> bool:
        """Whether tensor-parallel ranks, which follow each other, share a node."""
        return self.profile.node_size % self.mp == 0

    def _levels(self, num_bytes: float) -> tuple[float, float]:
        """What an even all-to-all takes inside nodes, and between them."""
        ranks = self.profile.num_ranks
        bytes_DD, node = np.full((ranks, ranks), num_bytes / ranks), np.arange(ranks) // self.profile.node_size
        same_node = node[:, None] == node
        near, far = (predict(["p2p"], bytes_DD * level, self.profile)["p2p"] for level in (same_node, ~same_node))
        return near, far
