"""Holds one MoE layer's placement in iteration j, and decides the placement in iteration j + 1."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from megatron_balance.cost.calibration import UNCALIBRATED, Factors, calibrated
from megatron_balance.cost.core import COMPUTED
from megatron_balance.cost.loads import condensed
from megatron_balance.cost.model import CostModel, balance_ratio, owners
from megatron_balance.cost.sending import SendingModel
from megatron_balance.messages import cleaned, described
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.hosting import prepare
from megatron_balance.planning.ownership import Guest, Settlement, lasting, settle
from megatron_balance.planning.policies.interface import Policy, owners_host
from megatron_balance.planning.predictor import History, Predictor, prediction_error

INVALID = bytes(16)
"""Digest of a decision without a placement."""

GIVEN_UP = bytes(15) + b"\1"
"""Digest of a decision without a placement after which the policy is not asked again in this run."""

MOST_COSTS = 8
"""Number of cost models that a manager caches."""

REMEMBERED = 8
"""Number of plans that decide whether the next one is used: two periods of W7, one of the workload burst."""


class PolicyFailure(Exception):
    """A policy produced no placement. The text completes "the policy ...": its action, a colon and details."""

    def __init__(self, problem: str, final: bool = False) -> None:
        """`final`: the policy cannot be asked again."""
        super().__init__(problem)
        self.final = final


class LastPlan(NamedTuple):
    """The last plan of a policy, used or not, and the gains of earlier plans."""

    placement: Placement | None = None
    """None: there is no plan yet."""
    gains: tuple[float, ...] = ()
    """Shares of the layer's seconds that earlier plans saved; negative if they cost more."""

    def gains_with(self, counts: np.ndarray, cost: CostModel) -> tuple[float, ...]:
        """Return the gains of the last REMEMBERED plans, including this plan's gain under the actual loads. `counts`
        are the loads of the iteration that the plan was made for, as in `Policy.plan`."""
        if self.placement is None:
            return self.gains
        gain = 0.0
        if not self.placement.is_identity and (alone := cost.layer_seconds(counts, owners_host(self.placement))):
            gain = 1 - cost.layer_seconds(counts, self.placement) / alone
        return (*self.gains, gain)[-REMEMBERED:]


NO_PLAN = LastPlan()


def pays(gains: Sequence[float]) -> bool:
    """Return whether plans saved at least as much as they cost; True if there are less than two."""
    return len(gains) < 2 or sum(gains) >= 0


@dataclass(frozen=True, eq=False)
class Decision:
    """The policy's choice. It takes effect once all ranks have made the same choice."""

    expected_BDE: np.ndarray
    """[B, D, E] the loads that the plan is for, as in `Policy.plan`."""

    placement: Placement | None
    _: KW_ONLY
    problem: str | None = None
    """Reason if there is no placement; see PolicyFailure."""
    settlement: Settlement | None = None
    """Reason for changes of owners; None: transfers are off."""
    wanted: frozenset[int] = frozenset()
    """Experts that would change their owner if the loads stayed as expected."""
    final: bool = False
    """Whether the policy must not be asked again."""
    last_plan: LastPlan = NO_PLAN
    """The policy's plan, even if it is not used because earlier plans did not pay."""
    ratio: float = 1.0
    """Tokens of the busiest rank over the mean under the expected loads (FlexMoE Eq. 6)."""

    @property
    def digest(self) -> bytes:
        """16 bytes, equal on ranks with the same decision; INVALID or GIVEN_UP without a placement."""
        if self.placement is None:
            return GIVEN_UP if self.final else INVALID
        return bytes.fromhex(self.placement.digest())


@dataclass(frozen=True, eq=False, kw_only=True)
class Question:
    """All inputs of a plan, fixed when planning starts, because training continues during planning."""

    policy: Policy
    expected_BDE: np.ndarray
    """[B, D, E] the loads to plan for, as in `Policy.plan`."""
    placement: Placement
    """The placement in use."""
    cost: CostModel
    """Calibrated cost model for the iteration's number of microbatches."""
    transport: SendingModel
    """Chooses routes and pieces of Trans and Agg. It is not calibrated: the order of sums depends on routes and pieces,
    and a resumed run must choose them again."""
    held: Mapping[Guest, int]
    """Number of iterations that each guest has been on its rank."""
    ages: Mapping[int, int]
    """Number of iterations for which plans have wanted experts elsewhere."""
    transfers: bool
    """Whether experts may change owners."""
    latest_BDE: np.ndarray | None
    """[B, D, E] the loads of the latest iteration; None before the first one."""
    last_plan: LastPlan
    """The last plan, for the loads `latest_BDE`."""
    beside: tuple[float, float] | None
    """Forward and backward seconds of the computation that overlaps with a part of Trans and of Agg; None: they are
    executed as a whole."""

    def answer(self) -> Decision:
        """Ask the policy and return its decision."""
        try:
            plan = planned(self.policy, self.expected_BDE, self.placement, self.cost)
        except PolicyFailure as failure:
            return Decision(self.expected_BDE, None, problem=str(failure), final=failure.final)
        gains: tuple[float, ...] = ()
        if getattr(self.policy, "must_pay", False) and self.latest_BDE is not None:
            gains = self.last_plan.gains_with(self.latest_BDE, self.cost)
        last_plan = LastPlan(plan, gains)
        placement = plan if pays(gains) else owners_host(plan)
        settlement = None
        wanted: frozenset[int] = frozenset()
        if self.transfers:
            placement, settlement, wanted = settle(placement, self.expected_BDE, self.held, self.cost, self.ages)
        ratio = balance_ratio(self.cost.loads(self.expected_BDE, placement)[COMPUTED])
        return Decision(
            self.expected_BDE, placement, settlement=settlement, wanted=wanted, last_plan=last_plan, ratio=ratio
        )


