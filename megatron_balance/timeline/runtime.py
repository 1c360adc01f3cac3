"""When the experts' weights and gradients move: one iteration of all MoE layers of this rank.

    begin -> for each layer's first forward pass: (Plan) -> Trans -> ... -> Agg -> gradients reduced -> Plan

Everything blocks. A placement lasts a whole iteration, from a layer's first forward pass to its Agg; recomputation
finds it unchanged. Shape suffixes: D expert-parallel ranks, E logical experts.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.comm.transfer import ExpertTransfer, Slots
from megatron_balance.device import clock
from megatron_balance.observe.balance import LayerReport, evenness
from megatron_balance.placement.manager import INVALID, Decision, Manager
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.policies.interface import owners_host
from megatron_balance.placement.transfers import TransferPlan, plan_transfers

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class LayerState:
    """One MoE layer: its manager, its slots, and what has happened in this iteration."""

    manager: Manager
    slots: Slots
    transfers: TransferPlan = field(init=False)
    planned: bool = False
    """Whether this iteration's placement is decided, with plans on the exact load."""
    fresh: bool = False
    """Whether the guest slots hold the present weights."""
    counts_DE: np.ndarray | int = 0
    """[D, E] load of the microbatches up to now."""
    microbatches: int = 0
    spans: list[tuple[clock.Mark, clock.Mark]] = field(default_factory=list)
    """When the layer worked: forward and backward passes, Trans and Agg."""
    plan_seconds: float = 0.0
    last: "Iteration | None" = None
    told: set[str] = field(default_factory=set)
    """What the log has been told that the policy did wrong."""

    def __post_init__(self) -> None:
        self.transfers = plan_transfers(self.placement)

    @property
    def placement(self) -> Placement:
        return self.manager.placement

    def note(self, start: clock.Mark, end: clock.Mark) -> None:
        """The layer worked between two marks."""
        self.spans.append((start, end))


@dataclass(frozen=True, eq=False)
class Iteration:
    """One layer's finished iteration."""

    placement: Placement
    counts_DE: np.ndarray
    """[D, E] load of all microbatches."""
    microbatches: int
    spans: list[tuple[clock.Mark, clock.Mark]]
    plan_seconds: float
    messages: int
    """Experts that Trans sent, and Agg back."""
    prediction_error: float


