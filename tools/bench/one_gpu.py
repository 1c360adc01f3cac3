"""Measures training on one GPU: our MoE layer and megatron-core's, where the host waits, and what the device does.

    python tools/bench/one_gpu.py [--iterations 10] [--output FILE.json] [flags of the run ...]
    python tools/bench/one_gpu.py --mixtral --cluster configs/clusters/h100.yaml [--output FILE.json]

Two runs that differ only in the layer are in one process and take turns, one iteration each:

time      milliseconds of an iteration, on the device's clock, and CPU time of the process; medians and quartiles, and
          of ratios those of pairs. Waiting for the device may use CPU time as well.
memory    what each run alone keeps on the device between iterations, and its peak in an iteration.
profile   some iterations under torch.profiler: the host's waits (calls of CUDA that return when the device is done),
          kernel launches, kernels, how long the device is busy; the same for parts of an iteration. The profiler slows
          the host down, but both runs equally. `host busy` is the time of an iteration in which the host does not wait.
layer     the same MoE layer alone, forward and backward.
experts   the part of a cluster's profile (tools/profile_cluster.py) that needs only one rank.
predicted with --cluster, the time that tools/simulate.py predicts for ours. It simulates no job of one rank, so this is
          a job of four, without exchange and reduction; the optimizer's step is extrapolated from 1/4 and 1/2 of the
          experts.

`--mixtral` is one layer of Mixtral-8x7B, whose two runs take about 70 GB. Without Transformer Engine, megatron-core
computes one expert after the other. Without CUDA, times are the CPU's, and nothing is said of the device.
"""

import argparse
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import device_trace
import ranks
from device_trace import Trace

if TYPE_CHECKING:
    import torch

    from megatron_balance.cli.checks import Machine
    from megatron_balance.training.run import Run

ROOT = Path(__file__).parents[2]
OURS, THEIRS = IMPLEMENTATIONS = ("balanced", "megatron")

MODEL = (
    "--num-layers 4 --num-attention-heads 8 --hidden-size 1024 --seq-length 1024 --micro-batch-size 4 --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 2048 --swiglu --disable-bias-linear --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --lr 1e-4 --train-iters 1000 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 8000 --num-workers 0 --attention-dropout 0 --hidden-dropout 0 --bf16"
)
"""Later flags override these."""

MIXTRAL = f"@{ROOT / 'configs/models/mixtral_8x7b.args'} --num-layers 1 --micro-batch-size 1 --vocab-size 8000"

TOKENS = (1024, 2048, 4096, 8192, 16384)
"""Numbers of rows for which experts are timed."""

REPEATS = 9
WARMUP = 5
PROFILED = 3
"""Iterations under the profiler."""

ITERATION = "one iteration"
LAYER = "MoE layer"
SPANS = (LAYER, "experts", "optimizer")
"""Parts of an iteration with numbers of their own; megatron-core's layer does not mark its experts."""

PARTS = ("time", "memory", "profile", "layer", "experts")

Result = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10, help="measured iterations of each layer")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="time experts for these numbers of rows")
    parser.add_argument("--mixtral", action="store_true", help="a layer of Mixtral-8x7B instead of a small model")
    parser.add_argument("--cluster", type=Path, nargs="+", default=[], metavar="FILE", help="predict for these, too")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure, in this order")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write all numbers as JSON, as they come")
    args, extra = parser.parse_known_args()
    # Both before torch is imported: one thread, as in a job, and no launcher of another job
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    warnings.simplefilter("ignore")
    flags = f"{MODEL} {MIXTRAL if args.mixtral else ''} {' '.join(extra)}"
    lines = {name: f"{flags} --moe-layer-impl {name}" for name in IMPLEMENTATIONS}
    with tempfile.TemporaryDirectory() as directory:
        # These simulate while this process measures
        started = {cluster.stem: _simulation(cluster, flags, Path(directory)) for cluster in args.cluster}
        result = _measure(lines, args)
        result["predicted"] = {name: _predicted(process, Path(directory) / name) for name, process in started.items()}
    for name, found in result["predicted"].items():
        print(_compared(name, found, result))
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if result["failed"] else 0