def planned(policy: Policy, expected_BDE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
    """Return the policy's plan; PolicyFailure if it makes none."""
    try:
        answer = policy.plan(expected_BDE.copy(), current, cost)
    except PolicyFailure:
        raise
    except BaseException as error:  # a failing policy must not end a run
        raise PolicyFailure(f"raised {described(error)}") from error
    if not isinstance(answer, Placement):
        raise PolicyFailure(f"returned no Placement: a {type(answer).__qualname__}")
    if (answer.home, answer.guest_slots) != (current.home, current.guest_slots):
        raise PolicyFailure(f"changed owners or guest slots: {cleaned(answer)}")
    return answer


class Manager:
    """The placement of one MoE layer over time. If the policy fails, the last valid placement stays."""

    def __init__(
        self,
        policy: Policy,
        cost: CostModel,
        predictor: Predictor,
        owners: Placement,
        *,
        interval: int = 1,
        transfers: bool = False,
    ) -> None:
        """
        Args:
            owners: the placement without guests, which gives the guest slots to fill.
            interval: number of iterations from one plan to the next.
            transfers: whether experts may change owners (see `ownership.settle`).
        """
        self.policy = policy
        self.cost = cost
        self.predictor = predictor
        self.interval = interval
        self.placement = owners
        self.transfers = transfers
        if transfers:
            prepare()
        self.held: dict[Guest, int] = {}
        """Number of iterations that each guest has been on its rank."""
        self.wanted: dict[int, int] = {}
        """Experts that plans want elsewhere, and the iteration since which they do."""
        self.history = History()
        self.factors = UNCALIBRATED
        """Calibration of the cost model for plans."""
        self._cost_of = lru_cache(MOST_COSTS)(
            lambda microbatches, factors: replace(calibrated(cost, factors), microbatches=microbatches)
        )
        self.expected_BDE: np.ndarray | None = None
        """[B, D, E] the loads expected in the next iteration."""
        self.latest_BDE: np.ndarray | None = None
        """[B, D, E] the loads of the latest iteration."""
        self.last_plan = NO_PLAN
        self.planned_ratio: float | None = None
        """`Decision.ratio` of the placement; None: no plan has been adopted."""
        self.iterations = 0

    def observe(self, counts_BDE: np.ndarray) -> float | None:
        """Record an iteration's loads and return the `prediction_error`; None if there was no prediction."""
        expected_BDE = self.expected_BDE
        self.iterations = self.iterations + 1
        self.held = lasting(self.held, self.placement)
        self.latest_BDE = condensed(counts_BDE, owners(self.placement))
        self.history = self.predictor.observe(self.history, self.latest_BDE)
        self.expected_BDE = self.predictor.predict(self.history)
        return None if expected_BDE is None else prediction_error(expected_BDE, counts_BDE)

    def cost_of(self, microbatches: int, factors: Factors | None = None) -> CostModel:
        """Return the cost model for this number of microbatches, with the calibration of plans by default."""
        return self._cost_of(microbatches, self.factors if factors is None else factors)

    def is_due(self) -> bool:
        """Return whether a plan is due for the next iteration, after `observe`."""
        return (self.iterations - 1) % self.interval == 0

    def question(self, expected_BDE: np.ndarray, microbatches: int) -> Question:
        """Return the question of a plan for loads that add up to those of all microbatches."""
        return Question(
            policy=self.policy,
            expected_BDE=expected_BDE.copy(),
            placement=self.placement,
            cost=self.cost_of(microbatches),
            transport=self.cost.transport,
            held=dict(self.held),
            ages={expert: self.iterations - since for expert, since in self.wanted.items()},
            transfers=self.transfers,
            latest_BDE=self.latest_BDE,
            last_plan=self.last_plan,
            beside=self.cost.overlap[:2] if self.cost.overlap is not None and self.cost.sends_ahead else None,
        )

    def exact_plan(self, counts_DE: np.ndarray) -> Placement:
        """Return the policy's plan for the load [D, E] of one microbatch; PolicyFailure if it makes none. The plan
        depends on nothing else, so ranks with the same load make the same one."""
        return planned(self.policy, counts_DE[None], self.placement, self.cost_of(1))

    def adopt(self, decision: Decision) -> None:
        """Use the placement of a decision that all ranks agree on."""
        assert decision.placement is not None
        self.wanted = {expert: self.wanted.get(expert, self.iterations) for expert in sorted(decision.wanted)}
        self.last_plan = decision.last_plan
        self.planned_ratio = decision.ratio
        if decision.placement != self.placement:
            # Keep the object if nothing changes: it caches prepared values
            self.placement = decision.placement

    def state(self) -> dict[str, Any]:
        """Return lists, numbers and strings for a checkpoint between iterations; `restore` is exact. The history
        determines the latest and the expected load."""
        return {
            "placement": str(self.placement),
            "history": self.history.to_plain(),
            "iterations": self.iterations,
            "held": [[*guest, iterations] for guest, iterations in self.held.items()],
            "wanted": [*self.wanted.items()],
            "tried": None if self.last_plan.placement is None else str(self.last_plan.placement),
            "gains": [*self.last_plan.gains],
            "planned": self.planned_ratio,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state`."""
        self.placement = Placement.parse(state["placement"])
        self.history = History.from_plain(state["history"])
        self.latest_BDE = self.history.parts
        self.expected_BDE = self.predictor.predict(self.history)
        self.iterations = state["iterations"]
        self.held = {(expert, rank): iterations for expert, rank, iterations in state["held"]}
        self.wanted = dict(state["wanted"])
        self.last_plan = LastPlan(state["tried"] and Placement.parse(state["tried"]), tuple(state["gains"]))
        self.planned_ratio = state["planned"]
