"""Makes plans one after another while training goes on, and limits how long a rank waits for a policy."""

import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from megatron_balance.placement.manager import Decision, Question
from megatron_balance.placement.transfers import TransferPlan


class Plan(NamedTuple):
    """What planning came to, and when."""

    decision: Decision
    transfers: TransferPlan | None
    """Of the decision's placement; None if it is the present one, or none."""

    start: float
    end: float


def plan_for(question: Question) -> Plan:
    """The policy's answer, and how its experts travel; on any thread, because nothing but the question is read."""
    start = time.perf_counter()
    decision = question.answer()
    placement, transfers = decision.placement, None
    if placement is not None and placement != question.placement:
        transfers = question.cost.transfers(placement)
    return Plan(decision, transfers, start, time.perf_counter())


@dataclass(frozen=True, eq=False)
class Asked:
    """A question, and its plan to come."""

    question: Question
    plan: "Future[Plan]"


class Planner:
    """A thread that makes plans; a daemon, so that a policy which never returns does not keep the process.

    Once given up, no policy is asked, and no rank waits for one.
    """

    def __init__(
        self, patience: float = math.inf, stop: Callable[[], object] = lambda: None, name: str = "own"
    ) -> None:
        """
        Args:
            patience: seconds that a rank waits for the plans that it needs at one time.
            stop: ends a policy that is given up, if that is possible.
            name: the policy's, for messages.
        """
        self.patience, self.name, self.given_up = patience, name, False
        self._stop = stop
        self._tasks: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(self._tasks,), name="Plan", daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def ask(self, question: Question) -> Asked:
        """Begin to plan, once all is planned that was asked before."""
        asked = Asked(question, Future())
        self._tasks.put(asked)
        return asked

    def deadline(self) -> float:
        """When to stop waiting for what is needed now, for `result`."""
        return time.monotonic() + self.patience

    def result(self, asked: Asked, deadline: float) -> Plan:
        """The plan, or one without placement if there is none by the deadline, or the policy has been given up."""
        left = 0.0 if self.given_up else max(0.0, deadline - time.monotonic())
        try:
            return asked.plan.result(None if left == math.inf else left)
        except TimeoutError:
            now = time.perf_counter()
            minutes = f"--distributed-timeout-minutes {self.patience / 30:g}"
            problem = f"made no plan within {self.patience:g} s, half of {minutes}"
            return Plan(Decision(asked.question.expected_DE, None, problem=problem, final=True), None, now, now)

    def give_up(self) -> None:
        """All ranks of the group call it after the same plans."""
        self.given_up = True
        self._stop()


def _serve(tasks: "queue.SimpleQueue[Asked | None]") -> None:
    while (asked := tasks.get()) is not None:
        try:
            asked.plan.set_result(plan_for(asked.question))
        except BaseException as error:  # whoever waits gets it
            asked.plan.set_exception(error)
        # The thread outlives a planner only as long as it plans
        del asked
