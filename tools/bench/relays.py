"""Compares ways to send one expert to k guests: chains, trees and direct sends, on a slow network (testbed.py).

    python tools/bench/relays.py [--layouts 2x4 4x2] [--mib 8 32] [--guests 1 3 7] [--chunks 4 16]
                                 [--link-mbit 400] [--repeats 9]

Rank 0 owns the expert, the last k ranks are its guests. `chain-c` and `tree-c` are `plan_transfers` with c pieces and
one or two sends per rank; with `direct` the owner sends the whole expert to every guest; with `doubling` every rank
that has it passes on the whole expert until all have it. `exchanged-c` and `by-node-c` are the routes of few batches
of `placement/relays.py`. All plans take turns in one job, with the same TransAgg,
and an untimed Trans and Agg of each must produce the right weights and sums. Times are from the first rank's start to
the last rank's end. `links` is the time that the busiest node's link needs for the plan's messages, and the limit is
that of the best plan. For CPU time, see alltoall.py.
"""

import argparse
import itertools
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron_balance.placement.relays import ROUTES, hops, plan_hops
from megatron_balance.placement.transfers import Message, TransferPlan, plan_transfers

from alltoall import Row, Sample, layout, meet, timed
from megatron_balance.comm.trans_agg import TransAgg
from megatron_balance.device import cpu
from megatron_balance.placement.placement import Placement
from namespaces import TestbedUnavailable
from testbed import Testbed
from traffic import limit

EXPERT = 0
KINDS = ("trans", "agg")
SHAPES = {"chain": 1, "tree": 2}
"""Number of sends per rank."""


@dataclass(frozen=True)
class Case:
    """Parameters of one table, except the links' rates, which the ranks do not need."""

    num_ranks: int
    node_size: int
    mib: float
    guests: int
    chunks: tuple[int, ...]
    repeats: int

    @property
    def placement(self) -> Placement:
        """Placement with one expert per rank; that of rank 0 is a guest on the last ranks."""
        ranks = range(self.num_ranks - self.guests, self.num_ranks)
        return Placement.identity(self.num_ranks, self.num_ranks, 1).with_hosts((EXPERT, rank) for rank in ranks)

    @property
    def plans(self) -> dict[str, TransferPlan]:
        """Plans by name."""
        guests = range(self.num_ranks - self.guests, self.num_ranks)
        doubling = plan_transfers(self.placement, self.node_size, 1, fanout=self.guests)
        relayed = {
            f"{shape}-{chunks}": plan_transfers(self.placement, self.node_size, chunks, fanout)
            for shape, fanout in SHAPES.items()
            for chunks in self.chunks
        }
        few = {
            f"{route.replace(' ', '-')}-{chunks}": plan_hops(hops(self.placement, self.node_size, route), chunks)
            for route in ROUTES[1:]
            for chunks in (1, *self.chunks)
        }
        return {"direct": direct(guests), "doubling": doubling, **relayed, **few}

    def bytes_between(self, plan: TransferPlan) -> np.ndarray:
        """Return the bytes that a plan sends from each rank to each rank, [D, D]."""
        bytes_DD = np.zeros((self.num_ranks, self.num_ranks))
        for _, source, target, _, chunks in itertools.chain.from_iterable(plan.rounds):
            bytes_DD[source, target] += self.mib * 2**20 / chunks
        return bytes_DD


def direct(guests: Sequence[int]) -> TransferPlan:
    """Return the plan in which the owner, rank 0, sends the whole expert to one guest after the other."""
    return TransferPlan.of((Message(EXPERT, 0, guest, 0),) for guest in guests)


class Kept:
    """A home slot and a guest slot with one float32 tensor each."""

    def __init__(self, numel: int, rank: int) -> None:
        self.weights = [torch.full((numel,), rank + 1.0), torch.zeros(numel)]
        self.gradients = [torch.ones(numel), torch.ones(numel)]

    def ready(self) -> None:
        """Do nothing: weights are always up to date."""

    def weights_of(self, slot: int) -> list[torch.Tensor]:
        return [self.weights[slot]]

    def gradients_of(self, slot: int) -> list[torch.Tensor]:
        return [self.gradients[slot]]


