"""What policy_time.py makes of what its ranks measured: rows of Markdown tables."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import slow_runs

if TYPE_CHECKING:
    from megatron_balance.training.progress import StepReport

NONE, CEILING = "none", "even routing"

SMALLEST_GAP = 0.02
"""Share of an iteration that balancing could win at most; where it is less, noise would be divided by noise."""

WIDTH = 33


class Sample(NamedTuple):
    """One iteration of one variant; all but the first sums over layers, means over ranks."""

    seconds: float
    plan_seconds: float = 0.0
    trans_bytes: float = 0.0
    agg_bytes: float = 0.0
    """Moved, over all links."""
    experts_moved: float = 0.0
    """To another owner."""

    @classmethod
    def of(cls, report: "StepReport") -> "Sample":
        return cls(report.seconds, *slow_runs.sums_over_layers(report, cls._fields[1:]))


Job = Mapping[str, Sequence[Sample]]
"""The measured iterations of every variant. All jobs of a workload route alike in the same iteration."""


def joined(by_rank: Sequence[Job]) -> dict[str, list[Sample]]:
    """One job, of what all ranks measured."""
    return {name: slow_runs.slowest(job[name] for job in by_rank) for name in by_rank[0]}


def iteration_seconds(jobs: Sequence[Job], name: str) -> float:
    """A variant's iterations: the mean, because loads change, over medians of jobs, because noise comes and goes."""
    by_iteration = zip(*(job[name] for job in jobs), strict=True)
    return statistics.fmean(statistics.median(sample.seconds for sample in samples) for samples in by_iteration)


def ratio(jobs: Sequence[Job], name: str) -> float:
    """A variant's iterations over those without a policy."""
    return iteration_seconds(jobs, name) / iteration_seconds(jobs, NONE)


def closed(jobs: Sequence[Job], name: str) -> float | None:
    """How much a variant wins of what even routing would; None where that is next to nothing."""
    gap = 1 - ratio(jobs, CEILING)
    return (1 - ratio(jobs, name)) / gap if gap >= SMALLEST_GAP else None


def heads(names: Sequence[str]) -> list[str]:
    """The two lines above the rows; `names` are the variants that are judged."""
    return _heads(["workload", f"{NONE}, ms", f"{CEILING}, ms", *names])


def row(workload: str, jobs: Sequence[Job], names: Sequence[str]) -> str:
    """A variant's cell: ratio to none (lowest and highest job), share of the gap closed, what moves in an iteration."""
    times = [f"{1e3 * iteration_seconds(jobs, name):.0f}" for name in (NONE, CEILING)]
    return _line([workload, *times, *(_cell(jobs, name) for name in names)])


def plan_heads(names: Sequence[str]) -> list[str]:
    """The two lines above the rows of planning times."""
    return _heads(["planning, of an iteration", *names])


def plan_row(workload: str, jobs: Sequence[Job], names: Sequence[str]) -> str:
    """A variant's cell: the mean over all iterations, and the longest."""
    return _line([workload, *(_plan_cell(list(_plan_shares(jobs, name))) for name in names)])


def _cell(jobs: Sequence[Job], name: str) -> str:
    by_job, share = [ratio([job], name) for job in jobs], closed(jobs, name)
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
