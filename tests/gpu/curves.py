"""Losses and gradient norms of runs on a GPU, against those of a CPU, and against those of repeated and disturbed runs.

    python -m tests.gpu.curves references                        # on a CPU: writes references.json
    python -m tests.gpu.curves compare --ranks 4 --output FILE   # on a GPU

`compare` trains each case of cases.py with this number of ranks: as it is; again, with posts that are late at random;
and with CUDA_LAUNCH_BLOCKING=1, where nothing overlaps. All must have the same bits and, within the case's tolerance,
the CPU's curve. It also makes two mistakes in how streams wait, which must change the bits. It prints a row per case,
and writes all curves to FILE after each. Exit status: 0 if everything holds and nothing was left out.
"""

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu.cases import CASES, MISTAKEN, Case
from tests.gpu.ranks import GpuRanks
from tests.harness import RankFailure

REFERENCES = Path(__file__).with_name("references.json")

MISTAKES = ("no wait", "wrong event")
"""Disturbances that must change a run which sends weights while it computes."""

CASE_SECONDS = 75.0
"""Time limit of a run."""


class Outcome(NamedTuple):
    """What one rank observes in a run."""

    curve: list[tuple[float, float]]
    """(lm loss, gradient norm) of every iteration."""
    acted: float
    """Hosts added and experts moved."""
    seconds: float


def trained(case: Case, profile: str, disturbances: Sequence[str]) -> list[Outcome]:
    """Train on this rank, once for each name in `disturbed.DISTURBANCES`, from the same beginning."""
    from megatron_balance.job.layout import destroy_groups
    from tests.distributed import runs
    from tests.gpu.disturbed import DISTURBANCES
    from tests.harness import forget_auxiliary_losses

    outcomes = []
    flags = f"{case.flags} --balance-profile {profile}" if case.balanced else case.flags
    for disturbance in disturbances:
        start = time.perf_counter()
        with DISTURBANCES[disturbance]():
            reports = runs.train(flags, case.iterations)
        acted = sum(layer.hosts_added + layer.experts_moved for report in reports for layer in report.balance.values())
        outcomes.append(Outcome(runs.curve_of(reports), acted, time.perf_counter() - start))
        # The next run has groups of its own
        destroy_groups()
        forget_auxiliary_losses()
    return outcomes


@contextlib.contextmanager
def pool(world_size: int, backend: str, **environment: str) -> Iterator[GpuRanks]:
    ranks = GpuRanks(world_size, backend, environment)
    try:
        yield ranks
    finally:
        ranks.stop()


def run(ranks: GpuRanks, case: Case, profiles: Path, disturbances: Sequence[str]) -> list[Outcome | str]:
    """Return rank 0's outcome of each run, or the reason why there is none."""
    seconds = CASE_SECONDS * len(disturbances)
    try:
        by_rank = ranks.run(trained, case, str(profile_of(case, profiles)), disturbances, timeout=seconds)
    except RankFailure as failure:
        return [str(failure)] * len(disturbances)
    return [_agreed(case, outcomes) for outcomes in zip(*by_rank, strict=True)]


def _agreed(case: Case, outcomes: Sequence[Outcome]) -> Outcome | str:
    if any(outcome.curve != outcomes[0].curve for outcome in outcomes):
        return f"ranks differ: {[outcome.curve[-1] for outcome in outcomes]}"
    if case.balanced != any(outcome.acted for outcome in outcomes):
        return f"the policy acted {[outcome.acted for outcome in outcomes]} times"
    return outcomes[0]


def profile_of(case: Case, directory: Path) -> Path:
    """Write the profile for a case's policy, and return its path."""
    from tests.distributed.runs import fast_links

    path = directory / f"{len(list(directory.iterdir()))}.json"
    known = {"--expert-model-parallel-size": 2, "--moe-comm-node-size": None}
    words = case.flags.split()
    # Later flags override
    known |= {flag: int(value) for flag, value in itertools.pairwise(words) if flag in known}
    fast_links(*known.values()).save(path)
    return path


