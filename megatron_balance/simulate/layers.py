"""An MoE layer of a team in one iteration: from its loads and its placement to what it computes and sends."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.cost.model import CostModel
from megatron_balance.flow.chunks.order import ChunkTimes, Order, Scheduler, makespan, sequential
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import TransferPlan
from megatron_balance.profile.cluster_profile import Throughput
from megatron_balance.simulate.engine import Work
from megatron_balance.simulate.network import TeamNetwork
from megatron_balance.simulate.programs import Direction, LayerWork
from megatron_balance.timeline.actions import Action, Operation

Parts = Callable[[Action], TransferPlan]
"""Returns the messages of a Trans, an Agg or a part of one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerModel:
    """What the MoE layers of a team have in common."""

    cost: CostModel
    models: tuple[ExchangeModel, ...]
    """Models of the all-to-alls to choose from; the fastest one is used."""
    degrees: tuple[int, ...]
    """Numbers of chunks to choose from."""
    scheduler: Scheduler
    network: TeamNetwork
    repeats: bool

    def work(self, counts_BDE: np.ndarray, placement: Placement, parts: Parts, plan: Work, planner: int) -> LayerWork:
        """Return the layer's work.

        Args:
            counts_BDE: load of each microbatch.
            parts: see Parts.
            plan: time of the thread that makes the next plan, and its rank.
        """
        traffic_BDD = self.cost.traffic(counts_BDE, placement).astype(np.float64)
        transport, network = self.cost.transport, self.network
        return LayerWork(
            forward_B=self._directions(traffic_BDD, self.cost.profile.forward),
            backward_B=self._directions(traffic_BDD, self.cost.profile.backward),
            repeats=self.repeats,
            moves=lambda action: network.sending(transport, parts(action), backward=action.operation is Operation.AGG),
            plan=plan,
            planner=planner,
        )

    def _directions(self, traffic_BDD: np.ndarray, line: Throughput) -> list[Direction]:
        mean = self._choice(traffic_BDD.mean(0), line)
        return [self._direction(traffic_DD, line, *mean) for traffic_DD in traffic_BDD]

    def _choice(self, traffic_DD: np.ndarray, line: Throughput) -> tuple[int, Order]:
        """Return the number of chunks and their order with the shortest time for this traffic."""
        found: list[tuple[float, int, Order]] = []
        for chunks in self.degrees:
            exchange = self._exchange(traffic_DD / chunks).alone
            computed = float((traffic_DD.sum(0) / self.cost.rate_D).max()) / chunks
            coding = self._coding(traffic_DD / chunks)
            experts = line.overhead + line.seconds_per_token * computed
            times = (ChunkTimes(coding, exchange, coding, experts, coding, exchange, coding),) * chunks
            order = sequential(times) if chunks == 1 else self.scheduler(times)
            found.append((makespan(order, times), chunks, order))
        _, chunks, order = min(found, key=lambda one: one[:2])
        return chunks, order

    def _direction(self, traffic_DD: np.ndarray, line: Throughput, chunks: int, order: Order) -> Direction:
        exchange, computed_D = self._exchange(traffic_DD / chunks), traffic_DD.sum(0) / chunks
        seconds_D = (line.overhead * (computed_D > 0) + line.seconds_per_token * computed_D) / self.cost.rate_D
        works = [exchange] * chunks
        return Direction(order, works, np.tile(seconds_D, (chunks, 1)), works, self._coding(traffic_DD / chunks))

    def _coding(self, traffic_DD: np.ndarray) -> float:
        """Return half of the seconds in which the busiest rank compresses and decompresses."""
        return 0.5 * self.cost.coding * float(traffic_DD.sum(1).max()) if self.cost.coding else 0.0

    def _exchange(self, traffic_DD: np.ndarray) -> Work:
        bytes_DD = traffic_DD * self.cost.token_bytes
        return min((self.network.exchange(model, bytes_DD) for model in self.models), key=lambda work: work.alone)