def _measure(lines: Mapping[str, str], args: argparse.Namespace) -> Result:
    """Measure all parts of the runs with these flags; print each when it is there, and write it, because a time limit
    may end the process."""
    from megatron_balance.device import cpu, quiet

    quiet.silence_expected_warnings()
    cpu.install()
    import torch

    from megatron_balance.cli.checks import Machine
    from megatron_balance.job import job

    launch = job.Launch.from_environment()
    machine = Machine.here(launch.world_size)
    job.start(launch, "nccl" if machine.cuda else "gloo", 10)
    begin = time.monotonic()
    name = torch.cuda.get_device_name() if machine.cuda else "CPU"
    facts = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "time": time.ctime()}
    result: Result = {"flags": lines, "machine": facts, "failed": []}
    print("{device}, torch {torch}".format(**result["machine"]), flush=True)
    runs = {}
    kept = {}
    for name, flags in lines.items():
        before = torch.cuda.memory_allocated() if machine.cuda else 0
        runs |= ranks.build({name: flags}, machine)
        # Adam's state exists after the first step
        _timed_step(runs[name])
        kept[name] = (torch.cuda.memory_allocated() if machine.cuda else 0) - before
    shape = result["shape"] = _shape(runs[OURS])
    print("{layers} MoE layers, {microbatches} microbatches of {tokens} tokens".format(**shape), flush=True)
    parts: dict[str, Callable[[], tuple[Any, Iterable[str]]]] = {
        "time": lambda: _time(runs, args.iterations),
        "memory": lambda: _memory(runs, kept, machine),
        "profile": lambda: _profiles(runs, machine, shape),
        "layer": lambda: _layer(runs, args.iterations),
        "experts": lambda: _experts(runs[OURS], args.tokens),
    }
    for part in args.parts:
        try:
            result[part], texts = parts[part]()
        except Exception:
            # The remaining parts may still be measured: time on a GPU is short
            result["failed"].append(part)
            result[part] = None
            texts = [f"{part}: failed\n{traceback.format_exc()}"]
        if args.output is not None:
            args.output.write_text(json.dumps(result, indent=1))
        print(*texts, f"[{part}: {time.monotonic() - begin:.1f} s]", sep="\n", flush=True)
    if not machine.cuda:
        print("not measured without CUDA: waits, launches, kernels, copies, gaps, memory")
    torch.distributed.destroy_process_group()
    return result


def _time(runs: "Mapping[str, Run]", iterations: int) -> tuple[Result, list[str]]:
    steps = ranks.take_turns(runs, iterations, WARMUP, step=_timed_step)
    found = {part: _statistics({name: [one[part] for one in steps[name]] for name in runs}) for part in ("wall", "cpu")}
    return found, [_times(f"iteration, {part}", one) for part, one in found.items()]


def _memory(runs: "Mapping[str, Run]", kept: Mapping[str, int], machine: "Machine") -> tuple[Result | None, list[str]]:
    import torch

    if not machine.cuda:
        return None, []
    found = {}
    for name, run in runs.items():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _timed_step(run)
        above = torch.cuda.max_memory_allocated() - before
        found[name] = {"kept_gib": kept[name] / 2**30, "peak_gib": (kept[name] + above) / 2**30}
    line = "{}: {kept_gib:.2f} GiB kept, {peak_gib:.2f} GiB at most"
    return found, [line.format(name, **one) for name, one in found.items()]


def _profiles(runs: "Mapping[str, Run]", machine: "Machine", shape: Result) -> tuple[Result, list[str]]:
    found = {name: _profile(run, machine, shape) for name, run in runs.items()}
    lines = [line for name, one in found.items() for line in _profile_lines(name, one, machine)]
    ours, theirs = found.values()
    pairs = {"": (ours, theirs)}
    shared = [span for span in ours["spans"] if span in theirs["spans"]]
    pairs |= {f"{span}: ": (ours["spans"][span], theirs["spans"][span]) for span in shared}
    ratios = {
        f"{part}{name}": one[key] / other[key]
        for part, (one, other) in pairs.items()
        for name, key in (("host busy", "host_busy_ms"), ("kernels", "kernel_ms"))
        if other[key]
    }
    known = "; ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    return {**found, "ratios": ratios}, [*lines, f"profile, ours over megatron-core's: {known}"]


def _layer(runs: "Mapping[str, Run]", iterations: int) -> tuple[Result, list[str]]:
    found = _statistics(ranks.take_turns(runs, iterations, WARMUP, step=_layer_seconds))
    return found, [_times("layer alone, wall", found)]


def _shape(run: "Run") -> Result:
    config = run.config
    microbatches = run.batches.get()
    assert config.model.seq_length is not None
    layers = len(_layers(run))
    return {
        "layers": layers,
        "microbatches": microbatches,
        "tokens": config.train.micro_batch_size * config.model.seq_length,
        "topk": config.transformer.moe_router_topk,
        "waits_expected": layers * microbatches + 1,
    }


