"""A simulated job: its stages and teams, and placements that follow from loads."""

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import EMPTY_PLAN, TransPlan
from megatron_balance.planning.manager import Manager
from megatron_balance.planning.ownership import OwnerChange, owner_changes
from megatron_balance.planning.within import PassPlan, PlanPass
from megatron_balance.simulate.engine import NOTHING, Engine, Work
from megatron_balance.simulate.layers import LayerModel
from megatron_balance.simulate.network import Fabric, at_once
from megatron_balance.simulate.programs import LayerWork, StageSchedule, TeamProgram
from megatron_balance.simulate.result import Recorder
from megatron_balance.timeline.actions import Action
from megatron_balance.timeline.layer_state import rounds_of
from megatron_balance.timeline.planner import plan_for

Made = TypeVar("Made")

Key = tuple[int, int, int]
"""Number of the pipeline stage, team in the stage, MoE layer."""


LoadSource = Callable[[int, int, int, int], np.ndarray]
"""(iteration, layer, team, number of microbatches) -> [B, D, E] int64: the load of each microbatch of a team, with a
row for each host of its experts."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulatedStage:
    """A pipeline stage of a simulated job."""

    stage: StageSchedule
    ranks: Sequence[np.ndarray]
    """Job ranks of each team, ascending."""
    models: Sequence[LayerModel] = ()
    """Model of each team's MoE layers; empty if the stage has none."""
    managers: Mapping[int, Manager] = field(default_factory=dict)
    """A manager for each MoE layer, before the first iteration; in a run without a policy, it makes no plans."""
    within: Mapping[int, PlanPass] = field(default_factory=dict)
    """Plans for the exact load of each microbatch, by MoE layer; empty if there are none."""
    overlaps: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds of the computation that can hide a layer's Trans and Agg, as in `rounds_of`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulatedJob:
    """The constants of a job: everything that is equal in all iterations."""

    fabric: Fabric
    stages: Sequence[SimulatedStage]
    microbatches: int
    plans: bool
    """Whether placements are planned for the next iteration."""
    moves_owners: bool = False
    """Whether experts may change owners; if so, all teams of a stage share a placement, for their mean load."""
    plan_seconds: float | None = None
    """Seconds of a plan; None: as measured on this machine."""


class Result(NamedTuple):
    """A simulated iteration."""

    seconds: float
    recorder: Recorder
    """Activities of the ranks."""
    busy_R: np.ndarray
    """Seconds of work of each of the fabric's resources."""


