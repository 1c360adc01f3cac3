"""An MoE layer of a team in one iteration: from its loads and its placement to what it computes and sends.

In the shapes, B counts microbatches, H hosts of experts, and C chunks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.flow.chunks.order import ChunkTimes, Order, Scheduler, makespan, sequential
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import TransferPlan
from megatron_balance.profile.cluster_profile import Throughput
from megatron_balance.simulate.engine import Work
from megatron_balance.simulate.network import TeamNetwork
from megatron_balance.simulate.programs import Direction, LayerWork
from megatron_balance.simulate.wire import Wire
from megatron_balance.timeline.actions import Action, Operation

Parts = Callable[[Action], TransferPlan]
"""Returns the messages of a Trans, an Agg or a part of one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerModel:
    """What the MoE layers of a team have in common."""

    cost: CostModel
    wire: Wire
    degrees: tuple[int, ...]
    """Numbers of chunks to choose from."""
    scheduler: Scheduler
    repeats: bool

    @property
    def network(self) -> TeamNetwork:
        """The links of the team."""
        return self.wire.network

    def work(self, counts_BHE: np.ndarray, placement: Placement, parts: Parts, plan: Work, planner: int) -> LayerWork:
        """Return the layer's work.

        Args:
            counts_BHE: load of each microbatch.
            parts: see Parts.
            plan: time of the thread that makes the next plan, and its rank.
        """
        traffic_BHH = self.cost.traffic(counts_BHE, placement).astype(np.float64)
        transport = self.cost.transport
        network = self.network
        return LayerWork(
            forward_B=self._directions(traffic_BHH, self.cost.profile.forward),
            backward_B=self._directions(traffic_BHH, self.cost.profile.backward),
            repeats=self.repeats,
            moves=lambda action: network.sending(transport, parts(action), backward=action.operation is Operation.AGG),
            plan=plan,
            planner=planner,
        )

    def _directions(self, traffic_BHH: np.ndarray, line: Throughput) -> list[Direction]:
        mean = self._choice(traffic_BHH.mean(0), line)
        return [self._direction(traffic_HH, line, *mean) for traffic_HH in traffic_BHH]

    def _choice(self, traffic_HH: np.ndarray, line: Throughput) -> tuple[int, Order]:
        """Return the number of chunks and their order with the shortest time for this traffic."""
        found: list[tuple[float, int, Order]] = []
        for chunks in self.degrees:
            exchange = self._exchange(traffic_HH / chunks)
            back = self.wire.returning(exchange, chunks).alone
            spread, collect = (work.alone for work in self.wire.among_shards(traffic_HH.sum(0) / chunks))
            computed = float((traffic_HH.sum(0) / self.cost.rate_D).max()) / chunks
            coding = self._coding(traffic_HH / chunks)
            experts = line.overhead + line.seconds_per_token * computed
            one = ChunkTimes(coding, exchange.alone, coding + spread, experts, collect + coding, back, coding)
            times = (one,) * chunks
            order = sequential(times) if chunks == 1 else self.scheduler(times)
            found.append((makespan(order, times), chunks, order))
        _, chunks, order = min(found, key=lambda one: one[:2])
        return chunks, order

    def _direction(self, traffic_HH: np.ndarray, line: Throughput, chunks: int, order: Order) -> Direction:
        exchange = self._exchange(traffic_HH / chunks)
        computed_H = traffic_HH.sum(0) / chunks
        seconds_H = (line.overhead * (computed_H > 0) + line.seconds_per_token * computed_H) / self.cost.rate_D
        back = self.wire.returning(exchange, chunks)
        spread, collect = self.wire.among_shards(computed_H)
        first, last = self.wire.ends()
        return Direction(
            order=order,
            dispatch_C=[exchange] * chunks,
            experts_CR=np.tile(seconds_H.repeat(self.wire.shards), (chunks, 1)),
            combine_C=[back] * chunks,
            coding=self._coding(traffic_HH / chunks),
            spread=spread,
            collect=collect,
            first=first,
            last=last,
        )

    def _coding(self, traffic_HH: np.ndarray) -> float:
        """Return half of the seconds in which the busiest rank compresses and decompresses."""
        if not self.cost.coding:
            return 0.0
        return 0.5 * self.cost.coding * float(traffic_HH.sum(1).max()) * self.wire.copies_sent

    def _exchange(self, traffic_HH: np.ndarray) -> Work:
        return self.wire.exchange(traffic_HH * self.cost.token_bytes)
