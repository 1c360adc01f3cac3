"""Iteration time and peak memory of our MoE layer against megatron-core's own, in the same training loop.

    python tools/bench/step_time.py [--processes 4] [--repeats 3] [--iterations 20] [--cases NAME ...]

Time: both models live in the same processes and take turns, one iteration each, so that whatever else the machine does
hits both. Memory: one job per implementation, because a process's peak cannot be told apart by model; what is compared
is the peak above the memory in use before the model was built (`own`), and the whole process (`process`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

IMPLEMENTATIONS = ("balanced", "megatron")

WARMUP = 10
"""Iterations before measuring: routing varies, and with it the sizes of tensors that the allocator gets to know."""

COMMON = (
    "--num-layers 2 --num-attention-heads 4 --seq-length 128 --micro-batch-size 4 --num-experts 8 "
    "--moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 --lr 1e-3 --train-iters 1000 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1000 --num-workers 0 --attention-dropout 0 --hidden-dropout 0"
)
CASES = {
    "gelu": "--hidden-size 256",
    "swiglu": "--hidden-size 256 --swiglu --disable-bias-linear --moe-ffn-hidden-size 512",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="ranks; also the expert-parallel size")
    parser.add_argument("--repeats", type=int, default=3, help="jobs per case")
    parser.add_argument("--iterations", type=int, default=20, help="measured iterations per implementation and job")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        _work(json.loads(args.worker), Path(args.output))
        return 0
    print("case     ratio balanced/megatron of the median iteration time | ms | ratio of peak memory: own, process")
    for case in args.cases:
        flags = f"{COMMON} {CASES[case]} --expert-model-parallel-size {args.processes}"
        times = [_job(args.processes, flags, IMPLEMENTATIONS, args.iterations) for _ in range(args.repeats)]
        memory = {name: _job(args.processes, flags, (name,), 3) for name in IMPLEMENTATIONS}
        print(_row(case, times, memory), flush=True)
    return 0


def _row(case: str, times: list[dict], memory: dict[str, dict]) -> str:
    medians = [{name: statistics.median(job["seconds"][name]) for name in IMPLEMENTATIONS} for job in times]
    ratios = [job["balanced"] / job["megatron"] for job in medians]
    own, process = (memory["balanced"][kind] / memory["megatron"][kind] for kind in ("own", "process"))
    return (
        f"{case:8s} median {statistics.median(ratios):.3f} (jobs: {', '.join(f'{ratio:.3f}' for ratio in ratios)}) | "
        f"{1000 * medians[0]['balanced']:.1f} against {1000 * medians[0]['megatron']:.1f} | {own:.3f}, {process:.3f}"
    )


def _job(processes: int, flags: str, implementations: tuple[str, ...], iterations: int) -> dict:
    """Run one job of `processes` ranks and return what its rank 0 measured."""
    task = {"flags": flags, "implementations": implementations, "iterations": iterations}
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += [__file__, "--worker", json.dumps(task), "--output", str(output)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"the job failed:\n{result.stderr[-3000:]}")
        return json.loads(output.read_text())


def _work(task: dict, output: Path) -> None:
    """One rank: build every implementation, then let them take turns."""
    from megatron_balance.device import cpu, quiet

    quiet.silence_expected_warnings()
    cpu.install()
    import torch
    import torch.distributed as dist

    from megatron_balance.arguments import parse_args
    from megatron_balance.build import build_run
    from megatron_balance.checks import Machine
    from megatron_balance.device import groups
    from megatron_balance.training.loop import train_step

    launch = groups.Launch.from_environment()
    machine = Machine.here(launch.world_size)
    groups.start(launch, "nccl" if machine.cuda else "gloo", 10)
    before = _memory("VmRSS")
    runs = {}
    for name in task["implementations"]:
        config, _ = parse_args(f"{task['flags']} --moe-layer-impl {name}".split(), machine)
        runs[name] = build_run(config)
        groups.destroy_groups()
    groups.build_groups(config.transformer, config.train.seed)

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for iteration in range(WARMUP + task["iterations"]):
        for name in order if iteration % 2 else order[::-1]:
            dist.barrier()
            report = train_step(runs[name])
            if iteration >= WARMUP:
                seconds[name].append(report.seconds)
    peaks = torch.tensor([_memory("VmHWM") - before, _memory("VmHWM")], dtype=torch.float64)
    if machine.cuda:
        peaks = torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()], device="cuda")
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    if launch.rank == 0:
        output.write_text(json.dumps({"seconds": seconds, "own": peaks[0].item(), "process": peaks[1].item()}))
    dist.destroy_process_group()


def _memory(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


if __name__ == "__main__":
    sys.exit(main())