@dataclass(eq=False)
class Simulation:
    """Simulates consecutive iterations of a job; placements follow from the loads of earlier iterations."""

    job: SimulatedJob
    loads: LoadSource
    progress: Callable[[str], None] = lambda text: None
    """Receives lines about progress."""
    _managers: dict[Key, Manager] = field(default_factory=dict)
    _trans_plans: dict[Key, TransPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stage in self.job.stages:
            for team in range(1 if self.job.moves_owners else stage.stage.teams):
                for number, manager in stage.managers.items():
                    self._managers[stage.stage.number, team, number] = copy.copy(manager)

    def run(self, iterations: int, spans_of: Collection[int] = ()) -> Result:
        """Simulate one or more iterations; return the last one, with the spans of some ranks."""
        for number in range(iterations - 1):
            self.iteration(number)
        return self.iteration(iterations - 1, spans_of)

    def iteration(self, number: int, spans_of: Collection[int] = ()) -> Result:
        """Simulate one iteration; calls must be in order."""
        programs = []
        teams_ranks = []
        ends = []
        for stage in self.job.stages:
            self.progress(f"iteration {number}: plans of stage {stage.stage.number}")
            works: list[dict[int, LayerWork]] = [{} for _ in stage.ranks]
            for index, layer in enumerate(stage.managers):
                found, end = self._layer(stage, layer, number, index)
                ends += end
                for team, work in enumerate(found):
                    works[team][layer] = work
            for team, (ranks_D, layers) in enumerate(zip(stage.ranks, works, strict=True)):
                program = TeamProgram(stage.stage, layers, team, len(ranks_D))
                programs.append((len(ranks_D), program.commands()))
                teams_ranks.append(ranks_D)
        self.progress(f"iteration {number}: {len(programs)} teams")
        recorder = Recorder(teams_ranks, spans_of)
        engine = Engine(programs, self.job.fabric.num_resources, recorder)
        seconds = engine.run()
        for end in ends:
            end()
        return Result(seconds, recorder, engine.busy_seconds)

    def _layer(
        self, stage: SimulatedStage, layer: int, number: int, index: int
    ) -> tuple[list[LayerWork], list[Callable[[], object]]]:
        """Return each team's work in a layer, and functions that end the iteration and adopt the next plans."""
        job = self.job
        works = []
        ends = []
        loads = [
            model.rows.repeated(self.loads(number, layer, team, job.microbatches))
            for team, model in enumerate(stage.models)
        ]
        keys = [(stage.stage.number, team, layer) for team in range(len(loads))]
        if job.moves_owners:
            total_BDE = np.sum(loads, axis=0)
            teams = len(loads)
            first = self._decided(keys[0], (total_BDE + teams // 2) // teams)
            keys = keys[:1] * teams
            decided = [first] * teams
            ends.append(first.end)
            transfer = self._transfer(stage, keys[0], first.moves)
        else:
            decided = [self._decided(*one) for one in zip(keys, loads, strict=True)]
            transfer = NOTHING
            ends += [one.end for one in decided]
        for key, one, model, counts_BDE in zip(keys, decided, stage.models, loads, strict=True):
            passes = [PassPlan(one.placement, EMPTY_PLAN)] * len(counts_BDE)
            planned_each = NOTHING
            if layer in stage.within:
                timed = [self._timed(stage.within[layer], counts_DE, one.placement) for counts_DE in counts_BDE]
                passes = [plan for plan, _ in timed]
                planned_each = NOTHING._replace(latency=sum(seconds for _, seconds in timed) / len(timed))
            plans = {None: one.transfers, **{microbatch: plan for microbatch, (_, plan, _) in enumerate(passes)}}
            parts = functools.partial(_part, self._managers[key], stage.overlaps[layer], plans)
            work = model.work(counts_BDE, [placement for placement, *_ in passes], parts)
            planner = index % len(model.rows.network.ranks_D)
            more = {"plan": one.planned, "plan_each": planned_each, "planner": planner, "transfer": transfer}
            works.append(dataclasses.replace(work, **more))
        return works, ends

    def _decided(self, key: Key, counts_BDE: np.ndarray) -> "_Decided":
        job = self.job
        manager = self._managers[key]
        end: Callable[[], object] = functools.partial(manager.observe, counts_BDE)
        planned = NOTHING
        after = None
        transfers = self._trans_plans.get(key, EMPTY_PLAN)
        placement = manager.placement
        if job.plans:
            end()
            planned, end, after = self._plan(key, manager)
        changes = () if after is None else owner_changes(placement.home, after.home)
        return _Decided(placement, transfers, planned, end, changes)

    def _timed(self, make: Callable[..., Made], *inputs: Any) -> tuple[Made, float]:
        """Return a plan and its seconds."""
        start = time.thread_time()
        plan = make(*inputs)
        return plan, time.thread_time() - start if self.job.plan_seconds is None else self.job.plan_seconds

    def _transfer(self, stage: SimulatedStage, key: Key, changes: Sequence[OwnerChange]) -> Work:
        if not changes:
            return NOTHING
        cost = self._managers[key].cost
        pairs = [(move.source, move.target) for move in changes]
        bytes_DD = np.zeros((cost.profile.num_ranks,) * 2)
        np.add.at(bytes_DD, tuple(np.transpose(pairs)), cost.state_bytes)
        seconds = cost.transfer_seconds(pairs)
        return at_once([model.rows.network.moving(cost.network, bytes_DD, seconds) for model in stage.models])

    def _plan(self, key: Key, manager: Manager) -> tuple[Work, Callable[[], None], Placement | None]:
        """Return the time of a plan if one is due, the function that adopts it, and its placement."""
        if not manager.is_due():
            return NOTHING, lambda: None, None
        assert manager.expected_BDE is not None
        question = manager.question(manager.expected_BDE, self.job.microbatches)
        plan, seconds = self._timed(plan_for, question)

        def adopt() -> None:
            if plan.decision.placement is not None:
                manager.adopt(plan.decision)
                if plan.sending is not None:
                    self._trans_plans[key] = manager.cost.transport.plan(manager.placement)

        return NOTHING._replace(latency=seconds), adopt, plan.decision.placement


class _Decided(NamedTuple):
    placement: Placement
    transfers: TransPlan
    """Trans of the placement in force."""
    planned: Work
    """Time of the next plan."""
    end: Callable[[], object]
    """Ends the iteration and adopts the plan."""
    moves: Sequence[OwnerChange]
    """Experts with other owners after the iteration."""


def _part(
    manager: Manager, others: tuple[float, float], plans: Mapping[int | None, TransPlan], action: Action
) -> TransPlan:
    plan = plans[action.microbatch]
    beside = (0, 0) if action.parts == 1 else manager.cost.transport.rounds_beside(plan, others)
    return rounds_of(action, plan, beside)
