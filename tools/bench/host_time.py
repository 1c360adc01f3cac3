"""Measures the host's time in an MoE layer, ours and megatron-core's: what keeps a GPU waiting, counted without one.

    python tools/bench/host_time.py [--sizes 8x64 64x256] [--iterations 30] [--repeats 3] [flags ...]

One process is rank 0 of an expert-parallel group of any size, on the simulated CUDA device of tests/hostcuda. The other
ranks do not exist: an all-gather returns a drawn load matrix, an all-to-all returns rows of zeros of the right number.
Three runs take turns, one iteration each: megatron-core's layer with its all-to-all dispatcher, ours without a policy,
and ours with `--balance-policy quota` (guests on most ranks, proportional split). Our runs get any other flags, too.
Popularities of experts are Zipf's. Each iteration has one microbatch and, with the policy, a new placement.

A time is CPU time of the thread that runs the layer, less its time inside kernels: from the moment when torch's
dispatcher has found the device's kernel until that returns. Allocations, collectives and waits count as kernels in this
sense; views and operations on host tensors do not. What remains is Python, torch's bindings, autograd, the dispatcher,
and views. Not measured: launching a kernel, the time inside NCCL, waiting, and anything that the device does.

    to rows     from the launch of the all-gather of counts to the launch of the first exchange of rows
    from wait   from the host's first wait after that all-gather to the same launch: the device may have nothing to do
    forward     the layer's forward pass, hooks included
    no experts  the same without the calls of the experts; without Transformer Engine, megatron-core computes one after
                the other, so that its forward and backward passes take longer here than with grouped experts
    backward    from the gradient of the layer's output to that of its input
    iteration   all of the main thread, with loss, optimizer and balancer; the backward pass has its own thread

Every number is a median over iterations and jobs, with the quartiles; ratios are those of medians over megatron-core's.
In brackets: the ratio if each kernel and collective queued in the interval took 5 us more, as it might on a GPU.
Counts are those of one microbatch: waits; kernels, without views; launches of collectives and batches of messages;
messages; KiB copied on the device by copy and cat; KiB between host and device.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron_balance.profile.cluster_profile import ClusterProfile
    from megatron_balance.training.run import Run
    from tests.hostcuda.checker import Checker
    from tests.hostcuda.host_clock import Mark, Reading

ROOT = Path(__file__).parents[2]

RUNS = {
    "megatron": "--moe-layer-impl megatron",
    "ours": "",
    "ours, quota": "--balance-policy quota --balance-overlap blockwise --balance-profile {profile}",
}
"""Name -> flags; the first one is the baseline."""

SHAPE = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --seq-length 512 --micro-batch-size 1 --bf16 --swiglu "
    "--disable-bias-linear --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 "
    "--lr 1e-9 --train-iters 10000 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 "
    "--attention-dropout 0 --hidden-dropout 0 --moe-comm-node-size 8"
)
"""Small tensors, whose kernels leave the caches to the program."""

TOPK = {64: 2, 256: 8}
"""Experts per token, by the number of experts; 2 for other numbers."""

ZIPF = 0.7
"""The n-th most popular expert has a weight of n to the power of minus this."""

LAUNCH_US = 5.0
"""Host time to queue a kernel on a GPU: the usual order of magnitude, not measured here."""

NODE = 8
WIDTH = 34
WARMUP = 5
INTERVALS = ("to rows", "from wait", "forward", "no experts", "backward", "iteration")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["8x64", "64x256"], help="ranks x experts of a group")
    parser.add_argument("--iterations", type=int, default=30, help="measured iterations of each run")
    parser.add_argument("--repeats", type=int, default=3, help="jobs of each size")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.worker:
        return _work(json.loads(args.worker))
    for size in args.sizes:
        ranks, experts = map(int, size.split("x"))
        task = {"ranks": ranks, "experts": experts, "iterations": args.iterations, "flags": flags}
        jobs = [_job(task) for _ in range(args.repeats)]
        print(f"\nEP{ranks}, {experts} experts, {TOPK.get(experts, 2)} per token\n{_table(jobs)}", flush=True)
    return 0


def _table(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Format the times in microseconds over the baseline's, and the counts."""
    head = f"{'run':12s}" + "".join(f"{name + ', us':>{WIDTH}s}" for name in INTERVALS)
    baseline, *_ = RUNS
    medians = {}
    lines = [head]
    for run in RUNS:
        cells = []
        for interval in INTERVALS:
            values, queued = zip(*(one for job in jobs for one in job["times"][run][interval]), strict=True)
            low, median, high = statistics.quantiles(values, n=4)
            own = medians[run, interval] = median, median + LAUNCH_US * statistics.median(queued)
            plain, charged = (mine / other for mine, other in zip(own, medians[baseline, interval], strict=True))
            cells.append(f"{median:.0f} ({low:.0f}-{high:.0f}) {plain:5.2f} [{charged:.2f}]".rjust(WIDTH))
        lines.append(f"{run:12s}" + "".join(cells))
    columns = list(jobs[0]["counts"][baseline])
    lines += ["", f"{'run':12s}" + "".join(f"{column:>22s}" for column in columns)]
    lines += [f"{run:12s}" + "".join(f"{jobs[0]['counts'][run][name]:>22s}" for name in columns) for run in RUNS]
    return "\n".join([*lines, *(f"{run}: {jobs[0]['placements'][run]}" for run in jobs[0]["placements"])])


