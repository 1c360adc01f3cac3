"""Shared parts of the benchmarks: models that take turns."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_balance.cli.checks import Machine
    from megatron_balance.training.run import Run


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
    runs: "Mapping[str, Run]", iterations: int, warmup: int, step: "Callable[[Run], Any] | None" = None
) -> dict[str, list[Any]]:
    """Train the runs in turn and alternating order, so that other load on the machine affects all of them equally.

    Args:
        warmup: iterations before measuring, in which the allocator sees all sizes of tensors.
        step: runs one iteration and returns its report; by default, it trains and returns a StepReport.
    """
    import torch.distributed as dist

    from megatron_balance.training.loop import train_step

    reports: dict[str, list[Any]] = {name: [] for name in runs}
    names = list(runs)
    step = step or train_step
    for iteration in range(warmup + iterations):
        for name in names if iteration % 2 else names[::-1]:
            dist.barrier()
            report = step(runs[name])
            if iteration >= warmup:
                reports[name].append(report)
    return reports
