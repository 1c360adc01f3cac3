"""Measures iterations of a training run with each all-to-all, or each codec, on a slow network (testbed.py).

    python tools/bench/exchange_time.py [--nodes 2] [--ranks-per-node 2] [--link-mbit 400] [--variants "FLAGS" ...]
                                        [flags of the run ...]

Without flags, the run is that of scripts/quickstart.sh, which must have built its corpus; flags are added to it. A
variant is a set of additional flags. The models of all variants are in the same processes and take turns, one iteration
each. For each variant this prints the ratio of its median iteration to the first variant's, the megabytes that a node's
link carries in an iteration (including gradients of non-expert parameters), and whether the losses and gradient norms
of all iterations equal the first variant's, bit for bit. All ranks compute on this machine's cores, so the ratio is
smaller than on devices that compute faster.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

import ranks
from namespaces import TestbedUnavailable
from testbed import Testbed

if TYPE_CHECKING:
    from megatron_balance.training.run import Run

QUICKSTART = "--yaml-cfg configs/quickstart.yaml"

VARIANTS = [f"--moe-comm-alltoall {name}" for name in ("flat", "p2p", "1dh", "2dh", "pipe")]


@dataclass(frozen=True)
class Outcome:
    """Results of one variant on one rank."""

    seconds: list[float]
    """Seconds of every measured iteration."""

    learned: list[tuple[float | None, float]]
    """(lm loss, gradient norm) of every measured iteration."""

    link_bytes: int
    """Bytes that this rank's node sends to others in one more iteration."""


def measure(flags: dict[str, str], iterations: int) -> tuple[dict[str, Outcome], float]:
    """Measure all variants and return their results and the CPU seconds; the task of every rank."""
    from megatron_balance.device import cpu, quiet

    quiet.silence_expected_warnings()
    cpu.install()
    import torch.distributed as dist

    from megatron_balance.cli.checks import Machine

    runs = ranks.build(flags, Machine.here(dist.get_world_size()))
    reports = ranks.take_turns(runs, iterations)
    outcomes = {
        name: Outcome(
            [report.seconds for report in steps],
            [(report.losses.get("lm loss"), report.grad_norm) for report in steps],
            _sent_in_one(runs[name]),
        )
        for name, steps in reports.items()
    }
    return outcomes, time.process_time()


def _sent_in_one(run: "Run") -> int:
    """Return the bytes that leave this rank's node in one iteration, as counted by its network interface."""
    import torch.distributed as dist

    from megatron_balance.training.loop import train_step

    dist.barrier()
    before = psutil.net_io_counters(pernic=True)["eth0"].bytes_sent
    train_step(run)
    dist.barrier()
    return psutil.net_io_counters(pernic=True)["eth0"].bytes_sent - before


def lines(by_rank: Sequence[dict[str, Outcome]], link_mbit: float) -> list[str]:
    """Return one row per variant; the time of an iteration is that of its slowest rank."""
    seconds = {
        name: [max(times) for times in zip(*(outcomes[name].seconds for outcomes in by_rank), strict=True)]
        for name in by_rank[0]
    }
    baseline = next(iter(seconds))
    rows = [f"{'ratio':>6} {'ms (10%-90%)':>20} {'MB/link':>8} {'ms/link':>8}  same bits  variant"]
    for name, times in seconds.items():
        ratio = statistics.median(times) / statistics.median(seconds[baseline])
        low, *_, high = statistics.quantiles(times, n=10)
        sent = max(outcomes[name].link_bytes for outcomes in by_rank)
        same = all(outcomes[name].learned == outcomes[baseline].learned for outcomes in by_rank)
        spread = f"{1e3 * statistics.median(times):.0f} ({1e3 * low:.0f}-{1e3 * high:.0f})"
        transfer = 1e3 * sent * 8 / (link_mbit * 1e6)
        rows.append(f"{ratio:6.3f} {spread:>20} {sent / 1e6:8.2f} {transfer:8.0f}  {'yes' if same else 'no':9}  {name}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--link-mbit", type=float, nargs="+", default=[400.0])
    parser.add_argument(
        "--variants", nargs="+", default=VARIANTS, help="flags of each variant, as one word; the first is the baseline"
    )
    parser.add_argument("--iterations", type=int, default=20, help="measured iterations per variant")
    parser.add_argument("--repeats", type=int, default=3, help="jobs")
    args, extra = parser.parse_known_args()
    world_size = args.nodes * args.ranks_per_node
    common = [QUICKSTART, "--expert-model-parallel-size", str(world_size), *extra]
    common += ["--moe-comm-node-size", str(args.ranks_per_node)]
    flags = {variant: " ".join([*common, variant]) for variant in args.variants}
    multiprocessing.set_forkserver_preload(["torch.distributed"])
    try:
        for link_mbit in args.link_mbit:
            with Testbed(args.nodes, args.ranks_per_node, link_mbit) as testbed, ranks.noise() as elsewhere:
                for _ in range(args.repeats):
                    patience = 120 + 20.0 * (args.iterations + ranks.WARMUP) * len(flags)
                    by_rank, cpu_seconds = zip(
                        *testbed.run(measure, flags, args.iterations, timeout=patience), strict=True
                    )
                    elsewhere += cpu_seconds
                    print(f"\n{args.nodes}x{args.ranks_per_node}, links of {link_mbit:g} Mbit/s")
                    print("\n".join(lines(by_rank, link_mbit)), flush=True)
    except TestbedUnavailable as error:
        print(f"exchange_time.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
