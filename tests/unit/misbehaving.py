"""Policies that misbehave, each in a different way; otherwise, they plan like top2."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.fastermoe import Top2


class Good:
    split = "proportional"

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        return Top2().plan(counts, current, cost)


def misusing(method: str, function: Callable[..., object], *arguments: object) -> type[Good]:
    """Return a policy with a method that calls a function with these arguments instead."""
    return type("Policy", (Good,), {method: lambda *_: function(*arguments)})


def fail(error: type[Exception]) -> None:
    raise error


class Loops(Good):
    def plan(self, *_: object) -> Placement:
        while True:
            pass


class Prints(Good):
    def plan(self, *arguments) -> Placement:
        print("a policy prints", flush=True)
        os.write(1, b"past the interpreter, too\n")
        return super().plan(*arguments)


class Colored(Exception):
    def __str__(self) -> str:
        return "\x1b[31mred\x1b[0m\r\nand \u202elong" + "g" * 10**6


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


def recurse(*arguments: object) -> Placement:
    return recurse(*arguments)


def invalid(current: Placement) -> Placement:
    found = object.__new__(Placement)
    found.__dict__.update(current.__dict__, hosts=((99,),) * current.num_experts)
    return found


MISTAKES: dict[str, Callable[[Placement], Placement]] = {
    "raised SystemExit: 0": lambda _: sys.exit(0),
    "raised RecursionError: maximum recursion depth exceeded": recurse,
    "raised MemoryError": lambda _: bytearray(2**62),
    "raised Colored: red and ?longggg": lambda _: fail(Colored),
    "raised Mute: (its text cannot be shown)": lambda _: fail(Mute),
    "returned no Placement: a lock": lambda _: threading.Lock(),
    "raised ValueError: expert 0": invalid,
}
"""By the beginning of the log message."""


class Errs(Good):
    """Plans well if no rank has tokens for the first expert; otherwise, their number chooses one of MISTAKES."""

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        chosen = int(counts[..., 0].sum())
        return [*MISTAKES.values()][chosen - 1](current) if chosen else super().plan(counts, current, cost)


class NeedsArguments(Good):
    def __init__(self, wanted: int) -> None:
        pass


class SplitIsATuple(Good):
    split = ("local_first",)


class SplitIsCalled(Good):
    def split(self) -> str:
        return "local_first"


class SplitRaises(Good):
    @property
    def split(self) -> str:
        raise SystemExit(0)


class SplitIsUnknown(Good):
    split = "\x1b[31mbest"


class NoPlan:
    split = "local_first"


class PlanRaises:
    @property
    def plan(self):
        raise SystemExit(0)


class IsHere(Good):
    """Reports the process in which it runs."""

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        heavy = sorted({"torch", "megatron.core", "scipy.optimize"} & set(sys.modules))
        raise ValueError(f"{os.getpid()} {heavy} {threading.active_count()} {len(os.listdir('/proc/self/fd'))}")


Exits = misusing("plan", os._exit, 0)
Crashes = misusing("plan", ctypes.string_at, 0)
# It holds the interpreter's lock in C code
HoldsTheLock = misusing("plan", ctypes.PyDLL(None).pause)
# It stops its own process, as a debugger or a scheduler would
Stops = misusing("plan", signal.raise_signal, signal.SIGSTOP)
ConstructorLeaves = misusing("__init__", sys.exit, 0)
ConstructorExits = misusing("__init__", os._exit, 0)
ConstructorLoops = misusing("__init__", time.sleep, 600)
ConstructorFails = misusing("__init__", fail, Colored)