def _layers(run: "Run") -> "list[torch.nn.Module]":
    """Return the MoE layers of a run; ours is a subclass of megatron-core's."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer

    return [module for chunk in run.model for module in chunk.modules() if isinstance(module, BaseMoELayer)]


def _timed_step(run: "Run") -> dict[str, float]:
    """Train one iteration; return its seconds, and the CPU seconds of all threads of the process."""
    from megatron_balance.training.loop import train_step

    start = time.process_time()
    seconds = train_step(run).seconds
    return {"wall": seconds or 0.0, "cpu": time.process_time() - start}


def _statistics(seconds: Mapping[str, Sequence[float]]) -> Result:
    """Return medians and quartiles in milliseconds, and of the ratios of pairs, which were measured one by one."""
    pairs = [ours / theirs for ours, theirs in zip(seconds[OURS], seconds[THEIRS], strict=True)]
    milliseconds = {name: _quartiles([1e3 * one for one in found]) for name, found in seconds.items()}
    return {"ms": milliseconds, "ratio": _quartiles(pairs)}


def _quartiles(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high, "n": len(values)}


def _times(label: str, found: Result) -> str:
    """Format what `_statistics` returned."""
    each = [f"{name} {_spread(one, 2)} ms" for name, one in found["ms"].items()]
    return f"{label}: {', '.join(each)}, ratio {_spread(found['ratio'], 3)}"


def _spread(one: Mapping[str, float], digits: int) -> str:
    return "{median:.{d}f} ({low:.{d}f}-{high:.{d}f})".format(**one, d=digits)


def _profile(run: "Run", machine: "Machine", shape: Result) -> Result:
    """Profile iterations; return the one that takes the median time (the lower one of an even number)."""
    # The first use of a profiler takes long, and misses events
    _traced(run, machine, 0)
    trace = _traced(run, machine, PROFILED)
    iterations = [device_trace.summary(trace, window, SPANS) for window in trace.annotations(ITERATION)]
    iterations.sort(key=lambda one: one["device_span_ms" if machine.cuda else "host_ms"])
    return {**iterations[(len(iterations) - 1) // 2], "waits_expected": shape["waits_expected"]}


def _traced(run: "Run", machine: "Machine", iterations: int) -> Trace:
    """Return the trace of iterations; the device has nothing to do when one begins."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    from megatron_balance.training.loop import queue_step

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if machine.cuda else [])]
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as marks:
        for layer in _layers(run):
            marks.enter_context(mock.patch.object(layer, "forward", record_function(LAYER)(layer.forward)))
        with profile(activities=activities) as profiled:
            torch.ones(1, device=torch.cuda.current_device() if machine.cuda else "cpu").add_(1)
            for _ in range(iterations):
                torch.cuda.synchronize()
                # Not train_step: that waits until the device has finished, which training does not
                with record_function(ITERATION):
                    queue_step(run)
            torch.cuda.synchronize()
        file = Path(directory) / "trace.json"
        profiled.export_chrome_trace(str(file))
        return Trace(json.loads(file.read_text(errors="replace")))


def _profile_lines(name: str, found: Result, machine: "Machine") -> Iterator[str]:
    part = "{host_busy_ms:.2f} of {host_ms:.2f} ms host busy"
    if machine.cuda:
        part += ", {waits} waits, {launches} launches, {kernels} kernels, {kernel_ms:.3f} ms"
    for span, one in {name: found, **found["spans"]}.items():
        yield f"{span}: {part.format(**one)}"
    if not machine.cuda:
        return
    if not found["launches"]:
        yield f"{name}: the profiler saw no launch, so the numbers of the device are not measured"
        return
    expected = f" (expected: {found['waits_expected']})" if name == OURS else ""
    yield f"{name}: the host waits {found['waits']} times an iteration{expected}"
    busy = "device busy {device_busy_ms:.3f} of {device_span_ms:.3f} ms, idle {device_idle_fraction:.1%}"
    yield f"{name}: {busy.format(**found)}"
    for one in found["kernels_by_time"]:
        yield f"    {one['ms']:9.3f} ms {one['count']:5d}  {one['name'][:90]}"


def _layer_seconds(run: "Run") -> float:
    """Return the seconds of a forward and backward pass of the run's first MoE layer, on a sequence of noise."""
    import torch

    from megatron_balance.device import clock

    shape = run.config.transformer
    layer = _layers(run)[0]
    size = (run.config.model.seq_length, run.config.train.micro_batch_size, shape.hidden_size)
    device = next(layer.parameters()).device
    tokens_SBH = torch.randn(size, dtype=shape.params_dtype, device=device, requires_grad=True)
    gradient_SBH = torch.randn_like(tokens_SBH)
    torch.cuda.synchronize()
    start = clock.mark()
    output, *_ = layer(tokens_SBH)
    output.backward(gradient_SBH)
    end = clock.mark()
    torch.cuda.synchronize()
    return clock.seconds(start, end)


