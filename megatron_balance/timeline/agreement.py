"""Ranks that share a placement agree on their plans: one collective covers all layers planned at the same step.

Policies of this package are pure, so ranks divide the layers among themselves and exchange plans (`Shared`). A user's
policy may have state, or differ between ranks, so every rank plans all layers, and a plan is used only if all ranks
have made the same one (`Compared`).
"""

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.device import host_memory
from megatron_balance.planning.manager import GIVEN_UP, INVALID, Question
from megatron_balance.timeline.planner import Plan

LEAST_BYTES = 2**12
"""Initial size of the buffer for one rank's plans."""

_HEADER = 8
"""Bytes of the field that holds a message's size."""


class Outcome(NamedTuple):
    """Result of an agreement for one layer."""

    plan: Plan

    agreed: bool
    """Whether the plan's placement will be in force; otherwise, the current one stays."""

    final: bool = False
    """Whether planning stops on all ranks."""

    problem: str | None = None
    """The policy's problem, on the rank that reports it; None on other ranks."""


class Compared:
    """Every rank plans all layers; ranks compare digests of their plans."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def plans(self, number: int) -> bool:
        """Return whether this rank plans a layer."""
        return True

    def reach(self, plans: Mapping[int, Plan], questions: Mapping[int, Question]) -> dict[int, Outcome]:
        """Return the outcomes, given this rank's plans, and the questions of all layers planned now."""
        own = host_memory.to_current_device([list(plan.decision.digest) for plan in plans.values()], torch.uint8)
        gathered = own.new_empty(self.group.size() * own.numel())
        dist.all_gather_into_tensor(gathered, own.view(-1), group=self.group)
        table = gathered.view(self.group.size(), *own.shape).transpose(0, 1).tolist()
        return {
            number: self._outcome(plan, [bytes(digest) for digest in ranks])
            for (number, plan), ranks in zip(plans.items(), table, strict=True)
        }

    def _outcome(self, plan: Plan, digests: list[bytes]) -> Outcome:
        if len(set(digests)) == 1 and plan.decision.placement is not None:
            return Outcome(plan, True)
        rank = self.group.rank()
        for failure in (GIVEN_UP, INVALID):
            if failure in digests:
                first = rank == digests.index(failure)
                return Outcome(plan, False, failure == GIVEN_UP, plan.decision.problem if first else None)
        return Outcome(plan, False, False, "plans differently on different ranks" if rank == 0 else None)


class Shared:
    """Every rank plans a fixed share of the layers; ranks exchange plans."""

    def __init__(self, group: dist.ProcessGroup, numbers: Iterable[int]) -> None:
        """`numbers`: all layers that the group plans, in the same order on all ranks."""
        self.group = group
        self._room = LEAST_BYTES
        self._planner_of = {number: position % group.size() for position, number in enumerate(numbers)}

    def plans(self, number: int) -> bool:
        return self._planner_of[number] == self.group.rank()

    def reach(self, plans: Mapping[int, Plan], questions: Mapping[int, Question]) -> dict[int, Outcome]:
        received: dict[int, Plan] = {}
        planners = sorted({self._planner_of[number] for number in questions})
        for content in self._gathered(packed(plans), planners):
            received |= pickle.loads(content)
        # Keep this rank's own plan objects, which are prepared already
        received |= plans
        return {number: self._outcome(number, received[number], question) for number, question in questions.items()}

    def _outcome(self, number: int, plan: Plan, question: Question) -> Outcome:
        plan = plan._replace(decision=replace(plan.decision, expected_BDE=question.expected_BDE))
        if plan.decision.placement is not None:
            return Outcome(plan, True)
        return Outcome(plan, False, plan.decision.final, plan.decision.problem if self.plans(number) else None)

    def _gathered(self, content: bytes, ranks: Sequence[int]) -> list[bytes]:
        """Return the messages of some ranks; if a buffer is too small, all ranks repeat with a larger one."""
        while True:
            rows = np.zeros((len(ranks), _HEADER + self._room), dtype=np.uint8)
            if self.group.rank() in ranks:
                sent = len(content).to_bytes(_HEADER) + content[: self._room]
                rows[ranks.index(self.group.rank()), : len(sent)] = np.frombuffer(sent, dtype=np.uint8)
            # Each row is non-zero on one rank only, so the sum gathers the rows
            total = host_memory.to_current_device(torch.from_numpy(rows), torch.uint8)
            dist.all_reduce(total, group=self.group)
            rows = total.cpu().numpy()
            sizes = rows[:, :_HEADER].copy().view(">u8")[:, 0].tolist()
            if max(sizes) <= self._room:
                return [row[_HEADER : _HEADER + size].tobytes() for row, size in zip(rows, sizes, strict=True)]
            self._room = room(max(sizes))


def packed(plans: Mapping[int, Plan]) -> bytes:
    """Return a rank's plans as bytes, without the loads, which all ranks have."""
    nothing_BDE = np.zeros((0, 0, 0), dtype=np.int64)
    return pickle.dumps(
        {n: plan._replace(decision=replace(plan.decision, expected_BDE=nothing_BDE)) for n, plan in plans.items()}
    )


def room(num_bytes: int) -> int:
    """Return the buffer size for plans of `num_bytes`: a power of two, at least LEAST_BYTES."""
    return max(LEAST_BYTES, 2 ** (num_bytes - 1).bit_length())
