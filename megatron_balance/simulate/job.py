"""A job whose iterations are simulated: its stages and teams, and how their placements follow from loads."""

import copy
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from megatron_balance.placement.placement import Placement
from megatron_balance.placement.transfers import TransferPlan
from megatron_balance.planning.manager import Manager
from megatron_balance.simulate.engine import NOTHING, Engine, Work
from megatron_balance.simulate.layers import LayerModel
from megatron_balance.simulate.network import Fabric
from megatron_balance.simulate.programs import LayerWork, Stage, program
from megatron_balance.simulate.result import Recorder
from megatron_balance.timeline.actions import Action, Operation
from megatron_balance.timeline.layer_state import both_parts
from megatron_balance.timeline.planner import plan_for

Key = tuple[int, int, int]
"""Stage, team in the stage, MoE layer."""


class LoadSource(Protocol):
    """Where loads come from."""

    def draw(self, iteration: int, layer: int, team: int, microbatches: int) -> np.ndarray:
        """Return [B, D, E] int64: the load of each microbatch of a team, with a row for each host of its experts."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulatedStage:
    """A pipeline stage of a simulated job."""

    stage: Stage
    models: Sequence[LayerModel]
    """What the MoE layers of each team have in common."""
    managers: Mapping[int, Manager]
    """A manager for each MoE layer, before the first iteration; its policy does nothing in a run without one."""
    overlaps: Mapping[int, tuple[float, float]]
    """Seconds of the computation that hides a layer's Trans and Agg, as in `both_parts`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulatedJob:
    """Everything about a job that does not change from one iteration to the next."""

    fabric: Fabric
    stages: Sequence[SimulatedStage]
    microbatches: int
    plans: bool
    """Whether there is a policy."""
    exact: bool = False
    """Whether plans are for the load of the iteration in progress, and known before its rows are sent."""
    plan_seconds: float | None = None
    """Seconds of a plan; None: those of this machine."""


class Result(NamedTuple):
    """A simulated iteration."""

    seconds: float
    recorder: Recorder
    """What the ranks did."""
    busy_R: np.ndarray
    """Seconds for which each of the fabric's resources worked."""


@dataclass(eq=False)
class Simulation:
    """Simulates one iteration of a job after another; placements follow from the loads of earlier ones."""

    job: SimulatedJob
    loads: LoadSource
    progress: Callable[[str], None] = lambda text: None
    """Receives a line of progress."""
    _managers: dict[Key, Manager] = field(default_factory=dict)
    _transfers: dict[Key, TransferPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stage in self.job.stages:
            for team in range(stage.stage.teams):
                for number, manager in stage.managers.items():
                    self._managers[stage.stage.number, team, number] = copy.copy(manager)

    def run(self, iterations: int, spans_of: Collection[int] = ()) -> Result:
        """Simulate iterations and return the last one.

        Args:
            iterations: their number, at least 1.
            spans_of: ranks whose spans in the last iteration are kept.
        """
        for number in range(iterations - 1):
            self.iteration(number)
        return self.iteration(iterations - 1, spans_of)

    def iteration(self, number: int, spans_of: Collection[int] = ()) -> Result:
        """Simulate one iteration; iterations follow each other."""
        programs, teams_ranks, ends = [], [], []
        for stage in self.job.stages:
            self.progress(f"iteration {number}: plans of stage {stage.stage.number}")
            for team, model in enumerate(stage.models):
                layers = {}
                for index, layer in enumerate(stage.managers):
                    key = stage.stage.number, team, layer
                    layers[layer], end = self._layer(key, model, stage.overlaps[layer], number, index)
                    ends.append(end)
                ranks_D = model.network.ranks_D
                programs.append((len(ranks_D), program(stage.stage, layers, team, len(ranks_D))))
                teams_ranks.append(ranks_D)
        self.progress(f"iteration {number}: {len(programs)} teams")
        recorder = Recorder(teams_ranks, spans_of)
        engine = Engine(programs, self.job.fabric.num_resources, recorder)
        seconds = engine.run()
        for end in ends:
            end()
        return Result(seconds, recorder, engine.busy_seconds)

    def _layer(
        self, key: Key, model: LayerModel, overlap: tuple[float, float], number: int, index: int
    ) -> tuple[LayerWork, Callable[[], object]]:
        """Return a layer's work in an iteration, and a function that ends the iteration and adopts the next plan."""
        job, manager = self.job, self._managers[key]
        team, layer = key[1:]
        counts_BDE = model.wire.repeated(self.loads.draw(number, layer, team, job.microbatches))
        observe: Callable[[], object] = functools.partial(manager.observe, counts_BDE)
        planned, end = NOTHING, observe
        if job.plans and job.exact:
            manager.expected_BDE = counts_BDE[:1] * job.microbatches
            planned, adopt = self._plan(key, manager)
            adopt()
        transfers = self._transfers.get(key, TransferPlan(()))
        placement: Placement = manager.placement
        if job.plans and not job.exact:
            observe()
            planned, end = self._plan(key, manager)
        parts = functools.partial(_part, manager, overlap, transfers)
        planner = index % len(model.network.ranks_D)
        return model.work(counts_BDE, placement, parts, planned, planner), end

    def _plan(self, key: Key, manager: Manager) -> tuple[Work, Callable[[], None]]:
        if not manager.is_due(0 if self.job.exact else 1):
            return NOTHING, lambda: None
        assert manager.expected_BDE is not None
        question, start = manager.question(manager.expected_BDE, self.job.microbatches), time.thread_time()
        plan = plan_for(question)
        seconds = time.thread_time() - start if self.job.plan_seconds is None else self.job.plan_seconds

        def adopt() -> None:
            if plan.decision.placement is not None:
                manager.adopt(plan.decision)
                if plan.transfers is not None:
                    self._transfers[key] = plan.transfers

        return NOTHING._replace(latency=seconds), adopt


def _part(manager: Manager, others: tuple[float, float], plan: TransferPlan, action: Action) -> TransferPlan:
    """Return what a Trans, an Agg or a part of one sends, as `LayerState.part` does."""
    if action.parts == 1:
        return plan
    trans, agg = both_parts(manager.cost.transport, others, plan)
    forward = action.operation is Operation.TRANS
    under_experts, under_others = trans if forward else agg
    return under_experts if (action.part == 1) == forward else under_others
