"""Schedules as data: the actions of one rank in one iteration, as a table.

    step | computation     | communication  | planning    | waits for
       4 | j:L2 FEC m0     | j:L3 TRANS.1/2 |             | j:L2 TRANS.1/2, j:L2 TRANS.2/2

A *block* is an MoE layer and the non-MoE part after it: up to the next MoE layer, or with the head and the loss. It is
numbered like its MoE layer (Pro-Prophet section V). The part of a model chunk before its first MoE layer is named
separately: `C0` in the first chunk of a pipeline stage. In a chunk without MoE layers, this part is the whole chunk.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Operation(StrEnum):
    """Kind of an action, in the terms of Pro-Prophet (section V, Fig. 7).

    A2A             a block's four exchanges for each microbatch: dispatch, combine, and the gradients of combine and
                    dispatch
    FEC, FNEC       forward computation of the experts, and of everything else
    BNEC, BEC       backward computation of everything but the experts, and of the experts
    REDUCE          gradients are complete; data-parallel ranks reduce them
    STEP            the optimizer's step comes next
    PLAN            the policy decides the next placement of a layer
    TRANS, AGG      owners send weights to guests; guests send gradients to owners
    BTRANS          a Trans for the backward pass of a microbatch, if other layers have used its guest slots since
    TRANSFER        experts and their optimizer state move to new owners after the step; no schedule contains this
    """

    # Every hook looks up an action, and the hash of an enumeration is a slow Python function
    __hash__ = str.__hash__

    A2A = "A2A"
    FEC = "FEC"
    FNEC = "FNEC"
    BNEC = "BNEC"
    BEC = "BEC"
    REDUCE = "REDUCE"
    STEP = "STEP"
    PLAN = "PLAN"
    TRANS = "TRANS"
    BTRANS = "BTRANS"
    AGG = "AGG"
    TRANSFER = "TRANSFER"


EXPERTS = (Operation.A2A, Operation.FEC, Operation.BEC)
"""Computations of the MoE layer itself."""


def chunk_start(chunk: int) -> int:
    """Return the number of the part of a model chunk before its first MoE layer."""
    return -1 - chunk


def block_name(block: int) -> str:
    """Return `L3`, for example, or `C0` for a `chunk_start`."""
    return f"L{block}" if block >= 0 else f"C{chunk_start(block)}"


class Action(NamedTuple):
    """One operation of one block."""

    block: int
    """Number of an MoE layer, or a `chunk_start`; 0 for REDUCE and STEP."""

    operation: Operation
    part: int = 1
    parts: int = 1
    microbatch: int | None = None
    """Microbatch of a computation, or of an action that each microbatch has; None: once per iteration."""

    iteration: int = 0
    """0: the schedule's iteration j; 1: iteration j + 1."""

    def __str__(self) -> str:
        """Return `j+1:L3 PLAN`, for example, or `j:L3 TRANS.1/2`, `j:L3 FEC m0` or `j:C0 FNEC m0`."""
        iteration = f"j+{self.iteration}" if self.iteration else "j"
        return f"{iteration}:{self.name}"

    @property
    def name(self) -> str:
        """Text without the iteration, for example `L3 TRANS.1/2`."""
        part = f".{self.part}/{self.parts}" if self.parts > 1 else ""
        microbatch = "" if self.microbatch is None else f" m{self.microbatch}"
        return f"{block_name(self.block)} {self.operation}{part}{microbatch}"

    @property
    def is_forward(self) -> bool:
        exchange = self.operation is Operation.A2A and self.part <= self.parts // 2
        return exchange or self.operation in (Operation.FEC, Operation.FNEC)


class Step(NamedTuple):
    """A computation, and the rank's actions just before it. Order: wait for actions of earlier steps, start planning
    and communication, wait for those started here that are in `waits`."""

    computation: Action
    communication: tuple[Action, ...] = ()
    planning: tuple[Action, ...] = ()
    waits: tuple[Action, ...] = ()


Schedule = tuple[Step, ...]
"""One iteration of one rank, in the order of its computations; each column of `grid` is one stream."""

Places = dict[tuple[int, Operation, int], int]
"""(block, operation, part) -> the step of this computation in one of its microbatches."""


def places(schedule: Sequence[Step]) -> tuple[Places, Places]:
    """Return the first and the last step of every computation of a schedule."""
    first: Places = {}
    last: Places = {}
    for number, step in enumerate(schedule):
        computation = step[0][:3]
        first.setdefault(computation, number)
        last[computation] = number
    return first, last


def grid(schedule: Schedule) -> str:
    """Return the schedule as a table, one line per step."""
    cells: list[tuple[str, ...]] = [("step", "computation", "communication", "planning", "waits for")]
    for number, (computation, *actions) in enumerate(schedule):
        cells.append((str(number), str(computation), *(", ".join(map(str, column)) for column in actions)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines) + "\n"