def _job(task: Mapping[str, Any]) -> Any:
    """Measure in a process that loads the device before torch."""
    sys.path.insert(0, str(ROOT))
    from tests.hostcuda.library import library

    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "result.json"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "LD_PRELOAD": str(library())}
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
        environment |= {"PYTHONPATH": path, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
        worker = json.dumps({**task, "output": str(output)})
        result = subprocess.run(
            [sys.executable, __file__, "--worker", worker], env=environment, capture_output=True, text=True
        )
        if result.returncode:
            raise SystemExit(f"the job failed:\n{result.stderr[-10000:]}")
        return json.loads(output.read_text())


def _work(task: Mapping[str, Any]) -> int:
    import importlib

    importlib.import_module("tests.hostcuda.preload")
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    import torch
    import torch.distributed as dist

    import ranks
    from megatron_balance.cli.checks import Machine

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=task["ranks"], store=dist.HashStore())  # pyright: ignore[reportPrivateImportUsage]
    experts = task["experts"]
    shape = f"{SHAPE} --num-experts {experts} --moe-router-topk {TOPK.get(experts, 2)}"
    layout = f"--expert-model-parallel-size {task['ranks']} --global-batch-size {task['ranks']}"
    profile = Path(task["output"]).with_name("profile.json")
    _slow_experts(task["ranks"]).save(profile)
    more = {name: "" if "megatron" in name else " ".join(task["flags"]) for name in RUNS}
    flags = {name: f"{shape} {layout} {own.format(profile=profile)} {more[name]}" for name, own in RUNS.items()}
    runs = {name: Watched(run, experts) for name, run in ranks.build(flags, Machine.here(task["ranks"])).items()}
    times = {name: {interval: [] for interval in INTERVALS} for name in RUNS}
    for iteration in range(WARMUP + task["iterations"]):
        for name in list(RUNS) if iteration % 2 else [*RUNS][::-1]:
            found = runs[name].time()
            if iteration >= WARMUP:
                for interval, us in found.items():
                    times[name][interval].append(us)
    counts = {name: run.count() for name, run in runs.items()}
    placements = {name: placement for name, run in runs.items() if (placement := run.placement())}
    Path(task["output"]).write_text(json.dumps({"times": times, "counts": counts, "placements": placements}))
    return 0


def _slow_experts(num_ranks: int) -> "ClusterProfile":
    """Return the profile of a cluster whose experts compute so slowly that guests always pay."""
    import dataclasses

    from megatron_balance.profile.cluster_profile import Throughput, builtin

    profile = builtin(num_ranks, min(num_ranks, NODE), 64, 64)
    slow = Throughput(1e-3, 0.0, 0.0, 0.0)
    return dataclasses.replace(profile, forward=slow, backward=slow)


