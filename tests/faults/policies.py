"""Policies that misbehave."""

import ctypes
import os
import sys

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement


class Leaves:
    def plan(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        sys.exit(0)


class LeavesAtOnce:
    def plan(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        os._exit(0)


class Loops:
    def plan(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        while True:
            pass


class Crashes:
    def plan(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        ctypes.string_at(0)
        return current


class Interrupts:
    def plan(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        raise KeyboardInterrupt


class Shouts:
    def plan(self, counts_DE: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        raise ValueError("\x1b[31m" + "loud\n" * 100_000)
