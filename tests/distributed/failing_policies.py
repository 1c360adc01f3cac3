"""Policies that plan well at first and fail later, in a separate module that their processes import quickly."""

import itertools
import os

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.fastermoe import Top2
from megatron_balance.planning.policies.interface import owners_host

LAYERS = 2
GOOD = 3
"""Iterations with good plans."""

RANK = "RANK_OF_A_TEST"
"""The environment variable with a policy's rank, in place of a launcher's RANK."""


class Turning:
    """Plans as top2 in the first iterations, and as `go_wrong` afterwards."""

    def __init__(self) -> None:
        self.plans = 0

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        self.plans += 1
        good = Top2().plan(counts, current, cost)
        return good if self.plans <= GOOD * LAYERS else self.go_wrong(current, good)

    def go_wrong(self, current: Placement, good: Placement) -> Placement:
        """Return the plan to use instead of `good`."""
        raise NotImplementedError


class TooManyGuests(Turning):
    def go_wrong(self, current: Placement, good: Placement) -> Placement:
        everywhere = itertools.product(range(current.num_experts), range(current.num_ranks))
        return owners_host(current, [(expert, rank) for expert, rank in everywhere if rank != current.owner(expert)])


class TwoFaults(Turning):
    """Alternates between two kinds of fault from iteration to iteration."""

    def go_wrong(self, current: Placement, good: Placement) -> Placement:
        if (self.plans - 1) // LAYERS % 2:
            raise KeyError(self.plans)
        return TooManyGuests().go_wrong(current, good)


class OwnMind(Turning):
    """Plans a different guest on every rank."""

    def go_wrong(self, current: Placement, good: Placement) -> Placement:
        rank = int(os.environ[RANK])
        (expert, *_) = current.home[(rank + 1) % current.num_ranks]
        return owners_host(current, [(expert, rank)])


class OneRankRaises(Turning):
    def go_wrong(self, current: Placement, good: Placement) -> Placement:
        if int(os.environ[RANK]) == 1:
            raise ZeroDivisionError("on this rank only")
        return owners_host(current)


class LoopsOnRank1(Turning):
    def go_wrong(self, current: Placement, good: Placement) -> Placement:
        while os.environ[RANK] == "1":
            pass
        return owners_host(current)


class ExitsOnRank1(Turning):
    def go_wrong(self, current: Placement, good: Placement) -> Placement:
        if os.environ[RANK] == "1":
            os._exit(0)
        return owners_host(current)