class Watched:
    """A run whose MoE layer is watched."""

    def __init__(self, run: "Run", num_experts: int) -> None:
        import numpy as np
        import torch
        from megatron.core.transformer.moe.moe_layer import MoELayer

        self.run = run
        self.layer: Any = next(module for module in run.model[0].modules() if isinstance(module, MoELayer))
        self.generator = np.random.default_rng(0)
        popularity_E = (1.0 + self.generator.permutation(num_experts)) ** -ZIPF
        bias_E = torch.tensor(np.log(popularity_E), dtype=torch.float32, device="cuda")
        gating = self.layer.router.gating
        self.layer.router.gating = lambda tokens: gating(tokens) + bias_E
        self.layer.router.register_forward_hook(self._answer)
        self.layer.experts.register_forward_pre_hook(lambda *_: self.experts.append(self.now()))
        self.layer.experts.register_forward_hook(lambda *_: self.experts.append(self.now()))
        self.layer.register_forward_pre_hook(lambda _, inputs: self._note("forward begins", inputs[0], "backward ends"))
        self.layer.register_forward_hook(
            lambda _, __, outputs: self._note("forward ends", outputs[0], "backward begins")
        )
        self.now: Callable[[], Any] = lambda: None
        """Returns the value to keep of the present moment."""
        self.ends: dict[str, Any] = {}
        """The kept values, by moment."""
        self.experts: list[Any] = []
        """The values kept at the beginning and the end of each call of the experts."""
        self.answered = False

    def _answer(self, router: Any, inputs: Any, output: tuple["torch.Tensor", "torch.Tensor"]) -> None:
        """Draw the counts of the other ranks once, each rank's from the same popularity."""
        import numpy as np

        from tests.hostcuda.torch_cuda import answer_gather

        if self.answered:
            return
        self.answered = True
        own_E = output[1].sum(0).cpu().numpy()
        shares_E = (own_E + 0.1) / (own_E + 0.1).sum()
        others = self.run.groups.ep.size() - 1
        counts_DE = self.generator.multinomial(int(own_E.sum()), shares_E, others).astype(np.int64)
        answer_gather(counts_DE.tobytes(), own_E.nbytes)

    def _note(self, moment: str, tensor: "torch.Tensor", of_gradient: str) -> None:
        """Keep the value of this moment, and of the moment when the tensor's gradient arrives."""

        def arrived(_: "torch.Tensor") -> None:
            self.ends[of_gradient] = self.now()

        self.ends[moment] = self.now()
        tensor.register_hook(arrived)

    def time(self) -> dict[str, tuple[float, int]]:
        """Return the microseconds of each interval in one iteration, and the kernels and collectives queued in it."""
        from megatron_balance.training.loop import train_step
        from tests.hostcuda.host_clock import HostClock
        from tests.hostcuda.torch_cuda import report_to

        clock = HostClock()
        report_to(clock)
        self.now = lambda: (clock.read(), len(clock.marks))
        self.experts.clear()
        start = clock.read()
        train_step(self.run)
        whole = clock.read().since(start)
        (begin, first) = self.ends["forward begins"]
        (end, last) = self.ends["forward ends"]
        (begin_back, _) = self.ends["backward begins"]
        (end_back, _) = self.ends["backward ends"]
        rest = end.since(begin)
        for (called, _), (returned, _) in zip(self.experts[::2], self.experts[1::2], strict=True):
            rest = rest.since(returned.since(called))
        values = (
            *_before_dispatch(clock.marks[first:last]),
            *(end.since(begin), rest, end_back.since(begin_back), whole),
        )
        return {name: (since.ns / 1e3, since.queued) for name, since in zip(INTERVALS, values, strict=True)}

    def count(self) -> dict[str, str]:
        """Return the counts of a forward and a backward pass, as text."""
        from megatron_balance.training.loop import train_step
        from tests.hostcuda.checker import Checker
        from tests.hostcuda.torch_cuda import report_to

        checker = Checker()
        report_to(checker)
        checker.on = True
        self.now = lambda: _totals(checker)
        train_step(self.run)
        checker.on = False
        passes = [("forward begins", "forward ends"), ("backward begins", "backward ends")]
        names = list(_totals(checker))
        found = [{name: self.ends[end][name] - self.ends[begin][name] for name in names} for begin, end in passes]
        return {name: " + ".join(f"{one[name]:.0f}" for one in found) for name in names}

    def placement(self) -> str:
        """Describe the placement in force, or return an empty text."""
        if self.run.balancer is None:
            return ""
        placement = self.layer.placement
        guests = [sum(rank != hosts[0] for rank in hosts) for hosts in placement.hosts]
        ranks = {rank for hosts in placement.hosts for rank in hosts[1:]}
        return f"{sum(guests)} guests on {len(ranks)} of {placement.num_ranks} ranks"


def _before_dispatch(marks: "Sequence[Mark]") -> "tuple[Reading, Reading]":
    """Return the time from the all-gather of counts, and from the wait after it, to the exchange of rows."""
    gather = next(i for i, mark in enumerate(marks) if mark.what.startswith("_allgather_base"))
    wait = next(mark for mark in marks[gather:] if mark.what == "wait")
    # Rows and combine weights are exchanged in some order, and rows are larger; of messages, take the first
    exchanges = [mark for mark in marks[gather:] if mark.what.startswith("alltoall_base")][:2]
    messages = (mark for mark in marks[gather:] if mark.what in ("send", "recv_"))
    rows = max(exchanges, key=lambda mark: mark.bytes) if exchanges else next(messages)
    return rows.at.since(marks[gather].at), rows.at.since(wait.at)


def _totals(checker: "Checker") -> dict[str, float]:
    """Return how often the host waited, and all work by kind."""
    from tests.hostcuda.checker import WORK

    found = {"waits": float(checker.synchronizations.total())}
    for kind in WORK:
        found[kind] = float(sum(number for (one, _), number in checker.work.items() if one == kind))
    return {
        name.replace("bytes", "KiB"): number / 1024 if name.endswith("bytes") else number
        for name, number in found.items()
    }


if __name__ == "__main__":
    sys.exit(main())
