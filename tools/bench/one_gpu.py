"""Measures training on one GPU: the experts' throughput, iteration times, and where the host waits for the device.

    python tools/bench/one_gpu.py [--iterations 10] [flags of the run ...]

Experts: the part of a cluster's profile (tools/profile_cluster.py) that needs only one rank, for the run's shape and
precision. Then, for our MoE layer and megatron-core's, the milliseconds of an iteration: wall time, CPU time of the
process, and time of kernels on the device; the device is idle for the difference of the first and the last. Finally,
the number of waits for the device in an iteration, by line. PyTorch reports waits of the backward pass at the line that
calls it, and does not report all kinds of waits (torch.cuda.set_sync_debug_mode). Without CUDA, times are the CPU's.
"""

import argparse
import functools
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ranks

if TYPE_CHECKING:
    from megatron_balance.cli.checks import Machine
    from megatron_balance.training.run import Run

IMPLEMENTATIONS = ("balanced", "megatron")
OURS = {"megatron_balance"}
PACKAGES = OURS | {"megatron"}

MODEL = (
    "--num-layers 4 --num-attention-heads 8 --hidden-size 1024 --seq-length 1024 --micro-batch-size 4 --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 2048 --swiglu --disable-bias-linear --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --lr 1e-4 --train-iters 1000 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 8000 --num-workers 0 --attention-dropout 0 --hidden-dropout 0 --bf16"
)
"""Later flags override these."""

TOKENS = (1024, 2048, 4096, 8192, 16384)
"""Numbers of rows for which experts are timed."""

REPEATS = 9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10, help="measured iterations of each layer")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=TOKENS, help="numbers of rows for which experts are timed"
    )
    ranks.add_worker_option(parser)
    args, extra = parser.parse_known_args()
    if args.worker:
        return ranks.work(args.worker, _measure)
    lines = {name: f"{MODEL} {' '.join(extra)} --moe-layer-impl {name}" for name in IMPLEMENTATIONS}
    print("\n".join(ranks.job(__file__, 1, {"flags": lines, "iterations": args.iterations, "tokens": args.tokens})))
    return 0


def _measure(task: ranks.Task, machine: "Machine") -> list[str]:
    runs = ranks.build(task["flags"], machine)
    found = [_experts(runs["balanced"], task["tokens"])]
    reports = ranks.take_turns(runs, task["iterations"], warmup=5)
    for name, run in runs.items():
        wall = statistics.median(report.seconds for report in reports[name])
        cpu, device = _cpu_seconds(run, task["iterations"]), _device_seconds(run) if machine.cuda else 0.0
        found.append(f"{name}: {1000 * wall:.2f} ms an iteration, {1000 * cpu:.2f} CPU, {1000 * device:.2f} kernels")
        waits = _waits(run) if machine.cuda else Counter()
        found.append(f"{name}: the host waits {waits.total()} times an iteration")
        found += [f"{count:6d}  {place}" for place, count in waits.most_common()]
    return found


def _experts(run: "Run", tokens: list[int]) -> str:
    import torch
    import torch.distributed as dist

    from megatron_balance.flow.experts import GroupedExperts
    from megatron_balance.measure.measure import throughput
    from megatron_balance.measure.probes import expert_passes
    from megatron_balance.measure.stopwatch import GroupBench, Stopwatch

    shape = run.config.transformer
    experts = GroupedExperts(range(shape.num_moe_experts), shape, run.groups)
    stopwatch = Stopwatch(dist.group.WORLD, experts.linear_fc1.weight.device, REPEATS)
    bench = GroupBench(
        stopwatch=stopwatch,
        groups={},
        passes=functools.partial(expert_passes, experts),
        dtype=shape.params_dtype,
        node_size=1,
    )
    forward, backward = (throughput(tokens, seconds) for seconds in bench.compute(tokens))
    flops = 2 * sum(weight[0].numel() for weight in (experts.linear_fc1.weight, experts.linear_fc2.weight))
    teraflops = [flops / max(one.seconds_per_token, 1e-12) / 1e12 for one in (forward, backward)]
    torch.cuda.empty_cache()
    return (
        f"experts: {1e6 * forward.seconds_per_token:.4f} us per row forward ({teraflops[0]:.1f} TFLOP/s), "
        f"{1e6 * backward.seconds_per_token:.4f} backward ({2 * teraflops[1]:.1f} TFLOP/s)"
    )


def _cpu_seconds(run: "Run", iterations: int) -> float:
    """Return the CPU seconds of an iteration in all threads; waiting for the device may use CPU time as well."""
    from megatron_balance.training.loop import train_step

    start = time.process_time()
    for _ in range(iterations):
        train_step(run)
    return (time.process_time() - start) / iterations


def _device_seconds(run: "Run") -> float:
    from torch.profiler import ProfilerActivity, profile

    from megatron_balance.training.loop import train_step

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        train_step(run)
    return sum(kernel.self_device_time_total for kernel in profiled.key_averages()) / 1e6


def _waits(run: "Run") -> Counter[str]:
    """Count the host's waits in one iteration, by the lines of megatron-core and of this package."""
    import torch

    from megatron_balance.training.loop import train_step

    with _warnings() as places:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train_step(run)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return places


@contextmanager
def _warnings() -> Iterator[Counter[str]]:
    """Count the warnings about synchronizing operations, by their origin."""
    places: Counter[str] = Counter()

    def note(message: Warning | str, *_: Any) -> None:
        if "synchronizing" in str(message):
            places[_place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield places


def _place() -> str:
    """Return the innermost line and this package's: `token_dispatcher.py:876 (preprocess) < layer.py:132 (forward)`."""
    frames = [(Path(frame.filename), frame) for frame in reversed(traceback.extract_stack())]
    within = [(path.parts[:-1], f"{path.name}:{frame.lineno} ({frame.name})") for path, frame in frames]
    found = (next((place for parts, place in within if wanted & set(parts)), "") for wanted in (PACKAGES, OURS))
    return " < ".join(dict.fromkeys(filter(None, found))) or "elsewhere"


if __name__ == "__main__":
    sys.exit(main())
