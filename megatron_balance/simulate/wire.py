"""How rows travel through an MoE layer of a team: the collectives of its parallel schedule (flow/parallel_schedule.py).

They take what `--moe-parallel-schedule auto` predicts from the links of a cluster (flow/schedule_choice.py), and a
team's ranks share links with others. Rows of a host have equal parts on all of its shards.

In the shapes, H counts hosts, B microbatches, and D the ranks of the team: all shards of all hosts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.flow.parallel_schedule import SCHEDULES, TokenStep
from megatron_balance.profile.cluster_profile import ClusterProfile, Fit
from megatron_balance.simulate.engine import NOTHING, Work
from megatron_balance.simulate.network import TeamNetwork


@dataclass(frozen=True, eq=False, kw_only=True)
class Wire:
    """The links of a team, and what its schedule does with them."""

    network: TeamNetwork
    profile: ClusterProfile
    """Of all ranks of the team."""

    models: tuple[ExchangeModel, ...]
    """Models of the all-to-alls to choose from; the fastest one is used. They are among all ranks if `direct`, or else
    among hosts."""

    steps: Sequence[TokenStep] = SCHEDULES["megatron"]
    shards: int = 1
    """Number of shards of an expert, which are consecutive ranks."""

    copies: int = 1
    """Number of consecutive ranks with the same tokens."""

    simultaneous: bool = False
    """Whether s2 gathers rows while it receives others (SAA)."""

    token_bytes: float = 0.0
    """Bytes of a rank's tokens of a microbatch."""

    topk: int = 1
    """Rows of a token."""

    row_bytes: float = 0.0
    """Bytes of a row, as shards gather it."""

    @property
    def direct(self) -> bool:
        """Whether rows go to all shards of their expert in one all-to-all."""
        return TokenStep.EP_ESP_ALL_TO_ALL in self.steps

    @property
    def copies_sent(self) -> float:
        """Part of a host's rows that each of its shards sends in an all-to-all, with their copies."""
        return 1.0 if self.direct or self._gathers_tokens else 1.0 / self.shards

    def repeated(self, counts_BHE: np.ndarray) -> np.ndarray:
        """Return the rows that hosts send, given the rows of their parts of all tokens.

        With the schedules that do not split, each rank sends the rows of all tokens that it has.
        """
        if TokenStep.MP_SPLIT in self.steps or self.copies == 1:
            return counts_BHE
        together = max(1, self.copies // self.shards)
        batch, hosts, experts = counts_BHE.shape
        sums = counts_BHE.reshape(batch, hosts // together, together, experts).sum(2)
        return self.copies // together * sums.repeat(together, 1)

    def exchange(self, bytes_HH: np.ndarray) -> Work:
        """Return the work of one all-to-all: the first one of a pass, or the second one without SAA."""
        if self.direct and self.shards > 1:
            # Each shard sends its part of the host's rows to every shard of their hosts
            bytes_HH = bytes_HH.repeat(self.shards, 0).repeat(self.shards, 1) / self.shards
        elif not self._gathers_tokens:
            bytes_HH = bytes_HH / self.shards
        return min((self.network.exchange(model, bytes_HH) for model in self.models), key=lambda work: work.alone)

    def returning(self, exchange: Work, chunks: int) -> Work:
        """Return the work of the second all-to-all of a chunk, given the first one."""
        if not self.simultaneous or exchange is NOTHING:
            return exchange
        return self.network.together(exchange, self._gather(self.copies, self.topk * self.token_bytes / chunks))

    def among_shards(self, rows_H: np.ndarray) -> tuple[Work, Work]:
        """Return the collectives of shards after rows arrive, and before results return, for rows of each host."""
        most = float(rows_H.max())
        if self.shards == 1 or self.direct or not most:
            return NOTHING, NOTHING
        share_D = (rows_H / most).repeat(self.shards)
        num_bytes = most * self.row_bytes
        if self._gathers_tokens:
            line = self.profile.link("all_reduce", "intra")
            return NOTHING, self.network.gather(line, self.shards, num_bytes, 2, share_D)
        gather = self._gather(self.shards, num_bytes, share_D)
        return gather, gather

    def ends(self) -> tuple[Work, Work]:
        """Return what ranks gather before the first exchange of a pass, and after the last one."""
        if self._gathers_tokens:
            return self._gather(self.shards, self.shards * self.token_bytes), NOTHING
        if TokenStep.MP_SPLIT not in self.steps or self.copies == 1 or self.simultaneous:
            return NOTHING, NOTHING
        splits_tokens = self.steps.index(TokenStep.MP_SPLIT) < self.steps.index(TokenStep.GATE)
        rows = 1 if splits_tokens else self.topk
        return NOTHING, self._gather(self.copies, rows * self.token_bytes)

    @property
    def _gathers_tokens(self) -> bool:
        return self.shards > 1 and TokenStep.ESP_ALL_REDUCE in self.steps

    def _gather(self, members: int, num_bytes: float, share_D: np.ndarray | None = None) -> Work:
        line: Fit = self.profile.link("all_gather", "intra" if self.profile.node_size % members == 0 else "inter")
        return self.network.gather(line, members, num_bytes, share_D=share_D)
