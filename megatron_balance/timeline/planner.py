"""A thread that makes plans while training continues, and a limit to how long a rank waits for its policy."""

import functools
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from megatron_balance.cost.sending import Sending, SendingModel
from megatron_balance.device.side_stream import DaemonThread
from megatron_balance.messages import described
from megatron_balance.observe.profiler import record_function
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.manager import Decision, Question


class Plan(NamedTuple):
    """The result of planning, small enough that ranks send it to each other, and when it was made."""

    decision: Decision
    sending: Sending | None
    """How the experts of a new placement reach their guests; None if the placement stays."""

    start: float
    end: float

    beside: tuple[int, int] | None = None
    """`rounds_beside` of the question's seconds."""


def plan_for(question: Question) -> Plan:
    """Return the policy's answer and how its experts are sent. Any thread may call this: it reads only the question.

    An error becomes the decision's problem, which the agreement tells all ranks: the others would wait for this plan.
    """
    sending = beside = None
    with record_function("Plan"):
        start = time.perf_counter()
        try:
            decision = question.answer()
            placement = decision.placement
            if placement is not None and placement != question.placement:
                transport = question.transport
                sending = transport.best(placement)
                prepare(placement, transport)
                if question.beside is not None:
                    beside = transport.rounds_beside(transport.plan(placement), question.beside)
        except Exception as error:
            decision = Decision(question.expected_BDE, None, problem=f"made a plan that failed: {described(error)}")
            sending = beside = None
        return Plan(decision, sending, start, time.perf_counter(), beside)


def prepare(placement: Placement, transport: SendingModel) -> None:
    """Compute what a layer needs of a placement between its load and its exchange, and the messages of its Trans.

    Placement and transport keep the results. Any thread may call this.
    """
    placement.trimmed.tables.complete()
    transport.plan(placement)


class Asked(NamedTuple):
    """A question to the policy, and the future of its plan; None if another rank plans."""

    question: Question
    plan: "Future[Plan] | None"


class Planner:
    """A thread that makes plans, and prepares the plans of other ranks.

    Questions are kept until `begin`, because planning takes Python's lock: in a forward pass, the host waits for the
    load of each layer and is never ahead of the device. In a backward pass, it waits for nothing.
    After `give_up`, no policy is asked, and no rank waits for one.
    """

    def __init__(
        self, patience: float = math.inf, stop: Callable[[], object] = lambda: None, name: str = "own"
    ) -> None:
        """A rank waits `patience` seconds for the plans that it needs at one time; `stop` ends the policy."""
        self.patience = patience
        self.name = name
        self.given_up = False
        self._stop = stop
        self._kept: list[Asked] = []
        self._thread = DaemonThread("Plan")

    def ask(self, question: Question) -> Asked:
        """Keep a question for `begin`; it is answered after all earlier ones."""
        asked = Asked(question, Future())
        self._kept.append(asked)
        return asked

    def begin(self) -> None:
        """Begin to answer the questions that were asked."""
        for asked in self._kept:
            self._thread.submit(functools.partial(plan_for, asked.question), asked.plan)
        self._kept.clear()

    def prepare(self, placement: Placement, transport: SendingModel) -> None:
        """Begin to prepare a placement; whoever needs it earlier computes it without waiting for this."""
        self._thread.submit(functools.partial(prepare, placement, transport))

    def deadline(self) -> float:
        """Return the deadline for `result` of all plans that are needed now."""
        self.begin()
        return time.monotonic() + self.patience

    def result(self, asked: Asked, deadline: float) -> Plan:
        """Return the plan; a plan without a placement if none is made by the deadline, or after `give_up`."""
        assert asked.plan is not None
        left = 0.0 if self.given_up else max(0.0, deadline - time.monotonic())
        try:
            return asked.plan.result(None if left == math.inf else left)
        except TimeoutError:
            now = time.perf_counter()
            minutes = f"--distributed-timeout-minutes {self.patience / 30:g}"
            problem = f"made no plan within {self.patience:g} s, half of {minutes}"
            return Plan(Decision(asked.question.expected_BDE, None, problem=problem, final=True), None, now, now)

    def give_up(self) -> None:
        """Stop planning; all ranks of the group call it after the same plans."""
        self.given_up = True
        self._stop()
