"""Evaluation of policy_time.py's measurements: rows of Markdown tables."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import slow_runs

if TYPE_CHECKING:
    from megatron_balance.training.progress import StepReport

NONE = "none"
CEILING = "even routing"

SMALLEST_GAP = 0.02
"""Minimum fraction of an iteration that even routing saves; below it, noise would be divided by noise."""

WIDTH = 33


class Sample(NamedTuple):
    """One iteration of one variant; all fields but the first are sums over layers and means over ranks."""

    seconds: float
    plan_seconds: float = 0.0
    trans_bytes: float = 0.0
    agg_bytes: float = 0.0
    """Bytes moved over all links."""
    experts_moved: float = 0.0
    """Number of experts that moved to another owner."""

    @classmethod
    def of(cls, report: "StepReport") -> "Sample":
        return cls(report.seconds, *slow_runs.sums_over_layers(report, cls._fields[1:]))


Job = Mapping[str, Sequence[Sample]]
"""The measured iterations of every variant. In the same iteration, all jobs of a workload have the same routing."""


def joined(by_rank: Sequence[Job]) -> dict[str, list[Sample]]:
    """Combine all ranks' measurements of one job."""
    return {name: slow_runs.slowest(job[name] for job in by_rank) for name in by_rank[0]}


def iteration_seconds(jobs: Sequence[Job], name: str) -> float:
    """Return a variant's iteration time: the mean over iterations, whose loads differ, of medians over noisy jobs."""
    by_iteration = zip(*(job[name] for job in jobs), strict=True)
    return statistics.fmean(statistics.median(sample.seconds for sample in samples) for samples in by_iteration)


def ratio(jobs: Sequence[Job], name: str) -> float:
    """Return a variant's iteration time over that without a policy."""
    return iteration_seconds(jobs, name) / iteration_seconds(jobs, NONE)


def closed(jobs: Sequence[Job], name: str) -> float | None:
    """Return a variant's saving as a fraction of that of even routing; None if the latter is too small."""
    gap = 1 - ratio(jobs, CEILING)
    return (1 - ratio(jobs, name)) / gap if gap >= SMALLEST_GAP else None


def heads(names: Sequence[str]) -> list[str]:
    """Return the two header lines of the table; `names` are the compared variants."""
    return _heads(["workload", f"{NONE}, ms", f"{CEILING}, ms", *names])


def row(workload: str, jobs: Sequence[Job], names: Sequence[str]) -> str:
    """Return a row; cells have the ratio to none (lowest and highest job), the closed part of the gap, and bytes."""
    times = [f"{1e3 * iteration_seconds(jobs, name):.0f}" for name in (NONE, CEILING)]
    return _line([workload, *times, *(_cell(jobs, name) for name in names)])


def plan_heads(names: Sequence[str]) -> list[str]:
    """Return the two header lines of the table of planning times."""
    return _heads(["planning, of an iteration", *names])


def plan_row(workload: str, jobs: Sequence[Job], names: Sequence[str]) -> str:
    """Return a row of planning times; its cells have the mean over all iterations, and the maximum."""
    return _line([workload, *(_plan_cell(list(_plan_shares(jobs, name))) for name in names)])


def _cell(jobs: Sequence[Job], name: str) -> str:
    by_job = [ratio([job], name) for job in jobs]
    share = closed(jobs, name)
    samples = [sample for job in jobs for sample in job[name]]
    moved = statistics.fmean(sample.trans_bytes + sample.agg_bytes for sample in samples) / 1e6
    experts = statistics.fmean(sample.experts_moved for sample in samples)
    parts = [
        f"{ratio(jobs, name):.3f} ({min(by_job):.3f}-{max(by_job):.3f})",
        "-" if share is None else f"{share:.0%}",
        f"{moved:.1f} MB",
        *([f"{experts:.1f} moved"] if experts else []),
    ]
    return ", ".join(parts)


def _plan_shares(jobs: Sequence[Job], name: str) -> Iterator[float]:
    return (sample.plan_seconds / sample.seconds for job in jobs for sample in job[name])


def _plan_cell(shares: Sequence[float]) -> str:
    return f"{statistics.fmean(shares):.1%} ({max(shares):.1%})"


def _heads(cells: Sequence[str]) -> list[str]:
    return [_line(cells), "|---" * len(cells) + "|"]


def _line(cells: Sequence[str]) -> str:
    first, *rest = cells
    return " ".join([f"| {first:<18}", *(f"| {cell:<{WIDTH}}" for cell in rest), "|"])
