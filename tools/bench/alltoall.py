"""Compares all-to-all implementations with each other and with the links' limit, on a slow network (testbed.py).

    python tools/bench/alltoall.py [--layouts 2x4 4x2] [--mib 8] [--link-mbit 400] [--bus-mbit free 1600 400]
                                   [--splits even skewed one-hot-node] [--implementations NAME ...] [--repeats 9]

All implementations take turns in one job and send the same rows with the same splits; the result of a first, untimed
exchange of each must equal that of flat. With `auto`, the ranks first measure the lines that it chooses by, and the
last line of a table has its time over that of the fastest other implementation. Times are from the first rank's start
to the last rank's end. `sequential` is p2p within nodes, followed by p2p between nodes: the baseline of ScheMoE's
Eq. 18. The limit is that of the flat traffic (traffic.py). CPU time is in cores: `own` for our ranks, `kernel` for
interrupts, which forward packets, and `foreign` for all other processes.
"""

import argparse
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import psutil
import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import AllToAll, Exchange, FlatAllToAll, NodeAllToAll, post
from megatron_balance.comm.pipelined import peers_in_order
from megatron_balance.comm.registry import ALL_TO_ALLS, AutoAllToAll, members_of
from megatron_balance.cost.exchange import DEFAULT
from megatron_balance.device import cpu
from megatron_balance.job.groups import new_node_groups
from megatron_balance.measure.measure import COUNTS, group_kinds, kinds_of
from megatron_balance.measure.operations import idle
from megatron_balance.measure.stopwatch import GroupBench, Stopwatch, node_groups
from megatron_balance.profile.cluster_profile import LEVELS, ClusterProfile, builtin, fit
from namespaces import TestbedUnavailable
from testbed import Testbed
from traffic import SPLITS, Limit, limit, split_rows

ROW_BYTES = 1024
MOST_CORES = 0.5
"""Maximum CPU use, in cores, of our own or of other processes; above it, the CPU limits the measurement."""

MEETING_SECONDS = 0.05

PROFILE_REPEATS = 5


class Case(NamedTuple):
    """Parameters of one table, except the links' rates, which the ranks do not need."""

    node_size: int
    splits: str
    mib: float
    implementations: tuple[str, ...]
    repeats: int

    def rows(self, num_ranks: int) -> np.ndarray:
        """Return the number of rows from each rank to each rank, [D, D]."""
        return split_rows(self.splits, num_ranks, self.node_size, round(self.mib * 2**20 / ROW_BYTES))


class Sample(NamedTuple):
    """Times of one exchange on one rank, in seconds."""

    start: float
    """Start and end are read from a clock that all ranks share."""
    end: float
    process: float
    """CPU time of this rank."""
    programs: float
    """CPU time of all programs on the machine."""
    kernel: float
    """CPU time of interrupts, which forward packets."""


class Row(NamedTuple):
    """Results of one implementation in one case, over all ranks."""

    seconds: list[float]
    own_cores: float
    kernel_cores: float
    foreign_cores: float

    @classmethod
    def of(cls, samples_by_rank: Sequence[Sequence[Sample]]) -> "Row":
        """Combine the ranks' samples of the same repeats."""
        repeats = list(zip(*samples_by_rank, strict=True))
        seconds = [max(one.end for one in ranks) - min(one.start for one in ranks) for ranks in repeats]
        ranks_cpu = sum(one.process for ranks in repeats for one in ranks)
        # Every rank sees the whole machine; use the first rank's numbers
        kernel = sum(ranks[0].kernel for ranks in repeats)
        foreign = sum(ranks[0].programs for ranks in repeats) - ranks_cpu
        return cls(seconds, ranks_cpu / sum(seconds), kernel / sum(seconds), max(0.0, foreign) / sum(seconds))

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def objection(self) -> str:
        """Reason to reject the row; empty if it is valid."""
        if self.own_cores > MOST_CORES:
            return "REJECTED: our own processes were busy"
        return "REJECTED: others were busy" if self.foreign_cores > MOST_CORES else ""


