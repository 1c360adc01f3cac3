"""Evaluation of overlap_time.py's measurements: a table, and checks that can fail."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import slow_runs

if TYPE_CHECKING:
    from megatron_balance.training.progress import StepReport

NONE = "none"
PLANNER = "planner"
SCHEDULER = "planner+scheduler"
FULL = "full"
MUTANT = "full, waits at issue"

TRANS_SHARE = (0.10, 0.30)
"""Range of Trans as a fraction of an iteration that does not hide it: less proves little, more cannot be overlapped."""

HIDDEN_SHARE = 0.80
"""Minimum fraction of Trans and Agg that must be overlapped."""

ESTIMATE_ERROR = 0.05
"""Maximum relative error of the run's estimate of T_FNEC, compared with the emulated attention."""


class Sample(NamedTuple):
    """One iteration of one variant; all fields but the first are sums over layers and means over ranks."""

    seconds: float
    plan_wait_seconds: float = 0.0
    trans_wait_seconds: float = 0.0
    agg_wait_seconds: float = 0.0
    """Seconds that the rank waited for Plan, Trans and Agg."""
    trans_bytes: float = 0.0
    agg_bytes: float = 0.0
    """Bytes moved over all links."""

    @classmethod
    def of(cls, report: "StepReport") -> "Sample":
        return cls(report.seconds, *slow_runs.sums_over_layers(report, cls._fields[1:]))

    @property
    def moved(self) -> float:
        return self.trans_bytes + self.agg_bytes

    @property
    def exposed_per_byte(self) -> float:
        """Seconds waited for Trans and Agg per byte; NaN if nothing was moved."""
        return (self.trans_wait_seconds + self.agg_wait_seconds) / self.moved if self.moved else float("nan")


@dataclass(frozen=True)
class Outcome:
    """Results of one variant in one job."""

    samples: list[Sample]

    attention_seconds: float
    """Emulated forward time of one layer's attention for a microbatch."""

    estimated_seconds: float | None
    """The planner's estimate of this time, T_FNEC; None without overlap."""

    @property
    def median(self) -> Sample:
        return Sample(*map(statistics.median, zip(*self.samples, strict=True)))


Job = Mapping[str, Outcome]
"""Results by variant."""


def slowest(by_rank: Sequence[Job]) -> dict[str, Outcome]:
    """Combine all ranks' measurements of one job."""
    return {
        name: replace(outcome, samples=slow_runs.slowest(outcomes[name].samples for outcomes in by_rank))
        for name, outcome in by_rank[0].items()
    }


def over_jobs(jobs: Sequence[Job], name: str, value: Callable[[Sample], float]) -> list[float]:
    """Return a number of a variant's median iteration for each job."""
    return [value(job[name].median) for job in jobs]


def ratios(jobs: Sequence[Job], name: str, value: Callable[[Sample], float], baseline: str) -> list[float]:
    """Return the ratio of this number to another variant's for each job; NaN if the other is zero."""
    pairs = zip(over_jobs(jobs, name, value), over_jobs(jobs, baseline, value), strict=True)
    return [own / other if other else float("nan") for own, other in pairs]


def lines(jobs: Sequence[Job]) -> list[str]:
    """Return one row per variant: medians over jobs, ratios of all jobs in brackets, 10% to 90% of all iterations."""
    head = f"{'ratio to none (jobs)':>{8 + 7 * len(jobs)}} {'ms (10%-90%)':>20}"
    rows = [f"{head} | {'exposed ms: plan':>16} {'trans':>7} {'agg':>7} | {'MB':>6}  variant"]
    for name in jobs[0]:
        ratio = "" if NONE not in jobs[0] else _with_jobs(ratios(jobs, name, lambda one: one.seconds, NONE), "{:.3f}")
        every = [sample.seconds for job in jobs for sample in job[name].samples]
        low, *_, high = (1e3 * value for value in statistics.quantiles(every, n=10))
        middle = 1e3 * statistics.median(over_jobs(jobs, name, lambda one: one.seconds))
        plan, trans, agg, moved = (
            statistics.median(over_jobs(jobs, name, value))
            for value in (
                lambda one: 1e3 * one.plan_wait_seconds,
                lambda one: 1e3 * one.trans_wait_seconds,
                lambda one: 1e3 * one.agg_wait_seconds,
                lambda one: one.moved / 1e6,
            )
        )
        spread = f"{middle:.0f} ({low:.0f}-{high:.0f})"
        rows.append(
            f"{ratio:>{8 + 7 * len(jobs)}} {spread:>20} | {plan:16.1f} {trans:7.1f} {agg:7.1f} | {moved:6.1f}  {name}"
        )
    return rows


