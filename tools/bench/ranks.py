"""Shared parts of the benchmarks: jobs of ranks, models that take turns, and the load of the machine."""

import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_balance.cli.checks import Machine
    from megatron_balance.training.run import Run

WARMUP = 10
"""Number of iterations before measuring: routing varies, and the allocator must see all sizes of tensors."""

Task = dict[str, Any]
"""Parameters of a job, passed as JSON."""


def work(worker: str, measure: Callable[[Task, "Machine"], Any]) -> int:
    """Run one rank of a job: join it, measure, and write rank 0's result."""
    from megatron_balance.device import cpu, quiet

    quiet.silence_expected_warnings()
    cpu.install()
    import torch.distributed as dist

    from megatron_balance.cli.checks import Machine
    from megatron_balance.job import job

    task = json.loads(worker)
    launch = job.Launch.from_environment()
    machine = Machine.here(launch.world_size)
    job.start(launch, "nccl" if machine.cuda else "gloo", 10)
    result = measure(task, machine)
    if launch.rank == 0:
        Path(task["output"]).write_text(json.dumps(result))
    dist.destroy_process_group()
    return 0


def build(flags: Mapping[str, str], machine: "Machine") -> "dict[str, Run]":
    """Build a run for each command line, by name, all in this process; they must have the same layout."""
    from megatron_balance.build.run import build_run
    from megatron_balance.cli.arguments import parse_args
    from megatron_balance.job.layout import destroy_groups

    configs = {name: parse_args(line.split(), machine)[0] for name, line in flags.items()}
    runs = {}
    for name, config in configs.items():
        destroy_groups()
        # The groups of the last run remain, because parts of megatron-core read them during training
        runs[name] = build_run(config)
    return runs


def take_turns(
    runs: "Mapping[str, Run]",
    iterations: int,
    warmup: int = WARMUP,
    order: Callable[[int], Sequence[str]] | None = None,
    step: "Callable[[Run], Any] | None" = None,
) -> dict[str, list[Any]]:
    """Train the runs in turn, so that other load on the machine affects all of them equally.

    Args:
        step: runs one iteration and returns its report; by default, it trains and returns a StepReport.
        order: returns the names of the runs that train one iteration each in a turn, given its number; by default all
            of them, in alternating order.
    """
    import torch.distributed as dist

    from megatron_balance.training.loop import train_step

    reports: dict[str, list[Any]] = {name: [] for name in runs}
    names = list(runs)
    step = step or train_step
    order = order or (lambda turn: names if turn % 2 else names[::-1])
    for iteration in range(warmup + iterations):
        for name in order(iteration):
            dist.barrier()
            report = step(runs[name])
            if iteration >= warmup:
                reports[name].append(report)
    return reports


@contextmanager
def noise() -> Iterator[list[float]]:
    """Print the load of the machine: load averages, and the CPU time of our jobs and of all other processes.

    Yields a list to which the caller adds the CPU seconds of jobs that are not children of this process.
    """
    load, start, (busy, total), own = os.getloadavg()[0], time.perf_counter(), _cpu_time(), _own_time()
    elsewhere: list[float] = []
    yield elsewhere
    wall, (busy_after, total_after) = time.perf_counter() - start, _cpu_time()
    used = (busy_after - busy) / max(total_after - total, 1)
    ours = (_own_time() - own + sum(elsewhere)) / (wall * (os.cpu_count() or 1))
    print(
        f"machine: {os.cpu_count()} CPUs, load average {load:.2f} before and {os.getloadavg()[0]:.2f} after; "
        f"CPU time used by this bench {ours:.0%}, by others {max(0.0, used - ours):.0%}; {wall:.0f} s",
        flush=True,
    )


def _cpu_time() -> tuple[int, int]:
    """Return the busy ticks and all ticks of the CPUs since the machine started."""
    user, nice, system, idle, waiting, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    busy = user + nice + system + sum(rest)
    return busy, busy + idle + waiting


def _own_time() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