class SequentialAllToAll(NodeAllToAll):
    """p2p within nodes, followed by p2p between nodes: the baseline of ScheMoE's Eq. 18."""

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor) -> Exchange:
        rows, received = self._prepare(rows, splits_DD)
        rank = self.group.rank()
        sends = rows.split(splits_DD[rank].tolist())
        receives = received.split(splits_DD[:, rank].tolist())
        for peers in peers_in_order(rank, self.group.size(), self.nodes.node_size):
            for work in post(self.group, {one: receives[one] for one in peers}, {one: sends[one] for one in peers}):
                work.wait()
        receives[rank].copy_(sends[rank])
        return Exchange(lambda: received)


IMPLEMENTATIONS = {**ALL_TO_ALLS, "sequential": SequentialAllToAll}

DEFAULTS = [name for name in IMPLEMENTATIONS if name != "auto"]

SIZES = tuple(4**power << 14 for power in range(5))
"""Bytes of the messages that the lines of `auto` are fitted to: 16 KiB to 4 MiB."""


def measured_profile(group: dist.ProcessGroup, node_size: int) -> ClusterProfile:
    """Return a profile with measured messages and all-to-alls; everything else is the builtin one."""
    base = builtin(group.size(), node_size, 64, 64)
    kinds = group_kinds(group.size(), node_size)
    with node_groups(group, node_size) as nodes:
        bench = GroupBench(
            stopwatch=Stopwatch(group, torch.device("cpu"), PROFILE_REPEATS),
            groups=kinds_of(nodes),
            passes=lambda tokens: (idle, idle),
            dtype=torch.float32,
            node_size=node_size,
            all_to_alls={name: member for name, member in members_of(nodes).items() if name != DEFAULT},
        )
        links = {
            collective: {kind: fit(SIZES, bench.seconds(collective, members, SIZES)) for kind, members in kinds.items()}
            for collective in ("p2p", "all_to_all")
        }
        messages = {level: fit(COUNTS, bench.seconds("messages", kinds[level], COUNTS)) for level in LEVELS}
        lines = {name: fit(SIZES, bench.seconds(name, kinds["ep"], SIZES)) for name in bench.all_to_alls}
    return replace(base, links={**base.links, **links}, messages=messages, all_to_alls=lines)


