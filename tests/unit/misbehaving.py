"""Policies that misbehave, each in a different way; otherwise, they plan like top2."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass

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


class Interrupts(Good):
    def plan(self, *_: object) -> Placement:
        raise KeyboardInterrupt


class Recurses(Good):
    def plan(self, *arguments: object) -> Placement:
        return self.plan(*arguments)


class TakesMemory(Good):
    def plan(self, *_: object) -> Placement:
        return bytearray(2**62)


class Exits(Good):
    def plan(self, *_: object) -> Placement:
        os._exit(0)


class ExitsOnce(Good):
    """Exits in its first process, which leaves a mark."""

    def plan(self, *arguments) -> Placement:
        mark = os.environ.get("MARK_OF_A_TEST", "")
        if not os.path.exists(mark):
            open(mark, "w").close()
            os._exit(3)
        return super().plan(*arguments)


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


def write_everywhere(data: bytes) -> None:
    """Write to all open files, including the connection to the rank."""
    for descriptor in range(3, 4096):
        with contextlib.suppress(OSError):
            os.write(descriptor, data)


class Babbles(Good):
    def plan(self, *_: object) -> Placement:
        write_everywhere(b"\0\0\0\4garbage")
        time.sleep(60)


class Truncates(Good):
    def plan(self, *_: object) -> Placement:
        write_everywhere(b"\0\0\1\0half")
        os._exit(0)


class Floods(Good):
    """Announces a huge answer."""

    def plan(self, *_: object) -> Placement:
        write_everywhere(b"\x70\0\0\0")
        time.sleep(60)


class Closes(Good):
    def plan(self, *_: object) -> Placement:
        os.closerange(3, 4096)
        time.sleep(60)


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


class ReturnsAGigabyte(Good):
    def plan(self, *_: object) -> Placement:
        return bytes(2**30)


@dataclass(frozen=True)
class Hostile(Placement):
    def __eq__(self, other: object) -> bool:
        raise SystemExit(0)

    def __str__(self) -> str:
        raise SystemExit(0)

    def __reduce__(self):
        return os._exit, (0,)


class ReturnsASubclass(Good):
    """Returns a valid placement of another class."""

    def plan(self, *arguments) -> Placement:
        good = super().plan(*arguments)
        hosts = tuple(tuple(np.array(ranks)) for ranks in good.hosts)
        return Hostile(
            num_experts=good.num_experts, home=good.home, guests=good.guests, hosts=hosts, primary=good.primary
        )


class Homeless(Placement):
    def __init__(self) -> None:
        pass

    @property
    def home(self) -> tuple:
        raise SystemExit(0)


class ReturnsAHomeless(Good):
    def plan(self, *_: object) -> Placement:
        return Homeless()


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