def _with_jobs(values: Sequence[float], form: str) -> str:
    return f"{form.format(_middle(values))} ({', '.join(map(form.format, values))})"


def _middle(values: Sequence[float]) -> float:
    """Return the median; NaN if any value is NaN."""
    return float(np.median(values))


class Check(NamedTuple):
    passed: bool
    text: str
    """The claim and its numbers."""

    def __str__(self) -> str:
        return f"{'PASS' if self.passed else 'FAIL'}  {self.text}"


def checks(jobs: Sequence[Job]) -> Iterator[Check]:
    """Yield the checks for the variants that ran; NaN, because nothing was moved, fails."""
    names = jobs[0].keys()
    for name in [name for name in (SCHEDULER, FULL) if {name, MUTANT} <= names]:
        shares = [1 - ratio for ratio in ratios(jobs, name, lambda one: one.exposed_per_byte, MUTANT)]
        text = f"{name}: hidden of Trans and Agg, by byte against {MUTANT}: {_with_jobs(shares, '{:.1%}')}"
        yield Check(_middle(shares) >= HIDDEN_SHARE, f"{text}, at least {HIDDEN_SHARE:.0%}")
    if {FULL, MUTANT} <= names:
        # Placements are equal, so overlapped operations must not make exchanges or computation slower
        waited = over_jobs(jobs, MUTANT, lambda one: one.trans_wait_seconds + one.agg_wait_seconds)
        times = [over_jobs(jobs, name, lambda one: one.seconds) for name in (MUTANT, FULL)]
        shares = [
            (slow - fast) / wait if wait else float("nan") for slow, fast, wait in zip(*times, waited, strict=True)
        ]
        text = f"{FULL}: iterations shorter by what {MUTANT} waited for: {_with_jobs(shares, '{:.1%}')}"
        yield Check(_middle(shares) >= HIDDEN_SHARE, f"{text}, at least {HIDDEN_SHARE:.0%}")
    for faster, slower in ((FULL, PLANNER), (PLANNER, NONE)):
        if {faster, slower} <= names:
            values = ratios(jobs, faster, lambda one: one.seconds, slower)
            text = f"{faster} <= {slower}: iteration time {_with_jobs(values, '{:.3f}')}"
            yield Check(_middle(values) <= 1, text)
    if FULL in names:
        outcome = jobs[0][FULL]
        estimate = outcome.estimated_seconds or float("nan")
        emulated = outcome.attention_seconds
        text = f"{FULL}: T_FNEC {1e3 * estimate:.2f} ms, emulated {1e3 * emulated:.2f} ms"
        yield Check(abs(estimate / emulated - 1) <= ESTIMATE_ERROR, text)


def trans_share(jobs: Sequence[Job]) -> str:
    """Describe the fraction of an iteration that Trans takes, and whether it is in the intended range."""
    shares = over_jobs(jobs, MUTANT, lambda one: one.trans_wait_seconds / one.seconds)
    low, high = TRANS_SHARE
    verdict = "as intended" if low <= _middle(shares) <= high else "OUTSIDE: other --link-mbit or --gflops"
    return f"Trans takes {_with_jobs(shares, '{:.1%}')} of an iteration of {MUTANT}; {low:.0%}-{high:.0%} {verdict}"
