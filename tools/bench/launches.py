"""Counts what the host launches for Trans and Agg of one layer, and times it, without a network.

    python tools/bench/launches.py [--sizes 8:64 64:256] [--policy quota pro_prophet flexmoe] [--cluster FILE]

Plans are made for Zipf and log-normal loads with two guest slots, nodes of 8 ranks and the experts of Qwen3-235B and
Mixtral 8x7B. Each row compares the routes of the cost model with chains in the number of pieces that are fastest if
launches take no time of the host:

    rounds, ops    batches of the layer, and sends and receives of the rank that has the most
    host ms        thread time of Trans and of Agg on that rank with torch's fake process group, prepared; tensors are
                   small, so that no time is spent on their bytes
    model ms       modeled seconds of Trans and Agg, launches charged

The first lines are the thread time of a batch by its number of messages.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_balance.comm.trans_agg import TransAgg
from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import TransPlan, hops, plan_hops
from megatron_balance.planning.policies import load_policy, registered
from megatron_balance.profile.cluster import Ranks, profile_of, read

CLUSTERS = Path(__file__).parents[2] / "configs/clusters"
SHAPES = {"Qwen3-235B": (4096, 1536, 8), "Mixtral 8x7B": (4096, 14336, 2)}
"""Hidden size, inner size of an expert, and experts per token."""

NODE = 8
SLOTS = 2
TOKENS = 4096
REPEATS = 30


class Slots:
    """Slots of two small tensors each; cutting them into pieces takes as long as cutting large ones."""

    def __init__(self, number: int) -> None:
        self.tensors = [[torch.zeros(1 << 14), torch.zeros(1 << 13)] for _ in range(number)]

    def ready(self) -> None:
        """There is nothing to wait for."""

    def own(self, home_experts: Sequence[int]) -> None:
        """Experts stay."""

    def weights_of(self, slot: int) -> Sequence[torch.Tensor]:
        return self.tensors[slot]

    gradients_of = weights_of


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median thread time of a call."""
    call()
    found = []
    for _ in range(REPEATS):
        start = time.thread_time()
        call()
        found.append(time.thread_time() - start)
    return 1e3 * float(np.median(found))


def loads(num_ranks: int, num_experts: int, topk: int, kind: str) -> np.ndarray:
    """Return tokens [D, E] of experts whose popularity follows a distribution."""
    generator = np.random.default_rng([0, num_ranks])
    popular_E = np.arange(1, num_experts + 1) ** -0.7
    if kind == "lognormal":
        popular_E = generator.lognormal(0, 0.8, num_experts)
    return generator.multinomial(TOKENS * topk, generator.permutation(popular_E / popular_E.sum()), num_ranks)


def column(plan: TransPlan, placement: Placement, cost: CostModel) -> str:
    """Return the counts and times of a plan."""
    operations: Counter[int] = Counter()
    for messages in plan.rounds:
        for message in messages:
            operations.update((message.source, message.target))
    rank, most = operations.most_common(1)[0]
    dist.init_process_group("fake", rank=rank, world_size=placement.num_ranks, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    transfer = TransAgg(group)
    slots = Slots(placement.home_slots + placement.guest_slots)
    transfer._is_queued = True  # as with NCCL
    hosts = [milliseconds(lambda run=run: run(plan, placement, slots)) for run in (transfer.trans, transfer.agg)]
    dist.destroy_process_group()
    trans, agg = cost.plan_seconds(plan)
    host = "/".join(f"{one:.2f}" for one in hosts)
    return f"{len(plan.rounds):4d} {most:5d} {host:>11s} {1e3 * trans:8.2f}/{1e3 * agg:<6.2f}"


def batches() -> None:
    """Print the thread time of a batch by its messages."""
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    tensor = torch.zeros(1000)
    group = dist.group.WORLD
    for count in (1, 4, 16, 64):
        operations = [
            dist.P2POp(dist.irecv if index % 2 else dist.isend, tensor, group=group, group_peer=1 + index % 63)
            for index in range(count)
        ]
        run = milliseconds(lambda some=operations: [work.wait() for work in dist.batch_isend_irecv(some)])
        print(f"a batch of {count:2d} messages: {1e3 * run:6.1f} us")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["8:64", "64:256"], help="ranks:experts")
    parser.add_argument("--policy", nargs="+", choices=registered(), default=["quota", "pro_prophet", "flexmoe"])
    parser.add_argument("--cluster", type=Path, default=CLUSTERS / "h100.yaml")
    args = parser.parse_args()
    batches()
    heads = f"{'rounds  ops     host ms      model ms':38s}"
    print(f"{'ranks, expert, load, policy':44s} copies | {'direct':38s} | routes chosen\n{'':52s}| {heads} | {heads}")
    for size in args.sizes:
        num_ranks, num_experts = map(int, size.split(":"))
        for name, (hidden, ffn, topk) in SHAPES.items():
            profile = profile_of(read(args.cluster), Ranks(num_ranks, min(NODE, num_ranks), NODE), hidden, 3 * ffn // 2)
            for kind in ("zipf", "lognormal"):
                counts_DE = loads(num_ranks, num_experts, topk, kind)
                for policy in map(load_policy, args.policy):
                    cost = CostModel(
                        profile,
                        token_bytes=2 * hidden,
                        param_bytes=6 * hidden * ffn,
                        grad_bytes=12 * hidden * ffn,
                        split=policy.split,
                    )
                    placement = policy.plan(counts_DE, Placement.identity(num_experts, num_ranks, SLOTS), cost)
                    label = f"{num_ranks:3d} {name}, {kind}, {type(policy).__name__}"
                    if not placement.added_hosts:
                        print(f"{label:44s} {0:6d} |")
                        continue
                    direct = plan_hops(hops(placement, profile.node_size, "direct"), 1)
                    plans = [column(plan, placement, cost) for plan in (direct, cost.trans_plan(placement))]
                    print(f"{label:44s} {placement.added_hosts:6d} | {' | '.join(plans)}", flush=True)


if __name__ == "__main__":
    main()
