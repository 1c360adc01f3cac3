"""A thread that makes plans while training continues, and a limit on the time that a rank waits for its policy."""

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
    """Result of planning, small enough to be exchanged between ranks, and when it was made."""

    decision: Decision
    sending: Sending | None
    """Routes and pieces for a new placement; None if the placement stays."""

    start: float
    end: float

    beside: tuple[int, int] | None = None
    """Result of `rounds_beside` for the question's seconds."""


def plan_for(question: Question) -> Plan:
    """Return the policy's answer and how to send its experts. Any thread may call this, because it reads only the
    question. An error becomes the decision's problem, and the agreement tells all ranks, which would otherwise wait for
    this plan."""
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
    """Compute a placement's tables for the time between load and exchange, and the messages of its Trans. Placement and
    transport cache the results. Any thread may call this."""
    _ = placement.trimmed.tables
    transport.plan(placement)


class Asked(NamedTuple):
    """A question to the policy, and the future of its plan; the future is None if another rank plans."""

    question: Question
    plan: "Future[Plan] | None"


class Planner:
    """A thread that makes plans, and prepares other ranks' plans. Questions are kept until `begin`, because planning
    takes Python's lock. In a forward pass, this would delay the device: the host waits for each layer's load and cannot
    run ahead. In a backward pass, the host runs ahead. After `give_up`, ranks neither ask the policy nor wait for
    it."""

    def __init__(
        self, patience: float = math.inf, stop: Callable[[], object] = lambda: None, name: str = "own"
    ) -> None:
        """`patience`: seconds that a rank waits for all plans needed at one time; `stop` ends the policy."""
        self.patience = patience
        self.name = name
        self.given_up = False
        self._stop = stop
        self._kept: list[Asked] = []
        self._thread = DaemonThread("Plan")

    def ask(self, question: Question) -> Asked:
        """Queue a question for `begin`; questions are answered in order."""
        asked = Asked(question, Future())
        self._kept.append(asked)
        return asked

    def begin(self) -> None:
        """Begin to answer the queued questions."""
        for asked in self._kept:
            self._thread.submit(functools.partial(plan_for, asked.question), asked.plan)
        self._kept.clear()

    def prepare(self, placement: Placement, transport: SendingModel) -> None:
        """Begin to prepare a placement; code that needs it earlier computes it without waiting for this."""
        self._thread.submit(functools.partial(prepare, placement, transport))

    def deadline(self) -> float:
        """Return the deadline for `result` of all plans that are needed now."""
        self.begin()
        return time.monotonic() + self.patience

    def result(self, asked: Asked, deadline: float) -> Plan:
        """Return the plan; after the deadline or `give_up`, a plan without a placement."""
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
        """Stop planning; all ranks of the group call this after the same plans."""
        self.given_up = True
        self._stop()