def references() -> int:
    """Train every case on this machine's CPU, and write the curves."""
    found = {}
    for world_size in sorted({case.world_size for case in CASES.values()}):
        with pool(world_size, "gloo") as ranks, tempfile.TemporaryDirectory() as directory:
            for name, case in CASES.items():
                if case.world_size == world_size:
                    (outcome,) = run(ranks, case, Path(directory), ["first"])
                    if isinstance(outcome, str):
                        raise SystemExit(f"{name}: {outcome}")
                    found[name] = {"flags": case.flags, "curve": outcome.curve}
                    print(f"{outcome.seconds:6.1f} s  {name}", flush=True)
    lines = (f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    REFERENCES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return 0


class Comparison(NamedTuple):
    """A case's outcomes, by run; a text instead of an outcome says why there is none."""

    case: Case
    expected: list[list[float]]
    runs: dict[str, Outcome | str]

    def faults(self) -> list[str]:
        """Return what is wrong, in words."""
        # A mistake may also make ranks differ or fail
        broken = {name: text for name, text in self.runs.items() if isinstance(text, str) and name not in MISTAKES}
        failed = [f"{name}: {text}" for name, text in broken.items()]
        curves = {name: outcome.curve for name, outcome in self.runs.items() if not isinstance(outcome, str)}
        first = curves.get("first")
        if first is None:
            return failed
        for name, curve in curves.items():
            if (curve == first) == (name in MISTAKES):
                failed.append(f"{name}: not noticed" if name in MISTAKES else f"{name}: other bits than the first run")
        if self.deviation > self.case.tolerance:
            failed.append(f"{self.deviation:.1e} from the CPU's curve (at most {self.case.tolerance:.0e})")
        return failed

    @property
    def deviation(self) -> float:
        """The largest relative difference of the first run from the CPU's; infinite if it failed."""
        from tests.distributed.runs import deviation

        first = self.runs["first"]
        return float("inf") if isinstance(first, str) else deviation(first.curve, self.expected)


def compare(ranks: int, only: Sequence[str], seconds: float, output: Path | None) -> int:
    """Compare all cases with this number of ranks, or `only` these, and start no run after `seconds`."""
    import torch

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    deadline = time.monotonic() + seconds
    expected = json.loads(REFERENCES.read_text())
    cases = {name: case for name, case in CASES.items() if name in (only or CASES) and case.world_size == ranks}
    for name, case in cases.items():
        if expected.get(name, {}).get("flags") != case.flags:
            raise SystemExit(f"{name}: references.json has other flags; python -m tests.gpu.curves references")
    found = {name: Comparison(case, expected[name]["curve"], {}) for name, case in cases.items()}
    left: list[str] = []

    def compare_in(ranks: GpuRanks, name: str, wanted: Sequence[str]) -> None:
        if time.monotonic() > deadline:
            left.append(f"{name} ({', '.join(wanted)})")
            return
        outcomes = run(ranks, cases[name], Path(directory), wanted)
        found[name].runs.update(zip(wanted, outcomes, strict=True))
        times = (f"{one.seconds:.1f}" if isinstance(one, Outcome) else "failed" for one in outcomes)
        print(f"{', '.join(times)} s  {', '.join(wanted)}: {name}", flush=True)
        if output is not None:
            output.write_text(json.dumps(_record(found), indent=1))

    # One after the other: ranks that wait at each launch, and for time slices, are slow beside others
    with tempfile.TemporaryDirectory() as directory:
        with pool(ranks, backend) as plain:
            for name in cases:
                compare_in(plain, name, ["first", "late"])
                # A CPU has no streams
                if name == MISTAKEN and torch.cuda.is_available():
                    compare_in(plain, name, MISTAKES)
        with pool(ranks, backend, CUDA_LAUNCH_BLOCKING="1") as blocking:
            for name in cases:
                compare_in(blocking, name, ["blocking"])

    print(f"\n{'from the CPU':>12}  {'acted':>5}  {'s':>5}  case")
    for name, one in found.items():
        first = one.runs.get("first")
        if isinstance(first, Outcome):
            print(f"{one.deviation:12.1e}  {first.acted:5.0f}  {first.seconds:5.1f}  {name}")
    faults = [f"{name}: {fault}" for name, one in found.items() if one.runs for fault in one.faults()]
    faults += [f"{name}: not run, {seconds:.0f} s are over" for name in left]
    print("\n".join(["", *faults]) if faults else "\nall equal")
    return int(bool(faults))


def _record(found: dict[str, Comparison]) -> dict[str, Any]:
    return {
        name: {
            run_name: outcome if isinstance(outcome, str) else outcome._asdict()
            for run_name, outcome in one.runs.items()
        }
        for name, one in found.items()
        if one.runs
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("references", "compare"))
    parser.add_argument("--ranks", type=int, default=4, choices=sorted({case.world_size for case in CASES.values()}))
    parser.add_argument("--seconds", type=float, default=600.0, help="start no run later (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file for all curves")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="these cases (default: all)")
    args = parser.parse_args()
    if args.action == "references":
        return references()
    return compare(args.ranks, args.only, args.seconds, args.output)


if __name__ == "__main__":
    sys.exit(main())
