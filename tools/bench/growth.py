"""Measures what grows with ranks, layers and microbatches: bytes, and the CPU time of one rank's host.

    OMP_NUM_THREADS=1 python tools/bench/growth.py [--ranks 64 256 1024] [--part plans split schedule] [--repeats 7]

No job of these sizes is started: every function gets the arguments that a rank would give it. A time is CPU time of
this process, the median of the repetitions.

    plans     A rank receives the plan of a layer that another rank has planned. `load` is the bytes of host memory that
              the load of one microbatch takes until the next iteration ends. `plan` is that plan's bytes, and
              `exchanged` its bytes in the tensor that all ranks add up. `receive` reads the plan, `adopt` puts it in
              force and divides its messages, `observe` and `close` record the loads: all on the main thread. `prepare`
              makes tables and messages in the planning thread.
    split     A rank plans where tokens go, with guests in all slots: `cut` finds its own part, `whole` that of all
              ranks, and `shards` the plan of experts with two shards.
    schedule  A stage's schedule, with blockwise overlap.
"""

import argparse
import functools
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from megatron_balance.cost.model import SLOWED, Overlap
from megatron_balance.device.host_memory import Reading
from megatron_balance.flow.cut import cut, cut_loop
from megatron_balance.flow.plan import DispatchPlan
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import tokens_loop
from megatron_balance.planning.manager import Manager
from megatron_balance.planning.policies import load_policy, split_of
from megatron_balance.planning.predictor import Predictor
from megatron_balance.timeline.actions import Action, Operation
from megatron_balance.timeline.agreement import packed, room
from megatron_balance.timeline.layer_state import LayerState
from megatron_balance.timeline.lower import lower, one_forward_one_backward
from megatron_balance.timeline.planner import Plan, plan_for, prepare
from megatron_balance.workloads.synthetic import load_matrix
from planner import NODE, TOPK, cost_model, median_ms

MICROBATCHES = 4
GUEST_SLOTS = 2
LEAST_EXPERTS = 256
TOKENS = 1024
OVERLAP = Overlap(2e-3, 4e-3, slowed=SLOWED)
POLICIES = ("quota", "pro_prophet")
SCHEDULES = ((8, 64), (48, 64), (48, 256))
"""(MoE layers of a stage, microbatches)."""

CPU = torch.device("cpu")


def load(ranks: int, experts: int, step: int) -> np.ndarray:
    sizes = {"num_ranks": ranks, "num_experts": experts, "topk": TOPK, "tokens_per_rank": TOKENS}
    return load_matrix("hot_experts", **sizes, seed=1, step=step)


class Received:
    """A layer on a rank that another rank has sent a plan."""

    def __init__(self, name: str, ranks: int, experts: int) -> None:
        owners = Placement.identity(experts, ranks, GUEST_SLOTS)
        policy = load_policy(name)
        cost = replace(cost_model(ranks, split_of(policy)), overlap=OVERLAP)
        cost.prepare()
        self.owners, self.counts_BDE = owners, np.stack([load(ranks, experts, step) for step in range(MICROBATCHES)])
        self.state = LayerState(Manager(policy, cost, Predictor("last"), owners), None, OVERLAP)  # pyright: ignore[reportArgumentType]
        self.route()
        self.state.observe(self.counts_BDE)
        assert self.manager.expected_BDE is not None
        question = self.manager.question(self.manager.expected_BDE, MICROBATCHES)
        self.content = packed({0: plan_for(question)})
        # As on a rank that has not planned: nothing is known of the placement
        self.manager.cost = replace(cost)

    @property
    def manager(self) -> Manager:
        return self.state.manager

    def route(self) -> None:
        """Let the microbatches of an iteration pass."""
        self.state.loads = []
        self.state.coming = [Reading(functools.partial(torch.from_numpy, counts)) for counts in self.counts_BDE]
        self.state.counts_BDE()

    def forget(self) -> None:
        """Go back to the iteration before the plan."""
        self.manager.placement = self.owners
        self.plan: Plan = pickle.loads(self.content)[0]

    def adopt(self) -> None:
        assert self.plan.sending is not None
        self.manager.adopt(self.plan.decision)
        self.state.follow(self.plan.sending, self.plan.beside)

    def prepare(self) -> None:
        prepare(self.state.placement, self.manager.cost.transport)

    def divide(self) -> None:
        for operation in (Operation.TRANS, Operation.AGG):
            for part in (1, 2):
                self.state.rounds.of(Action(1, operation, part, 2))

    def close(self) -> None:
        self.state.close(self.state.rounds, self.manager.planned_ratio)

    def columns(self, repeats: int) -> list[float]:
        """Return the milliseconds of receiving, adopting, observing, closing, and preparing."""

        def adopted() -> None:
            self.forget()
            self.adopt()

        def prepared() -> None:
            adopted()
            self.prepare()

        receive = median_ms(lambda: pickle.loads(self.content), repeats)
        adopt = median_ms(self.adopt, repeats, self.forget) + median_ms(self.divide, repeats, prepared)
        observe = median_ms(lambda: self.state.observe(self.counts_BDE), repeats)
        self.close()
        close = median_ms(self.close, repeats, self.route)
        return [receive, adopt, observe, close, median_ms(self.prepare, repeats, adopted)]


