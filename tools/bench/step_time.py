"""Compares iteration time and peak memory of our MoE layer and megatron-core's, in the same training loop.

    python tools/bench/step_time.py [--processes 4] [--repeats 3] [--iterations 20] [--cases NAME ...]

Time: both models are in the same processes and take turns, one iteration each, so that other load on the machine
affects both. Memory: one job per implementation, because a process has only one peak; the comparison is between the
peaks above the memory in use before the model was built (`own`), and between those of the processes (`process`).
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import ranks

if TYPE_CHECKING:
    from megatron_balance.cli.checks import Machine

IMPLEMENTATIONS = ("balanced", "megatron")

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
    ranks.add_worker_option(parser)
    args = parser.parse_args()
    if args.worker:
        return ranks.work(args.worker, _measure)
    print("case     ratio balanced/megatron of the median iteration time | ms | ratio of peak memory: own, process")
    for case in args.cases:
        flags = f"{COMMON} {CASES[case]} --expert-model-parallel-size {args.processes}"
        times = [_job(args.processes, flags, IMPLEMENTATIONS, args.iterations) for _ in range(args.repeats)]
        memory = {name: _job(args.processes, flags, (name,), 3) for name in IMPLEMENTATIONS}
        print(_row(case, times, memory), flush=True)
    return 0


def _row(case: str, times: list[dict], memory: dict[str, dict]) -> str:
    own, process = (memory["balanced"][kind] / memory["megatron"][kind] for kind in ("own", "process"))
    ratio = ranks.compare([job["seconds"] for job in times], *IMPLEMENTATIONS)
    return f"{case:8s} {ratio} | {own:.3f}, {process:.3f}"


def _job(processes: int, flags: str, implementations: tuple[str, ...], iterations: int) -> dict:
    lines = {name: f"{flags} --moe-layer-impl {name}" for name in implementations}
    return ranks.job(__file__, processes, {"flags": lines, "iterations": iterations})


def _measure(task: ranks.Task, machine: "Machine") -> dict:
    """Return a rank's seconds of every iteration by implementation, and the highest peak memory of all ranks."""
    import torch
    import torch.distributed as dist

    before = _memory("VmRSS")
    reports = ranks.take_turns(ranks.build(task["flags"], machine), task["iterations"])
    peaks = torch.tensor([_memory("VmHWM") - before, _memory("VmHWM")], dtype=torch.float64)
    if machine.cuda:
        peaks = torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()], device="cuda")
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    seconds = {name: [report.seconds for report in steps] for name, steps in reports.items()}
    return {"seconds": seconds, "own": peaks[0].item(), "process": peaks[1].item()}


def _memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


if __name__ == "__main__":
    sys.exit(main())
