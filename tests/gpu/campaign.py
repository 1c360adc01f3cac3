"""Everything that one GPU can say about this package, in nine minutes, the most valuable first.

    tests/gpu_campaign.sh [DIRECTORY] [--cpu] [--only STEP ...]

Each step has its own time limit, and one that fails or hangs does not stop the others. After each step, its output and
its figures are in DIRECTORY/results.tar.gz, and its row in DIRECTORY/summary.txt. --cpu rehearses the steps without a
GPU, at small sizes. Exit status: 0 if all steps passed, 1 if one did not, 2 if this machine cannot run them.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

SECONDS = 540.0
"""Time limit of the whole campaign on a GPU; steps for which less than half of their own limit is left do not start."""

SLOWER = 5
"""How much more time steps get in a rehearsal: a CPU computes, and there may be two cores."""

SHUTDOWN_SECONDS = 3.0


class Step(NamedTuple):
    """A command with a time limit in seconds on a GPU."""

    name: str
    seconds: float
    command: Sequence[str]
    """`{logs}` stands for the directory of logs and figures."""
    small: Sequence[str] | None = ()
    """Further arguments in a rehearsal; None: the step needs a GPU."""


def python(*arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore", *arguments]


def tests(*arguments: str) -> list[str]:
    return python("-m", "pytest", "-p", "no:cacheprovider", *arguments)


def curves(ranks: int, seconds: float, name: str) -> Step:
    """Return the step that compares runs; it starts no run late, so that it can still say what it found."""
    own = ("--ranks", str(ranks), "--seconds", str(seconds - 30), "--output", f"{{logs}}/{name}.json")
    rehearsed = ("--seconds", str(SLOWER * (seconds - 30)))
    return Step(name, seconds, python("-m", "tests.gpu.curves", "compare", *own), rehearsed)


def bench(
    name: str, seconds: float, script: str, *arguments: str, small: Sequence[str], environment: Sequence[str] = ()
) -> Step:
    """Return the step that runs a bench and keeps its figures."""
    command = python(f"tools/bench/{script}.py", *arguments, "--output", f"{{logs}}/{name}.json")
    command = ["env", *environment, *command]
    return Step(name, seconds, command, small)


FIRST = (
    Step("gpu", 10, ["nvidia-smi"], None),
    Step("versions", 40, python("-m", "tests.gpu.versions"), ["--cpu"]),
)
"""Without these, no step says anything."""

GPU_TESTS = ("codecs", "hang_guard", "kernels", "stall", "trace")
"""Files of tests/unit with tests for GPUs, without test_experts.py, all of which has a step of its own."""

LANES = (
    (
        # Otherwise, each rank would compile the same loops
        Step("loops", 60, python("-c", "import tests.preload")),
        curves(4, 300, "four_ranks"),
    ),
    (
        Step("kernels", 120, tests("-n", "4", *(f"tests/unit/test_{name}.py" for name in ("experts", "rows")))),
        Step("gpu_tests", 120, tests("-n", "4", "-m", "gpu", *(f"tests/unit/test_{name}.py" for name in GPU_TESTS))),
        Step(
            "sanitized", 65, python("-m", "tests.gpu.sanitized", "--tools", "--output", "{logs}/sanitized.json"), None
        ),
    ),
    (
        curves(1, 140, "one_rank"),
        Step("one_gpu_tests", 110, tests("tests/distributed/test_one_gpu.py")),
    ),
)
"""Correctness does not depend on speed: on a GPU, these sequences run side by side."""

FEW_ROWS = ("--iterations", "2", "--tokens", "64", "128", "256", "512", "--seq-length", "64")
SMALL_RUN = (*FEW_ROWS, "--num-layers", "2", "--hidden-size", "64")
SMALL_MIXTRAL = (
    *(*FEW_ROWS, "--hidden-size", "128", "--num-attention-heads", "8", "--num-query-groups", "2"),
    *("--ffn-hidden-size", "64", "--moe-ffn-hidden-size", "256"),
)
CLUSTERS = ("--cluster", "configs/clusters/h100.yaml", "configs/clusters/h200.yaml")
PARTS = ("--parts", "time", "memory", "layer", "profile", "experts")

ALONE = (
    # Two microbatches, so that waits for each one differ from those for the iteration
    bench("one_gpu", 50, "one_gpu", "--global-batch-size", "8", small=SMALL_RUN),
    bench("overlap", 30, "gpu_overlap", small=["--cpu"]),
    bench("overlap_1", 30, "gpu_overlap", small=["--cpu"], environment=["CUDA_DEVICE_MAX_CONNECTIONS=1"]),
    bench("rates", 85, "gpu_rates", small=["--cpu"]),
    bench("mixtral", 70, "one_gpu", "--mixtral", *CLUSTERS, *PARTS, small=SMALL_MIXTRAL),
)
"""Times, so one after the other; the last ones take what time is left."""


class Campaign:
    """Runs steps and writes what becomes of them."""

    def __init__(self, output: Path, cpu: bool, only: Sequence[str], seconds: float) -> None:
        self.output = output
        self.cpu = cpu
        self.only = only
        self.seconds = seconds
        self.start = time.monotonic()
        self.failed = 0
        self._work = tempfile.TemporaryDirectory()
        self.logs = Path(self._work.name) / "logs"
        self.logs.mkdir()
        self._lock = threading.Lock()
        output.mkdir(parents=True, exist_ok=True)
        (output / "summary.txt").write_text("")
        # Steps share what they compile
        caches = {f"{name}_CACHE_DIR": f"{self._work.name}/{name}" for name in ("TRITON", "TORCHINDUCTOR")}
        unbuffered = {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        self.environment = {**os.environ, **caches, **unbuffered}

    def run(self, step: Step) -> bool:
        """Run a step; return whether it passed."""
        if self.only and step.name not in self.only:
            return True
        if self.cpu and step.small is None:
            return self._note(step, "needs a GPU", 0, failed=False)
        limit = step.seconds * (SLOWER if self.cpu else 1)
        # Most steps take half of their limit
        left = self.seconds - self.elapsed()
        if left < limit / 2:
            return self._note(step, "no time left", 0)
        words = [*step.command, *((step.small or ()) if self.cpu else ())]
        command = [word.replace("{logs}", str(self.logs)) for word in words]
        start = time.monotonic()
        status = self._wait(command, self.logs / f"{step.name}.txt", min(limit, left))
        return self._note(step, f"exit {status}", time.monotonic() - start, failed=status != 0)

    def _wait(self, command: Sequence[str], log: Path, limit: float) -> int:
        """Run a command; when its time is over, end it with all its processes."""
        with log.open("w") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            try:
                process = subprocess.Popen(command, cwd=ROOT, env=self.environment, start_new_session=True, **streams)
            except OSError as error:
                print(error, file=output)
                return 127
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(SHUTDOWN_SECONDS)
                # Children may outlive the process
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return 124

    def _note(self, step: Step, became: str, seconds: float, failed: bool = True) -> bool:
        with self._lock:
            row = f"{step.name:<14} {became:<12} {seconds:6.1f} s of {step.seconds:.0f}, at {self.elapsed():.0f}"
            print(row, flush=True)
            with (self.output / "summary.txt").open("a") as summary:
                print(row, file=summary)
            self.failed += failed
            packed = self.output / "results.part"
            with tarfile.open(packed, "w:gz") as archive:
                archive.add(self.logs, arcname="results")
            packed.rename(self.output / "results.tar.gz")
        return not failed

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def close(self) -> None:
        self._work.cleanup()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "output", type=Path, nargs="?", default=Path(f"runs/gpu_campaign_{time.strftime('%Y%m%d_%H%M%S')}")
    )
    parser.add_argument("--cpu", action="store_true", help="rehearse without a GPU")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="run these steps, and what they need")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit on a GPU (default: %(default)s)")
    args = parser.parse_args()
    seconds = args.seconds * (SLOWER if args.cpu else 1)
    needed = {step.name for step in FIRST}
    campaign = Campaign(args.output, args.cpu, [*args.only, *needed] if args.only else [], seconds)
    try:
        for step in FIRST:
            if not campaign.run(step):
                print("gpu_campaign.sh: this machine cannot run the steps; --cpu needs no GPU", file=sys.stderr)
                return 2
        lanes = [threading.Thread(target=lambda lane=lane: [campaign.run(step) for step in lane]) for lane in LANES]
        for thread in lanes:
            thread.start()
            if args.cpu:
                thread.join()
        for thread in lanes:
            thread.join()
        for step in ALONE:
            campaign.run(step)
        print((args.output / "summary.txt").read_text())
        return int(campaign.failed > 0)
    finally:
        campaign.close()


if __name__ == "__main__":
    sys.exit(main())