def plans(sizes: list[int], repeats: int) -> Iterator[str]:
    times = "".join(f"{name:>9s}" for name in ("receive", "adopt", "observe", "close", "prepare"))
    yield f"{'ranks':>6s} {'policy':12s} {'load':>8s} {'plan':>8s} {'exchanged':>10s} {times}, ms"
    for ranks in sizes:
        for name in POLICIES:
            received = Received(name, ranks, max(ranks, LEAST_EXPERTS))
            size = len(received.content)
            row = "".join(f"{ms:9.2f}" for ms in received.columns(repeats))
            assert received.state.last is not None
            kept = received.state.last.loads[0].nbytes
            yield f"{ranks:6d} {name:12s} {kept:8d} {size:8d} {room(size):10d} {row}"


def crowded(ranks: int, experts: int) -> Placement:
    """Return a placement with a guest in every slot, and quotas; popularities of experts are Zipf's."""
    generator = np.random.default_rng(0)
    owners = Placement.identity(experts, ranks, GUEST_SLOTS)
    hosts = [[owner] for owner in owners.owners]
    order_E = generator.permutation(experts)
    weights_E = 1 / np.arange(1, experts + 1)
    for rank in range(ranks):
        wanted = generator.choice(order_E, size=4 * GUEST_SLOTS, replace=False, p=weights_E / weights_E.sum())
        for expert in [expert for expert in wanted if owners.owner(expert) != rank][:GUEST_SLOTS]:
            hosts[expert].append(rank)
    return owners.rehost(hosts, quotas=[[*generator.integers(1, 1000, len(row)).tolist()] for row in hosts])


def split(sizes: list[int], repeats: int) -> Iterator[str]:
    tokens_loop.prepare()
    cut_loop.prepare()
    yield f"{'ranks':>6s} {'experts':>8s} {'cut':>8s} {'whole':>8s} {'shards':>8s}, ms"
    for ranks in sizes:
        experts = max(ranks, LEAST_EXPERTS)
        placement = crowded(ranks, experts)
        counts_DE = torch.from_numpy(load(ranks, experts, 0))
        plan = DispatchPlan(counts_DE, placement, "proportional", NODE)
        both_DE = torch.stack([counts_DE // 2, counts_DE - counts_DE // 2], 1).flatten(0, 1)
        tasks = (
            functools.partial(cut, plan, 1, TOKENS * TOPK, CPU, False),
            functools.partial(cut, plan, 1, TOKENS * TOPK, CPU, True),
            lambda both_DE=both_DE, placement=placement: (
                DispatchPlan(both_DE, placement, "proportional", NODE).tokens_DP
            ),
        )
        yield f"{ranks:6d} {experts:8d} " + " ".join(f"{median_ms(task, repeats):8.3f}" for task in tasks)


def schedule(_: list[int], repeats: int) -> Iterator[str]:
    yield f"{'layers':>6s} {'microbatches':>13s} {'steps':>8s} {'lower':>8s}, ms"
    for layers, microbatches in SCHEDULES:
        passes = one_forward_one_backward([(0, microbatch) for microbatch in range(microbatches)], 1, 0)
        blocks = [[*range(1, layers + 1)]]
        steps = len(lower(passes, blocks, "blockwise"))
        ms = median_ms(lambda passes=passes, blocks=blocks: lower(passes, blocks, "blockwise"), repeats)
        yield f"{layers:6d} {microbatches:13d} {steps:8d} {ms:8.1f}"


def main() -> int:
    tables = {"plans": plans, "split": split, "schedule": schedule}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024], help="sizes of the group")
    parser.add_argument("--part", nargs="+", choices=tables, default=list(tables))
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for part in args.part:
        for line in tables[part](args.ranks, args.repeats):
            print(line, flush=True)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
