"""Holds one MoE layer's placement of iteration j and decides that of j+1.

Shape suffixes: D expert-parallel ranks, E logical experts.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from megatron_balance.messages import cleaned, described
from megatron_balance.placement.cost_model import CostModel
from megatron_balance.placement.ownership import Guest, Settlement, lasting, settle
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.policies.interface import Policy
from megatron_balance.placement.predictor import History, Predictor, prediction_error

INVALID = bytes(16)
"""The digest of no placement."""

GIVEN_UP = bytes(15) + b"\1"
"""The digest of no placement, nor any in this run."""

LONGEST_PAUSE = 1024
"""Iterations, between attempts to change owners."""


class PolicyFailure(Exception):
    """Why a policy has no placement, as the end of a sentence: what it did, a colon and details."""

    def __init__(self, problem: str, final: bool = False) -> None:
        """`final`: there is no use in asking again."""
        super().__init__(problem)
        self.final = final


@dataclass(frozen=True, eq=False)
class Decision:
    """What the policy wants; in force once all ranks are found to want the same."""

    expected_DE: np.ndarray
    """[D, E] the load that it was planned for."""

    placement: Placement | None
    _: KW_ONLY
    problem: str | None = None
    """Why there is no placement: what the policy did, a colon and details."""

    settlement: Settlement | None = None
    """Why owners are others than before."""

    final: bool = False
    """Whether the policy is not to be asked again."""

    @property
    def digest(self) -> bytes:
        """16 bytes, equal on ranks that decided alike; INVALID or GIVEN_UP where there is no placement."""
        if self.placement is None:
            return GIVEN_UP if self.final else INVALID
        return bytes.fromhex(self.placement.digest())


@dataclass(frozen=True, eq=False, kw_only=True)
class Question:
    """All that a plan depends on, as it is when planning starts: what changes meanwhile, no plan may see."""

    policy: Policy
    expected_DE: np.ndarray
    """[D, E] the load to plan for."""

    placement: Placement
    """The one in use."""

    cost: CostModel
    """Of an iteration with its number of microbatches."""

    held: Mapping[Guest, int]
    """Iterations for which the guests have been where they are."""

    transfers: bool
    """Whether experts may change owners."""

    def answer(self) -> Decision:
        """The policy's placement."""
        try:
            answer = self.policy.plan(self.expected_DE.copy(), self.placement, self.cost)
        except PolicyFailure as failure:
            return Decision(self.expected_DE, None, problem=str(failure), final=failure.final)
        except BaseException as error:  # a failing policy must not end a run
            return Decision(self.expected_DE, None, problem=f"raised {described(error)}")
        if not isinstance(answer, Placement):
            problem = f"returned no Placement: a {type(answer).__qualname__}"
            return Decision(self.expected_DE, None, problem=problem)
        if (answer.home, answer.guest_slots) != (self.placement.home, self.placement.guest_slots):
            problem = f"changed owners or guest slots: {cleaned(answer)}"
            return Decision(self.expected_DE, None, problem=problem)
        if not self.transfers:
            return Decision(self.expected_DE, answer)
        placement, settlement = settle(answer, self.expected_DE, self.held, self.cost)
        return Decision(self.expected_DE, placement, settlement=settlement)


class Manager:
    """The placement of one MoE layer over time.

    A policy that raises or returns what is no valid placement changes nothing: the last valid placement stays.
    """

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
            owners: every expert on its owner alone, and the guest slots to fill.
            interval: plans are due every so many iterations.
            transfers: whether experts may change owners, `ownership.settle`.
        """
        self.policy, self.cost, self.predictor, self.interval = policy, cost, predictor, interval
        self.placement, self.transfers = owners, transfers
        self.held: dict[Guest, int] = {}
        """Iterations for which the guests have been where they are."""
        self.pause, self.resumes = 0, 0
        """Iterations between the last Transfer, if it failed, and the next attempt; and when that is due."""
        self.history = History()
        self.expected_DE: np.ndarray | None = None
        """[D, E] the load expected of the next iteration."""
        self.iterations = 0

    def observe(self, counts_DE: np.ndarray) -> float | None:
        """Note an iteration's load; returns the share of its tokens that were expected elsewhere, if any were."""
        expected_DE, self.iterations = self.expected_DE, self.iterations + 1
        self.held = lasting(self.held, self.placement)
        self.history = self.predictor.observe(self.history, counts_DE)
        self.expected_DE = self.predictor.predict(self.history)
        return None if expected_DE is None else prediction_error(expected_DE, counts_DE)

    def is_due(self, ahead: int) -> bool:
        """Whether to plan, for the iteration that is `ahead` of those observed: 1 the next one, 0 the present one."""
        return (self.iterations - ahead) % self.interval == 0

    def question(self, expected_DE: np.ndarray, microbatches: int) -> Question:
        """What to plan from, for an iteration of so many microbatches and this load in all."""
        return Question(
            policy=self.policy,
            expected_DE=expected_DE.copy(),
            placement=self.placement,
            cost=replace(self.cost, microbatches=microbatches),
            held=dict(self.held),
            transfers=self.transfers and self.iterations >= self.resumes,
        )

    def decide(self, expected_DE: np.ndarray, microbatches: int) -> Decision:
        """The answer to `question`, here and at once."""
        return self.question(expected_DE, microbatches).answer()

    def adopt(self, decision: Decision) -> None:
        """Put a decision that all ranks agree on in force."""
        assert decision.placement is not None
        if decision.placement.home != self.placement.home:
            self.pause = 0
        self.placement = decision.placement

    def postpone_transfer(self) -> int:
        """A Transfer failed: returns after how many iterations plans may change owners again, twice as many each time.

        Meanwhile experts that would have moved stay lent.
        """
        self.pause = min(max(1, 2 * self.pause), LONGEST_PAUSE)
        self.resumes = self.iterations + self.pause
        return self.pause

    def state(self) -> dict[str, Any]:
        """Lists, numbers and strings for a checkpoint; `restore` gives the same manager to the bit."""
        expected = None if self.expected_DE is None else self.expected_DE.tolist()
        return {
            "placement": str(self.placement),
            "history": self.history.to_plain(),
            "expected": expected,
            "iterations": self.iterations,
            "held": [[*guest, iterations] for guest, iterations in self.held.items()],
            "pause": self.pause,
            "resumes": self.resumes,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.placement = Placement.parse(state["placement"])
        self.history = History.from_plain(state["history"])
        expected = state["expected"]
        self.expected_DE = None if expected is None else np.array(expected, dtype=np.int64)
        self.iterations = state["iterations"]
        self.held = {(expert, rank): iterations for expert, rank, iterations in state["held"]}
        self.pause, self.resumes = state["pause"], state["resumes"]