def measure(case: Case) -> dict[str, list[Sample]]:
    """Run all implementations in turn, `case.repeats` times; the task of every rank."""
    cpu.keep_freed_memory()
    group = dist.group.WORLD
    assert group is not None
    splits_DD = torch.from_numpy(case.rows(group.size()))
    generator = torch.Generator().manual_seed(group.rank())
    rows = torch.randint(1 << 30, (int(splits_DD[group.rank()].sum()), ROW_BYTES // 4), generator=generator).int()
    nodes = new_node_groups(group, case.node_size)
    members: dict[str, AllToAll] = {}
    for name in case.implementations:
        found = IMPLEMENTATIONS[name]
        if found is AutoAllToAll:
            members[name] = AutoAllToAll(nodes, measured_profile(group, case.node_size))
        else:
            members[name] = found(nodes) if issubclass(found, NodeAllToAll) else found(group)
    runs = {name: lambda member=member: member.start(rows, splits_DD).wait() for name, member in members.items()}
    expected = FlatAllToAll(group).start(rows, splits_DD).wait()
    for name, run in runs.items():
        assert torch.equal(run(), expected), f"{name} returned other rows than flat"
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    names = list(runs)
    for repeat in range(case.repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            meet()
            samples[name].append(timed(runs[name]))
    return samples


def meet() -> None:
    """Wait for a common instant of the ranks' shared clock; they leave a barrier milliseconds apart."""
    dist.barrier()
    instant = torch.tensor([time.monotonic() + MEETING_SECONDS], dtype=torch.float64)
    dist.broadcast(instant, 0)
    time.sleep(max(0.0, float(instant) - time.monotonic()))


def timed(run: Callable[[], object]) -> Sample:
    machine = psutil.cpu_times()
    process = time.process_time()
    start = time.monotonic()
    run()
    end = time.monotonic()
    process = time.process_time() - process
    after = psutil.cpu_times()
    used = {field: getattr(after, field) - getattr(machine, field) for field in after._fields}
    programs = used["user"] + used["nice"] + used["system"] + used["steal"]
    return Sample(start, end, process, programs, used["irq"] + used["softirq"])


def table(rows: dict[str, Row], allowed: Limit) -> str:
    """Return one line per implementation, and the speedups of Eq. 18."""
    lines = [f"{'':12s} {'median ms':>9s} {'(min-max)':12s} /flat   /p2p    /limit    own kernel foreign"]
    for name, row in rows.items():
        spread = f"({1e3 * min(row.seconds):.0f}-{1e3 * max(row.seconds):.0f})"
        bases = [rows[base].median if base in rows else float("nan") for base in ("flat", "p2p")]
        ratios = " ".join(f"{row.median / base:7.3f}" for base in (*bases, allowed.seconds))
        cores = f"{row.own_cores:6.2f} {row.kernel_cores:6.2f} {row.foreign_cores:7.2f}"
        lines.append(f"{name:12s} {1e3 * row.median:9.1f} {spread:12s}{ratios} {cores}   {row.objection}".rstrip())
    for name in ("pipe", "p2p"):
        if name in rows and "sequential" in rows:
            ratio = rows["sequential"].median / rows[name].median
            lines.append(f"sequential / {name}: {ratio:.2f}; S_max (Eq. 18) {allowed.largest_speedup:.2f}")
    others = {name: row.median for name, row in rows.items() if name not in ("auto", "sequential")}
    if "auto" in rows and others:
        fastest = min(others, key=others.__getitem__)
        lines.append(f"auto / {fastest}: {rows['auto'].median / others[fastest]:.3f}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", type=layout, default=[(2, 4), (4, 2)], help="nodes x ranks per node")
    parser.add_argument("--mib", nargs="+", type=float, default=[8.0], help="MiB that each rank sends, itself included")
    parser.add_argument("--link-mbit", nargs="+", type=float, default=[400.0])
    parser.add_argument("--bus-mbit", nargs="+", type=bus, default=[None], help="within a node; free: not limited")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=["even"])
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=DEFAULTS)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args(argv)
    # This module cannot be preloaded: the fork server does not search for modules in a script's directory
    multiprocessing.set_forkserver_preload(["torch.distributed", "megatron_balance.comm.registry"])
    networks = itertools.product(args.layouts, args.link_mbit, args.bus_mbit)
    try:
        for (nodes, node_size), link_mbit, bus_mbit in networks:
            with Testbed(nodes, node_size, link_mbit, bus_mbit) as testbed:
                for mib, splits in itertools.product(args.mib, args.splits):
                    _report(testbed, Case(node_size, splits, mib, tuple(args.implementations), args.repeats))
    except ValueError as error:
        parser.error(str(error))
    except TestbedUnavailable as error:
        print(f"alltoall.py: {error}", file=sys.stderr)
        return 2
    return 0


def _report(testbed: Testbed, case: Case) -> None:
    bytes_DD = case.rows(testbed.world_size) * ROW_BYTES
    allowed = limit(bytes_DD, case.node_size, testbed.link_mbit, testbed.bus_mbit)
    inside = "free" if testbed.bus_mbit is None else f"{testbed.bus_mbit:g} Mbit/s ({1e3 * allowed.intra:.0f} ms)"
    print(
        f"\n{testbed.nodes}x{case.node_size}, {case.splits}, {case.mib:g} MiB per rank, "
        f"links {testbed.link_mbit:g} Mbit/s ({1e3 * allowed.inter:.0f} ms), bus {inside}, {case.repeats} repeats; "
        f"limit {1e3 * allowed.seconds:.1f} ms"
    )
    # A generous multiple of the time for all bytes over one link
    patience = 240 + 10 * (case.repeats + 2) * len(case.implementations) * (allowed.inter + allowed.intra)
    by_rank = testbed.run(measure, case, timeout=patience)
    rows = {name: Row.of([samples[name] for samples in by_rank]) for name in case.implementations}
    print(table(rows, allowed), flush=True)


def layout(text: str) -> tuple[int, int]:
    try:
        nodes, ranks_per_node = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: give nodes x ranks per node, such as 2x4") from None
    return nodes, ranks_per_node


def bus(text: str) -> float | None:
    return None if text == "free" else float(text)


if __name__ == "__main__":
    sys.exit(main())
