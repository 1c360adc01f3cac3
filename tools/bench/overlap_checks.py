"""What overlap_time.py makes of what its ranks measured: a table, and checks that can fail."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import slow_runs

if TYPE_CHECKING:
    from megatron_balance.training.progress import StepReport

NONE, PLANNER, SCHEDULER, FULL, MUTANT = "none", "planner", "planner+scheduler", "full", "full, waits at issue"

TRANS_SHARE = (0.10, 0.30)
"""Of an iteration of `planner`: less proves little, more cannot be hidden."""

HIDDEN_SHARE = 0.80
"""Of Trans and Agg, at least."""

ESTIMATE_ERROR = 0.05
"""How far the run's own estimate of T_FNEC may be from the emulated attention."""


class Sample(NamedTuple):
    """One iteration of one variant; all but the first sums over layers, means over ranks."""

    seconds: float
    plan_wait_seconds: float = 0.0
    trans_wait_seconds: float = 0.0
    agg_wait_seconds: float = 0.0
    """What Plan, Trans and Agg kept the rank waiting."""
    trans_bytes: float = 0.0
    agg_bytes: float = 0.0
    """Moved, over all links."""

    @classmethod
    def of(cls, report: "StepReport") -> "Sample":
        return cls(report.seconds, *slow_runs.sums_over_layers(report, cls._fields[1:]))

    @property
    def moved(self) -> float:
        return self.trans_bytes + self.agg_bytes

    @property
    def exposed_per_byte(self) -> float:
        """Seconds of Trans and Agg for each byte; not a number where nothing moved."""
        return (self.trans_wait_seconds + self.agg_wait_seconds) / self.moved if self.moved else float("nan")


@dataclass(frozen=True)
class Outcome:
    """One variant in one job."""

    samples: list[Sample]

    attention_seconds: float
    """Emulated, of one layer and microbatch, forward."""

    estimated_seconds: float | None
    """The same as the planner estimates it, T_FNEC; None where it hides nothing."""

    @property
    def median(self) -> Sample:
        return Sample(*map(statistics.median, zip(*self.samples, strict=True)))


Job = Mapping[str, Outcome]
"""By variant."""


def slowest(by_rank: Sequence[Job]) -> dict[str, Outcome]:
    """One job, of what all ranks measured."""
    return {
        name: replace(outcome, samples=slow_runs.slowest(outcomes[name].samples for outcomes in by_rank))
        for name, outcome in by_rank[0].items()
    }


def over_jobs(jobs: Sequence[Job], name: str, value: Callable[[Sample], float]) -> list[float]:
    """A number of a variant's median iteration, of each job."""
    return [value(job[name].median) for job in jobs]


def ratios(jobs: Sequence[Job], name: str, value: Callable[[Sample], float], baseline: str) -> list[float]:
    """The same over another variant's, of each job; not a number where that one has nothing."""
    pairs = zip(over_jobs(jobs, name, value), over_jobs(jobs, baseline, value), strict=True)
    return [own / other if other else float("nan") for own, other in pairs]


def lines(jobs: Sequence[Job]) -> list[str]:
    """A row per variant: medians over jobs; the ratios of all jobs in brackets, 10% to 90% of all iterations."""
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
    """The median; not a number if any of them is none."""
    return float(np.median(values))


class Check(NamedTuple):
    passed: bool
    text: str
    """What is claimed, and the numbers."""

    def __str__(self) -> str:
        return f"{'PASS' if self.passed else 'FAIL'}  {self.text}"


def checks(jobs: Sequence[Job]) -> Iterator[Check]:
    """The claims about those variants that ran; a number that is none, because nothing moved, fails."""
    names = jobs[0].keys()
    for name in [name for name in (SCHEDULER, FULL, MUTANT) if {name, PLANNER} <= names]:
        shares = [1 - ratio for ratio in ratios(jobs, name, lambda one: one.exposed_per_byte, PLANNER)]
        share, wanted = _middle(shares), "below" if name == MUTANT else "at least"
        passed = share < HIDDEN_SHARE if name == MUTANT else share >= HIDDEN_SHARE
        text = f"hidden of Trans and Agg, by byte against {PLANNER}: {_with_jobs(shares, '{:.1%}')}"
        yield Check(passed, f"{name}: {text}, {wanted} {HIDDEN_SHARE:.0%}")
    if {SCHEDULER, PLANNER} <= names:
        # With equal placements: what is hidden must not come back as a slower exchange or computation
        waited = over_jobs(jobs, PLANNER, lambda one: one.trans_wait_seconds + one.agg_wait_seconds)
        times = [over_jobs(jobs, name, lambda one: one.seconds) for name in (PLANNER, SCHEDULER)]
        shares = [
            (slow - fast) / wait if wait else float("nan") for slow, fast, wait in zip(*times, waited, strict=True)
        ]
        text = f"{SCHEDULER}: iterations shorter by what {PLANNER} waited for: {_with_jobs(shares, '{:.1%}')}"
        yield Check(_middle(shares) >= HIDDEN_SHARE, f"{text}, at least {HIDDEN_SHARE:.0%}")
    for faster, slower in ((FULL, PLANNER), (PLANNER, NONE)):
        if {faster, slower} <= names:
            values = ratios(jobs, faster, lambda one: one.seconds, slower)
            text = f"{faster} <= {slower}: iteration time {_with_jobs(values, '{:.3f}')}"
            yield Check(_middle(values) <= 1, text)
    if FULL in names:
        outcome = jobs[0][FULL]
        estimate, emulated = outcome.estimated_seconds or float("nan"), outcome.attention_seconds
        text = f"{FULL}: T_FNEC {1e3 * estimate:.2f} ms, emulated {1e3 * emulated:.2f} ms"
        yield Check(abs(estimate / emulated - 1) <= ESTIMATE_ERROR, text)


def trans_share(jobs: Sequence[Job]) -> str:
    """Whether there is something to hide."""
    shares = over_jobs(jobs, PLANNER, lambda one: one.trans_wait_seconds / one.seconds)
    low, high = TRANS_SHARE
    verdict = "as intended" if low <= _middle(shares) <= high else "OUTSIDE: other --link-mbit or --gflops"
    return f"Trans takes {_with_jobs(shares, '{:.1%}')} of an iteration of {PLANNER}; {low:.0%}-{high:.0%} {verdict}"