def _experts(run: "Run", tokens: Sequence[int]) -> tuple[Result, list[str]]:
    """Time the experts of one rank: seconds per row, overhead in seconds, and operations per row of a forward pass."""
    import functools

    import torch
    import torch.distributed as dist

    from megatron_balance.flow.experts import GroupedExperts
    from megatron_balance.measure.measure import throughput
    from megatron_balance.measure.operations import expert_passes
    from megatron_balance.measure.stopwatch import GroupBench, Stopwatch

    shape = run.config.transformer
    experts = GroupedExperts(range(shape.num_moe_experts), shape, run.groups)
    stopwatch = Stopwatch(dist.group.WORLD, experts.linear_fc1.weight.device, REPEATS)
    passes = functools.partial(expert_passes, experts)
    bench = GroupBench(stopwatch=stopwatch, groups={}, passes=passes, dtype=shape.params_dtype, node_size=1)
    measured = bench.compute(tokens)
    flops = 2 * sum(weight[0].numel() for weight in (experts.linear_fc1.weight, experts.linear_fc2.weight))
    torch.cuda.empty_cache()
    found: Result = {"tokens": list(tokens), "flops_per_row": flops}
    texts = []
    # The backward pass has two products for each of the forward pass
    for name, seconds, products in zip(("forward", "backward"), measured, (1, 2), strict=True):
        line = throughput(tokens, seconds[:, 0].tolist())
        found |= {name: line._asdict(), f"{name}_seconds": seconds[:, 0].tolist()}
        rate = 1e-12 * products * flops / max(line.seconds_per_token, 1e-12)
        texts.append(f"{1e6 * line.seconds_per_token:.4f} us per row {name} ({rate:.1f} TFLOP/s)")
    return found, [f"experts: {', '.join(texts)}"]


def _simulation(cluster: Path, flags: str, directory: Path) -> "subprocess.Popen[str]":
    """Start to simulate our layer on a node of four GPUs of this cluster; the result is a file of its name."""
    last = dict(re.findall(r"--((?:micro|global)-batch-size)[ =](\d+)", flags))
    batch = 4 * int(last.get("global-batch-size", last["micro-batch-size"]))
    node = directory / cluster.name
    node.write_text(re.sub(r"(?m)^gpus_per_node: *\{value: *\d+", "gpus_per_node: {value: 4", cluster.read_text()))
    command = [sys.executable, str(ROOT / "tools/simulate.py"), "--cluster", str(node), "--nodes", "1"]
    command += ["--iterations", "2", "--compare", "expert-model-parallel-size=2,4"]
    command += ["--json", str(directory / cluster.stem), *flags.split(), "--global-batch-size", str(batch)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _predicted(process: "subprocess.Popen[str]", output: Path) -> Result:
    """Wait for a simulation; return the seconds of an iteration and of its parts, or the error."""
    _, errors = process.communicate()
    if process.returncode:
        return {"error": errors.strip()[-300:]}
    half, quarter = (one["mean_seconds"] for one in json.loads(output.read_text()))
    # The step's time is a constant plus a part in proportion to the experts that a rank has
    step = half["optimizer"] + 2 * (half["optimizer"] - quarter["optimizer"])
    parts = {"experts": half["experts"], "other computation": half["other computation"], "optimizer": step}
    return {"parts": parts, "seconds": sum(parts.values())}


def _compared(cluster: str, predicted: Result, result: Result) -> str:
    """Format predicted times next to measured ones, in milliseconds."""
    if "error" in predicted:
        return f"no prediction for {cluster}: {predicted['error']}"
    shape = result["shape"]
    measured = {}
    if result.get("experts"):
        rows = shape["tokens"] * shape["topk"]
        lines = (result["experts"]["forward"], result["experts"]["backward"])
        alone = sum(line["seconds_per_token"] * rows + line["overhead"] for line in lines)
        measured["experts"] = 1e3 * alone * shape["layers"] * shape["microbatches"]
    profile = (result.get("profile") or {}).get(OURS, {})
    if profile.get("kernels"):
        measured["optimizer"] = profile["spans"].get("optimizer", {}).get("kernel_ms", 0.0)
        if "experts" in measured:
            measured["other computation"] = profile["kernel_ms"] - sum(measured.values())
    if result.get("time"):
        measured["iteration"] = result["time"]["wall"]["ms"][OURS]["median"]
    cells = {"iteration": predicted["seconds"], **predicted["parts"]}
    texts = (f"{part} {1e3 * seconds:.2f} / {measured.get(part, math.nan):.2f}" for part, seconds in cells.items())
    return f"predicted for {cluster} / measured, ms: {', '.join(texts)}"


if __name__ == "__main__":
    sys.exit(main())
