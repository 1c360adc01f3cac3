"""An MoE layer of a team in one iteration: loads and placement -> computation and messages.

In shapes, B counts microbatches, C chunks, H hosts of experts, and D the ranks of the team (all shards of hosts).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.cost.model import CostModel
from megatron_balance.flow.chunks.order import ChunkTimes, Order, Scheduler, makespan, sequential
from megatron_balance.flow.parallel_schedule import SCHEDULES, TokenStep
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import HostRules, sums_by_host, tokens_of
from megatron_balance.placement.trans_plan import TransPlan
from megatron_balance.profile.cluster_profile import ClusterProfile, Fit, Throughput
from megatron_balance.profile.kernel_times import Passes
from megatron_balance.simulate.engine import NOTHING, Work
from megatron_balance.simulate.network import TeamNetwork
from megatron_balance.simulate.programs import Direction, LayerWork
from megatron_balance.timeline.actions import Action, Operation

MOST_VARIATION = 1.2
"""Largest variance, over the squared mean, of rows whose products were measured."""

Parts = Callable[[Action], TransPlan]
"""Returns the messages of a Trans, an Agg or a part of one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RowExchange:
    """Collectives that carry rows through a layer in a team's parallel schedule (flow/parallel_schedule.py).

    Their times are those that `--moe-parallel-schedule auto` predicts (flow/schedule_choice.py). All shards of a host
    have equal shares of its rows.
    """

    network: TeamNetwork
    profile: ClusterProfile
    """Profile of all ranks of the team."""
    models: tuple[ExchangeModel, ...]
    """All-to-alls to choose the fastest from: among all ranks if `direct`, otherwise among hosts."""
    steps: Sequence[TokenStep] = SCHEDULES["megatron"]
    shards: int = 1
    """Number of shards of an expert; they are on consecutive ranks."""
    copies: int = 1
    """Number of consecutive ranks with the same tokens."""
    simultaneous: bool = False
    """Whether s2 gathers rows while it still receives others (SAA)."""
    token_bytes: float = 0.0
    """Bytes of one rank's tokens in a microbatch."""
    topk: int = 1
    """Rows of a token."""
    row_bytes: float = 0.0
    """Bytes of a row in the shards' gathers."""

    @property
    def direct(self) -> bool:
        """Whether one all-to-all sends rows to all shards of their expert."""
        return TokenStep.EP_ESP_ALL_TO_ALL in self.steps

    def repeated(self, counts_BHE: np.ndarray) -> np.ndarray:
        """Return the rows that hosts send, given those of their own tokens: with copies, unless the schedule splits."""
        if TokenStep.MP_SPLIT in self.steps or self.copies == 1:
            return counts_BHE
        together = max(1, self.copies // self.shards)
        batch, hosts, experts = counts_BHE.shape
        sums = counts_BHE.reshape(batch, hosts // together, together, experts).sum(2)
        return self.copies // together * sums.repeat(together, 1)

    def exchange(self, bytes_HH: np.ndarray) -> Work:
        """Return the work of one all-to-all: the first of a pass, or the second without SAA."""
        if self.direct and self.shards > 1:
            # Each shard sends its share of the host's rows to every shard of the target hosts
            bytes_HH = bytes_HH.repeat(self.shards, 0).repeat(self.shards, 1) / self.shards
        elif not self.gathers_tokens:
            bytes_HH = bytes_HH / self.shards
        return min((self.network.exchange(model, bytes_HH) for model in self.models), key=lambda work: work.alone)

    def returning(self, exchange: Work, chunks: int) -> Work:
        """Return the work of a chunk's second all-to-all, given the first one."""
        if not self.simultaneous or exchange is NOTHING:
            return exchange
        return self.network.together(exchange, self._gather(self.copies, self.topk * self.token_bytes / chunks))

    def among_shards(self, rows_H: np.ndarray) -> tuple[Work, Work]:
        """Return the shards' collectives after rows arrive and before results return, given the rows of each host."""
        most = float(rows_H.max())
        if self.shards == 1 or self.direct or not most:
            return NOTHING, NOTHING
        share_D = (rows_H / most).repeat(self.shards)
        num_bytes = most * self.row_bytes
        if self.gathers_tokens:
            line = self.profile.link("all_reduce", "intra")
            return NOTHING, self.network.gather(line, self.shards, num_bytes, 2, share_D)
        gather = self._gather(self.shards, num_bytes, share_D)
        return gather, gather

    def ends(self) -> tuple[Work, Work]:
        """Return the gathers before the first exchange of a pass and after the last one."""
        if self.gathers_tokens:
            return self._gather(self.shards, self.shards * self.token_bytes), NOTHING
        if TokenStep.MP_SPLIT not in self.steps or self.copies == 1 or self.simultaneous:
            return NOTHING, NOTHING
        splits_tokens = self.steps.index(TokenStep.MP_SPLIT) < self.steps.index(TokenStep.GATE)
        rows = 1 if splits_tokens else self.topk
        return NOTHING, self._gather(self.copies, rows * self.token_bytes)

    @property
    def gathers_tokens(self) -> bool:
        """Whether shards gather tokens instead of rows."""
        return self.shards > 1 and TokenStep.ESP_ALL_REDUCE in self.steps

    def _gather(self, members: int, num_bytes: float, share_D: np.ndarray | None = None) -> Work:
        line: Fit = self.profile.link("all_gather", "intra" if self.profile.node_size % members == 0 else "inter")
        return self.network.gather(line, members, num_bytes, share_D=share_D)


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerModel:
    """What the MoE layers of a team have in common: the same cost model and exchange."""

    cost: CostModel
    rows: RowExchange
    degrees: tuple[int, ...]
    """Numbers of chunks to choose from."""
    scheduler: Scheduler
    repeats: bool
    uneven: Passes
    """Seconds that a row costs more in a grouped product whose experts' rows have the square of their mean as variance.
    Experts of home slots have one grouped product, and guests have their own products."""

    def work(self, counts_BHE: np.ndarray, placements: Sequence[Placement], parts: Parts) -> LayerWork:
        """Return the layer's work without its plans, given each microbatch's placement."""
        hosted = [self._hosted(*one) for one in zip(counts_BHE, placements, strict=True)]
        loads = [(traffic_HH.astype(np.float64), slower_H) for traffic_HH, slower_H in hosted]
        transport = self.cost.transport
        network = self.rows.network
        return LayerWork(
            forward_B=self._directions(loads, self.cost.profile.forward, self.uneven.forward),
            backward_B=self._directions(loads, self.cost.profile.backward, self.uneven.backward),
            repeats=self.repeats,
            moves=lambda action: network.sending(transport, parts(action), backward=action.operation is Operation.AGG),
        )

    def _hosted(self, counts_HE: np.ndarray, placement: Placement) -> tuple[np.ndarray, np.ndarray]:
        """Return [H, H] rows between hosts, and [H] the rows in home slots times their `variations`."""
        rules = HostRules.of(placement, self.cost.split, self.cost.network.node_size)
        tokens_HP = tokens_of(counts_HE, placement, rules)
        hosts = placement.num_ranks
        home_HS = tokens_HP.sum(0).reshape(hosts, -1)[:, : placement.home_slots]
        return sums_by_host(tokens_HP, hosts), home_HS.sum(1) * variations(home_HS)

    def _directions(
        self, loads: Sequence[tuple[np.ndarray, np.ndarray]], line: Throughput, uneven: float
    ) -> list[Direction]:
        mean = self._choice(np.mean([traffic_HH for traffic_HH, _ in loads], axis=0), line)
        return [self._direction(traffic_HH, line, uneven * slower_H, *mean) for traffic_HH, slower_H in loads]

    def _choice(self, traffic_HH: np.ndarray, line: Throughput) -> tuple[int, Order]:
        found: list[tuple[float, int, Order]] = []
        for chunks in self.degrees:
            exchange = self._exchange(traffic_HH / chunks)
            back = self.rows.returning(exchange, chunks).alone
            spread, collect = (work.alone for work in self.rows.among_shards(traffic_HH.sum(0) / chunks))
            computed = float((traffic_HH.sum(0) / self.cost.rate_D).max()) / chunks
            coding = self._coding(traffic_HH / chunks)
            experts = line.overhead + line.seconds_per_token * computed
            one = ChunkTimes(coding, exchange.alone, coding + spread, experts, collect + coding, back, coding)
            times = (one,) * chunks
            order = sequential(times) if chunks == 1 else self.scheduler(times)
            found.append((makespan(order, times), chunks, order))
        _, chunks, order = min(found, key=lambda one: one[:2])
        return chunks, order

    def _direction(
        self, traffic_HH: np.ndarray, line: Throughput, slower_H: np.ndarray, chunks: int, order: Order
    ) -> Direction:
        exchange = self._exchange(traffic_HH / chunks)
        computed_H = traffic_HH.sum(0) / chunks
        alone_H = line.overhead * (computed_H > 0) + line.seconds_per_token * computed_H
        seconds_H = (alone_H + slower_H / chunks) / self.cost.rate_D
        back = self.rows.returning(exchange, chunks)
        spread, collect = self.rows.among_shards(computed_H)
        first, last = self.rows.ends()
        return Direction(
            order=order,
            dispatch_C=[exchange] * chunks,
            experts_CR=np.tile(seconds_H.repeat(self.rows.shards), (chunks, 1)),
            combine_C=[back] * chunks,
            coding=self._coding(traffic_HH / chunks),
            spread=spread,
            collect=collect,
            first=first,
            last=last,
        )

    def _coding(self, traffic_HH: np.ndarray) -> float:
        """Return half of the seconds for which the busiest rank compresses and decompresses."""
        part = 1.0 if self.rows.direct or self.rows.gathers_tokens else 1.0 / self.rows.shards
        return 0.5 * self.cost.coding * float(traffic_HH.sum(1).max()) * part

    def _exchange(self, traffic_HH: np.ndarray) -> Work:
        return self.rows.exchange(traffic_HH * self.cost.token_bytes)


def variations(rows_HS: np.ndarray) -> np.ndarray:
    """Return [H] the variance of the rows [H, S] of a host's slots over the squared mean, in slots with rows.

    Where it exceeds `MOST_VARIATION`, products are charged as if it did not.
    """
    used_H = np.maximum((rows_HS > 0).sum(1), 1)
    mean_H = np.maximum(rows_HS.sum(1), 1) / used_H
    variation_H = (rows_HS.astype(np.float64) ** 2).sum(1) / used_H / mean_H**2 - 1
    return np.clip(variation_H, 0.0, MOST_VARIATION)
