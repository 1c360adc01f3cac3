"""Small training runs on the device, watched by the checker, as tasks for ranks."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from megatron.core.transformer.moe import fused_a2a

from megatron_balance.training.loop import queue_step
from megatron_balance.training.optimizer_state import optimizers
from megatron_balance.training.progress import Reports
from megatron_balance.training.run import Run
from tests.distributed import runs
from tests.distributed.runs import Curve
from tests.hostcuda.checker import Checker, Place


class Watched(NamedTuple):
    """What one rank observes in a run."""

    curve: Curve
    acted: float
    """Hosts added and experts moved."""
    complaints: list[str]
    """Races, and memory that was freed in use."""
    synchronizations: Counter[tuple[str, Place]]
    """Host waits of the last iteration, without the one for its report."""
    work: Counter[tuple[str, Place]]
    """What the host queued in the last iteration; see `checker.WORK`."""
    streams: set[str]
    """Streams on which kernels ran."""


@contextmanager
def watching() -> Iterator[Checker]:
    """Switch on the checker of this process's device, and yield it."""
    from tests.hostcuda.torch_cuda import CHECKER

    CHECKER.clear()
    CHECKER.on = True
    try:
        yield CHECKER
    finally:
        CHECKER.on = False


def watched(flags: str, iterations: int, mutate: Callable[[Run], None] | None = None) -> Watched:
    """Build a run on this rank and train it as the loop does, with reports about balance in all iterations.

    Args:
        mutate: changes the built run before it trains.
    """
    # Of the groups of an earlier run
    fused_a2a.reset_hybrid_ep_buffer()
    with watching() as checker:
        run = runs.build(flags)
        if mutate is not None:
            mutate(run)
        reports = []
        unfinished = Reports(run.balancer, run.config.transformer.num_layers)
        for _ in range(iterations):
            checker.synchronizations.clear()
            checker.work.clear()
            reports += unfinished.add(queue_step(run))
        waits = Counter(checker.synchronizations)
        work = Counter(checker.work)
        reports += unfinished.wait()
        streams = {checker.names.get(stream, "of the program") for stream in checker.kernels}
        complaints = checker.complaints()
    acted = sum(layer.hosts_added + layer.experts_moved for report in reports for layer in report.balance.values())
    return Watched(runs.curve_of(reports), acted, complaints, waits, work, streams)


SAME_KERNELS = "--no-bias-swiglu-fusion --no-bias-dropout-fusion"
"""Flags that switch off fusions, which a CPU lacks and which change megatron-core's results."""


def without_fused_adam(run: Run) -> None:
    """Make a run on CPUs update weights by the device's operations; torch's fused Adam for CPUs rounds differently."""
    for part in optimizers(run.optimizer):
        for group in part.optimizer.param_groups:
            group["fused"] = False
