"""Policies that misbehave, each in a different way; otherwise, they plan like top2."""

import ctypes
import os
import signal
import sys
import threading
import time

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.fastermoe import Top2


class Good:
    split = "proportional"

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        return Top2().plan(counts, current, cost)


class Leaves(Good):
    def plan(self, *_: object) -> Placement:
        raise SystemExit(0)


class Recurses(Good):
    def plan(self, *arguments: object) -> Placement:
        return self.plan(*arguments)


class TakesMemory(Good):
    def plan(self, *_: object) -> Placement:
        return bytearray(2**62)


class Exits(Good):
    def plan(self, *_: object) -> Placement:
        os._exit(0)


class Crashes(Good):
    def plan(self, *_: object) -> Placement:
        ctypes.string_at(0)


class Loops(Good):
    def plan(self, *_: object) -> Placement:
        while True:
            pass


class HoldsTheLock(Good):
    """Holds the interpreter's lock in C code."""

    def plan(self, *_: object) -> Placement:
        ctypes.PyDLL(None).pause()


class Prints(Good):
    def plan(self, *arguments) -> Placement:
        print("a policy prints", flush=True)
        os.write(1, b"past the interpreter, too\n")
        return super().plan(*arguments)


class Colored(Exception):
    def __str__(self) -> str:
        return "\x1b[31mred\x1b[0m\r\nand \u202elong" + "g" * 10**6


class RaisesColors(Good):
    def plan(self, *_: object) -> Placement:
        raise Colored


class Mute(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


class RaisesMute(Good):
    def plan(self, *_: object) -> Placement:
        raise Mute


class ReturnsALock(Good):
    def plan(self, *_: object) -> Placement:
        return threading.Lock()


class ReturnsAnInvalid(Good):
    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        return ReturnsAnInvalid.invalid(current)

    @staticmethod
    def invalid(current: Placement) -> Placement:
        found = object.__new__(Placement)
        found.__dict__.update(current.__dict__, hosts=((99,),) * current.num_experts)
        return found


class ConstructorLeaves(Good):
    def __init__(self) -> None:
        raise SystemExit(0)


class ConstructorExits(Good):
    def __init__(self) -> None:
        os._exit(0)


class ConstructorLoops(Good):
    def __init__(self) -> None:
        time.sleep(600)


class ConstructorFails(Good):
    def __init__(self) -> None:
        raise Colored


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


class Stops(Good):
    """Stops its own process, as a debugger or a scheduler would."""

    def plan(self, *_: object) -> Placement:
        os.kill(os.getpid(), signal.SIGSTOP)


class IsHere(Good):
    """Reports the process in which it runs."""

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        heavy = sorted({"torch", "megatron.core", "scipy.optimize"} & set(sys.modules))
        raise ValueError(f"{os.getpid()} {heavy} {threading.active_count()} {len(os.listdir('/proc/self/fd'))}")