def measure(case: Case) -> dict[tuple[str, str], list[Sample]]:
    """Run Trans and Agg with all plans in turn, `case.repeats` times; the task of every rank.

    Returns:
        Samples by (kind, plan).
    """
    cpu.keep_freed_memory()
    group = dist.group.WORLD
    assert group is not None
    rank = group.rank()
    placement = case.placement
    transfer = TransAgg(group)
    kept = Kept(round(case.mib * 2**18), rank)
    runs: dict[tuple[str, str], Callable[[], None]] = {}
    for name, plan in case.plans.items():
        _check(transfer, plan, placement, kept, rank, case.guests)
        for kind in KINDS:
            runs[kind, name] = lambda kind=kind, plan=plan: getattr(transfer, kind)(plan, placement, kept)
    samples: dict[tuple[str, str], list[Sample]] = {name: [] for name in runs}
    names = list(runs)
    for repeat in range(case.repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            meet()
            samples[name].append(timed(runs[name]))
    return samples


def _check(transfer: TransAgg, plan: TransferPlan, placement: Placement, kept: Kept, rank: int, guests: int) -> None:
    kept.weights[1].zero_()
    for gradient in kept.gradients:
        gradient.fill_(1.0)
    transfer.trans(plan, placement, kept)
    transfer.agg(plan, placement, kept)
    if EXPERT in placement.guests[rank]:
        assert (kept.weights[1] == 1).all() and not kept.gradients[1].any()
    assert rank != 0 or (kept.gradients[0] == 1 + guests).all()


def table(rows: dict[tuple[str, str], Row], links: dict[str, float]) -> str:
    """Return one line for each kind and plan; `links` has the seconds that the links need for each plan."""
    lines = [f"{'':18s} {'median ms':>9s} {'(min-max)':12s} /direct  links ms  /limit    own kernel foreign"]
    for (kind, name), row in rows.items():
        spread = f"({1e3 * min(row.seconds):.0f}-{1e3 * max(row.seconds):.0f})"
        ratio = row.median / rows[kind, "direct"].median
        best = min(links.values())
        over = row.median / best if best else float("nan")
        cores = f"{row.own_cores:6.2f} {row.kernel_cores:6.2f} {row.foreign_cores:7.2f}"
        times = f"{1e3 * row.median:9.1f} {spread:12s} {ratio:7.3f} {1e3 * links[name]:9.1f} {over:7.3f}"
        lines.append(f"{kind:5s} {name:12s} {times} {cores}   {row.objection}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", type=layout, default=[(2, 4), (4, 2)], help="nodes x ranks per node")
    parser.add_argument("--mib", nargs="+", type=float, default=[8.0, 32.0], help="MiB of the expert")
    parser.add_argument(
        "--guests",
        nargs="+",
        type=int,
        default=[1, 3, 7],
        help="numbers of guests, at most the ranks without the owner",
    )
    parser.add_argument("--chunks", nargs="+", type=int, default=[4, 16], help="pieces of the expert, relayed")
    parser.add_argument("--link-mbit", type=float, default=400.0)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args(argv)
    smallest = min(nodes * node_size for nodes, node_size in args.layouts)
    if not all(0 < guests < smallest for guests in args.guests):
        parser.error(f"--guests {args.guests}: choose from 1 to {smallest - 1}, one less than a layout's ranks")
    # This module cannot be preloaded: the fork server does not search for modules in a script's directory
    multiprocessing.set_forkserver_preload(["torch.distributed", "megatron_balance.comm.trans_agg"])
    try:
        for nodes, node_size in args.layouts:
            with Testbed(nodes, node_size, args.link_mbit) as testbed:
                for mib, guests in itertools.product(args.mib, args.guests):
                    chunks = tuple(args.chunks)
                    _report(testbed, Case(nodes * node_size, node_size, mib, guests, chunks, args.repeats))
    except ValueError as error:
        parser.error(str(error))
    except TestbedUnavailable as error:
        print(f"relays.py: {error}", file=sys.stderr)
        return 2
    return 0


def _report(testbed: Testbed, case: Case) -> None:
    plans = case.plans
    links = {
        name: limit(case.bytes_between(plan), case.node_size, testbed.link_mbit, None).seconds
        for name, plan in plans.items()
    }
    print(
        f"\n{testbed.nodes}x{case.node_size}, expert of {case.mib:g} MiB to {case.guests} guests, links "
        f"{testbed.link_mbit:g} Mbit/s, {case.repeats} repeats; limit {1e3 * min(links.values()):.1f} ms"
    )
    # A generous multiple of the time for all bytes over one link
    patience = 60 + 20 * (case.repeats + 2) * len(plans) * max(links.values())
    by_rank = testbed.run(measure, case, timeout=patience)
    rows = {(kind, name): Row.of([samples[kind, name] for samples in by_rank]) for kind in KINDS for name in plans}
    print(table(rows, links), flush=True)


if __name__ == "__main__":
    sys.exit(main())