class Balancer:
    """Keeps the experts of this rank's MoE layers where their placements say.

    All ranks of the expert-parallel group call every method in the same order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        layers: Mapping[int, LayerState],
        microbatches: Callable[[], int],
        guest_bytes: int,
        exact: bool = False,
        explain: bool = False,
    ) -> None:
        """
        Args:
            group: the expert-parallel group.
            layers: by layer number, in the order of the model.
            microbatches: number of microbatches of the present iteration.
            guest_bytes: memory of this rank's guest slots, weights and gradients, in all layers.
            exact: plan on the load of an iteration's first microbatch instead of the load predicted.
            explain: say what each plan is expected to change.
        """
        self.group, self.layers = group, dict(layers)
        self.microbatches, self.guest_bytes = microbatches, guest_bytes
        self.exact, self.explain = exact, explain
        self.transfer = ExpertTransfer(group)

    def begin_iteration(self) -> None:
        """Forget what passed since the last iteration: an evaluation, a repetition, weights that were loaded."""
        for state in self.layers.values():
            state.planned = state.fresh = False

    def host(self, number: int, counts_DE: torch.Tensor, training: bool) -> Placement:
        """The placement of a layer for this forward pass; when it returns, every host has its weights."""
        state = self.layers[number]
        if training and self.exact and not state.planned:
            state.planned = True
            if state.manager.is_due(ahead=0):
                self._plan({number: state}, {number: counts_DE.numpy() * self.microbatches()})
        if not state.fresh:
            self.transfer.trans(state.transfers, state.placement, state.slots)
            state.fresh = True
        # Where activations are recomputed, the first pass runs without gradients and only the second is counted
        if training and torch.is_grad_enabled():
            state.counts_DE = state.counts_DE + counts_DE.numpy()
            state.microbatches += 1
        return state.placement.trimmed

    def aggregate(self) -> None:
        """Agg: after the last backward pass and before gradients are reduced over data-parallel ranks."""
        for state in self.layers.values():
            start = clock.mark()
            self.transfer.agg(state.transfers, state.placement, state.slots)
            state.note(start, clock.mark())
            # The optimizer steps next
            state.fresh = False

    def finish_iteration(self) -> None:
        """Close the books of this iteration and plan the next one."""
        due = {}
        for number, state in self.layers.items():
            if not state.microbatches:
                continue
            counts_DE = np.asarray(state.counts_DE)
            error = state.manager.observe(counts_DE)
            messages = sum(map(len, state.transfers.rounds))
            state.last = Iteration(
                state.placement,
                counts_DE,
                state.microbatches,
                state.spans,
                state.plan_seconds,
                messages,
                error if error is not None else 0.0,
            )
            state.counts_DE, state.microbatches, state.spans, state.plan_seconds = 0, 0, [], 0.0
            state.planned = False
            if not self.exact and state.manager.is_due(ahead=1):
                due[number] = state
        if due:
            self._plan(due, {number: state.manager.expected_DE for number, state in due.items()})

    def _plan(self, layers: Mapping[int, LayerState], expected: Mapping[int, np.ndarray]) -> None:
        """Ask the policy for the layers' next placements; they change where all ranks of the group want the same."""
        decisions = []
        for number, state in layers.items():
            start = time.perf_counter()
            decisions.append(state.manager.decide(expected[number], self.microbatches()))
            state.plan_seconds = time.perf_counter() - start
        digests = self._gather_digests(decisions)
        for (number, state), decision, ranks in zip(layers.items(), decisions, digests, strict=True):
            if len(set(ranks)) == 1 and ranks[0] != INVALID:
                self._adopt(number, state, decision)
            elif INVALID not in ranks and self.group.rank() == 0:
                _warn(number, state, "plans differently on different ranks")
            elif INVALID in ranks and self.group.rank() == ranks.index(INVALID):
                assert decision.problem is not None
                _warn(number, state, decision.problem)

    def _adopt(self, number: int, state: LayerState, decision: Decision) -> None:
        before = state.placement
        state.manager.adopt(decision)
        if state.placement == before:
            return
        state.transfers, state.fresh = plan_transfers(state.placement), False
        if self.explain and self.group.rank() == 0:
            cost = replace(state.manager.cost, microbatches=self.microbatches())
            times = [cost.layer_time(decision.expected_DE, placement) for placement in (before, state.placement)]
            parts = zip(times[0]._fields, *times, strict=True)
            changes = ", ".join(f"{name} {old * 1e3:.3g} -> {new * 1e3:.3g}" for name, old, new in parts)
            totals = " -> ".join(f"{time.total * 1e3:.3g}" for time in times)
            print(f"layer {number}: {totals} ms expected ({changes}): {state.placement}", flush=True)

    def _gather_digests(self, decisions: Iterable[Decision]) -> list[list[bytes]]:
        """[layers][D]: what each rank of the group decided."""
        own = torch.tensor([list(decision.digest) for decision in decisions], dtype=torch.uint8)
        own = own.to(torch.cuda.current_device())
        gathered = own.new_empty(self.group.size() * own.numel())
        dist.all_gather_into_tensor(gathered, own.view(-1), group=self.group)
        table = gathered.view(self.group.size(), *own.shape).transpose(0, 1).tolist()
        return [[bytes(digest) for digest in ranks] for ranks in table]

    def report(self) -> dict[int, LayerReport]:
        """The finished iteration, as this rank saw it; the device must have finished it."""
        return {number: _report(state) for number, state in self.layers.items() if state.last is not None}

    def loads(self) -> dict[int, tuple[np.ndarray, Placement]]:
        """Load matrix [D, E] and placement of every layer in the finished iteration."""
        states = {number: state.last for number, state in self.layers.items()}
        return {number: (last.counts_DE, last.placement) for number, last in states.items() if last is not None}

    def state(self) -> dict[str, Any]:
        """Lists, numbers and strings for a checkpoint of this rank."""
        return {str(number): state.manager.state() for number, state in self.layers.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """Continue with the placements and predictions that `state` described."""
        for number, state in self.layers.items():
            state.manager.restore(states[str(number)])
            state.transfers, state.fresh = plan_transfers(state.placement), False


def _warn(number: int, state: LayerState, problem: str) -> None:
    """Once for each layer and kind of problem: a policy that fails is likely to fail in every iteration."""
    kind = problem.partition(":")[0]
    if kind not in state.told:
        state.told.add(kind)
        logger.warning("layer %d: the policy %s; its last placement stays (not said again)", number, problem)


def _report(state: LayerState) -> LayerReport:
    last = state.last
    assert last is not None
    cost = replace(state.manager.cost, microbatches=last.microbatches)
    owners = owners_host(last.placement)
    before_D, after_D = (cost.traffic(last.counts_DE, placement).sum(0) for placement in (owners, last.placement))
    before, after, gain = evenness(before_D, after_D)
    return LayerReport(
        ratio_before=before,
        ratio_after=after,
        rb=gain,
        hosts_added=last.placement.added_hosts,
        trans_bytes=last.messages * cost.param_bytes,
        agg_bytes=last.messages * cost.grad_bytes,
        plan_seconds=last.plan_seconds,
        predicted_seconds=cost.layer_seconds(last.counts_DE, last.placement),
        measured_seconds=sum(clock.seconds(*span) for span in last.spans),
        prediction_error=last.prediction_error,
    )
