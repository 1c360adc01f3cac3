"""Chooses the number of chunks of each layer's tokens, and the order of the chunks' tasks.

`TaskModel` predicts the seconds of a chunk's tasks from a cluster profile and the split matrix, equally on all ranks.
In shapes, D counts sources, and W hosts (ranks of an all-to-all).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_balance.comm.alltoall import AllToAll
from megatron_balance.comm.compressed import CompressedAllToAll, TokenExchange
from megatron_balance.comm.sharded import Sharding
from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.cost.model import CostModel
from megatron_balance.flow.chunks.order import (
    UNSPLIT,
    Chunking,
    ChunkTimes,
    Scheduler,
    check,
    interleaved,
    makespan,
    parse,
    text,
)
from megatron_balance.flow.plan import DispatchPlan, by_host
from megatron_balance.planning.demi.schedule import MiniTaskKind as MiniTask
from megatron_balance.planning.policies.interface import Policy
from megatron_balance.profile.cluster_profile import ClusterProfile, Throughput

DEGREES = (1, 2, 4, 8, 16)
"""Candidates for the number of chunks with `--moe-comm-chunks auto`."""

MOST_CHUNKS = 1024
"""Maximum number of chunks; each chunk costs a round of exchanges."""

Decide = Callable[[DispatchPlan], tuple[Chunking, str]]
"""Plan -> (how to split its tokens, the reason); a pure function, so all ranks decide alike."""


def find_degrees(chunks: str) -> tuple[int, ...]:
    """Return the candidates for a value of `--moe-comm-chunks`; ValueError if it is neither `auto` nor 1 to
    `MOST_CHUNKS`."""
    if chunks == "auto":
        return DEGREES
    if not (chunks.isdecimal() and len(chunks) < 10 and 1 <= int(chunks) <= MOST_CHUNKS):
        raise ValueError(f"--moe-comm-chunks {chunks}: give 1 to {MOST_CHUNKS}, or auto")
    return (int(chunks),)


class ChunkChoice:
    """Chooses a layer's chunking every `interval` iterations, from the plan of the first pass; equal on all ranks of a
    group."""

    def __init__(
        self, decide: Decide, iteration: Callable[[], int], interval: int, log: Callable[[str], None] | None = None
    ) -> None:
        """`iteration` returns the current iteration; `log` receives a line when a layer's choice changes."""
        self.decide = decide
        self.iteration = iteration
        self.interval = interval
        self.log = log
        self._chosen: dict[int, tuple[int, Chunking]] = {}
        """By layer number: index of the period of `interval` iterations, and its choice."""

    @property
    def chosen(self) -> dict[int, Chunking]:
        """The choice in force, by layer number."""
        return {layer: chunking for layer, (_, chunking) in self._chosen.items()}

    def __call__(self, layer: int, plan: DispatchPlan) -> Chunking:
        """Return the chunking of `plan`."""
        period = self.iteration() // self.interval
        before = self._chosen.get(layer)
        if before is None or before[0] != period:
            chunking, reason = self.decide(plan)
            self._chosen[layer] = period, chunking
            if self.log is not None and (before is None or before[1] != chunking):
                number = f"{chunking.chunks} chunk{'s' if chunking.chunks > 1 else ''}"
                orders = f"forward {text(chunking.forward)}; backward {text(chunking.backward)}"
                self.log(f"layer {layer}: {number} ({orders}); {reason}")
        return self._chosen[layer][1]

    def state(self) -> dict[str, Any]:
        """Return numbers and strings for a checkpoint."""
        return {
            str(layer): [period, text(chunking.forward), text(chunking.backward), chunking.shares]
            for layer, (period, chunking) in self._chosen.items()
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the choices of a `state`."""
        self._chosen = {
            int(layer): (period, Chunking(parse(forward), parse(backward), shares))
            for layer, (period, forward, backward, shares) in state.items()
        }


@dataclass(frozen=True, kw_only=True)
class TaskModel:
    """Predicts the seconds of the seven tasks, forward and backward. The slowest rank determines the time of a task."""

    profile: ClusterProfile
    """Profile of the ranks of the all-to-alls."""
    exchange: TokenExchange
    models: Sequence[ExchangeModel]
    """Models of the exchange's all-to-all without compression; the fastest model is used."""
    sharding: Sharding
    hosts: int
    codec: str
    """Name of the codec in the profile."""
    hidden: int
    dtype: torch.dtype

    def times(self, tokens_DP: np.ndarray) -> tuple[ChunkTimes, ChunkTimes]:
        """Return a chunk's forward and backward times; tokens_DP, its tokens by physical expert, may be fractions."""
        splits_DW = tokens_DP.reshape(len(tokens_DP), self.hosts, -1).sum(2)
        exchange = self.exchange
        profile = self.profile
        return (
            self._one_direction(splits_DW, exchange.dispatch, profile.forward, exchange.combine),
            self._one_direction(splits_DW, exchange.combine.reverse, profile.backward, exchange.dispatch.reverse),
        )

    def _one_direction(
        self, splits_DW: np.ndarray, first: AllToAll, experts: Throughput, second: AllToAll
    ) -> ChunkTimes:
        received = float(splits_DW.sum(0).max())
        computing = experts.overhead + experts.seconds_per_token * received if received else 0.0
        messages = self.sharding.messages(splits_DW)
        spreading, collecting = (self._among_shards(name, received) for name in self.sharding.collectives)
        c1, a1, d1 = self._exchange(first, messages)
        c2, a2, d2 = self._exchange(second, messages, back=True)
        # Collectives among shards follow the arrival of rows and precede the return of results
        return ChunkTimes(c1, a1, d1 + spreading, computing, c2 + collecting, a2, d2)

    def _among_shards(self, collective: str | None, rows: float) -> float:
        """Return the seconds of a collective over `rows` rows among an expert's shards, which share a node."""
        if collective is None or not rows:
            return 0.0
        return self.profile.link(collective, "intra").seconds(rows * self.hidden * self.dtype.itemsize)

    def _exchange(
        self, all_to_all: AllToAll, messages: Sequence[np.ndarray], back: bool = False
    ) -> tuple[float, float, float]:
        """Return the seconds of compression (busiest sender), exchange, and decompression (busiest receiver). `back`:
        the exchange carries the results of these rows."""
        compressed = isinstance(all_to_all, CompressedAllToAll)
        row_bytes = self.hidden * self.dtype.itemsize
        if compressed:
            row_bytes = all_to_all.codec.bytes_per_row(self.hidden, self.dtype)
        times = [
            [(model.returning if back else model.seconds)(splits_WW * row_bytes) for model in self.models]
            for splits_WW in messages
        ]
        seconds = max(map(min, times))
        if not compressed:
            return 0.0, seconds, 0.0
        axes = (0, 1) if back else (1, 0)
        sent, received = (max(float(splits_WW.sum(axis).max()) for splits_WW in messages) for axis in axes)
        encode, decode = self.profile.codec(self.codec)
        return (
            encode.overhead + encode.seconds_per_token * sent,
            seconds,
            decode.overhead + decode.seconds_per_token * received,
        )


@dataclass(frozen=True)
class ByPrediction:
    """Chooses the number of chunks whose predicted time in the scheduler's order is least (ScheMoE, section 4)."""

    degrees: tuple[int, ...]
    scheduler: Scheduler
    model: TaskModel

    def __call__(self, plan: DispatchPlan) -> tuple[Chunking, str]:
        """Return the chunking and the reason; ties go to fewer chunks. ValueError if the scheduler's order is
        impossible."""
        tokens_DP = plan.tokens_DP.numpy().astype(np.float64)
        chunkings = {}
        seconds = {}
        for degree in self.degrees:
            # Fractions of tokens, because chunks of whole tokens would differ slightly
            ways = [(one,) * degree for one in self.model.times(tokens_DP / degree)]
            orders = [self.scheduler(times) for times in ways]
            for order in orders:
                if problems := check(order, degree):
                    raise ValueError(f"--moe-comm-order: the order {text(order)!r} is impossible: {problems[0]}")
            chunkings[degree] = Chunking(forward=orders[0], backward=orders[1])
            seconds[degree] = sum(makespan(order, times) for order, times in zip(orders, ways, strict=True))
        chosen = min(seconds, key=seconds.__getitem__)
        times = ", ".join(f"{degree}: {1e3 * time:.3g} ms" for degree, time in seconds.items())
        return chunkings[chosen], f"predicted forward and backward by number of chunks: {times}"


@dataclass(frozen=True)
class ByMiniTasks:
    """Makes one chunk for each time slot in which DEMI's schedule computes, with the tokens computed in it."""

    policy: Policy
    """A policy that implements `Policy.schedule`."""
    cost: CostModel

    def __call__(self, plan: DispatchPlan) -> tuple[Chunking, str]:
        """Return the chunking and the reason; a chunk has one fraction of a source's tokens for all hosts of an
        expert."""
        placement = plan.placement
        ranks = placement.num_ranks
        # All sources of a host together are one worker of the schedule
        schedule = self.policy.schedule(by_host(plan.tokens_DP, ranks).numpy(), placement, self.cost)
        computed_CDE = np.zeros((schedule.makespan, ranks, placement.num_experts))
        for (expert, task, source, _), amounts in zip(schedule.mini_tasks, schedule.amounts, strict=True):
            if task is MiniTask.COMPUTE:
                computed_CDE[: len(amounts), source, expert] += amounts
        computed_CDE = computed_CDE[computed_CDE.any((1, 2))]
        if not len(computed_CDE):
            return UNSPLIT, "there are no tokens"
        shares_CDE = computed_CDE / np.maximum(computed_CDE.sum(0), np.finfo(np.float64).tiny)
        shares_CDE = shares_CDE.repeat(len(plan.tokens_DP) // ranks, axis=1)
        order = interleaved((ChunkTimes(*[0.0] * 7),) * len(shares_CDE))
        shares = tuple(tuple(tuple(map(float, row)) for row in chunk) for chunk in shares_CDE)
        return Chunking(order, order, shares), f"as the mini-tasks are computed:\n{schedule}"
