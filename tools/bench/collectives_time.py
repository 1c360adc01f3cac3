"""Measures the cost of the hang guard's record of collectives: iteration time with the recorder over that without.

    python tools/bench/collectives_time.py [--processes 4] [--pairs 15] [--repeats 3]

One run executes its iterations in pairs, one with the recorder and one without it, in alternating order. The second
line has less noise: the host's microseconds for one operation on a group of one rank, with and without the recorder.
"""

import argparse
import contextlib
import statistics
import sys
import time
from typing import TYPE_CHECKING

import ranks

if TYPE_CHECKING:
    from megatron_balance.cli.checks import Machine

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --num-experts 8 "
    "--global-batch-size 16 --lr 1e-3 --train-iters 1000 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 "
    "--num-workers 0 --balance-policy top2 --balance-profile builtin --balance-overlap blockwise "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 100000"
)
SIDES = ("recorded", "plain")
CALLS = 2000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4, help="ranks; half of them are the expert-parallel size")
    parser.add_argument("--pairs", type=int, default=15, help="measured pairs of iterations in a job")
    parser.add_argument("--repeats", type=int, default=3, help="jobs")
    ranks.add_worker_option(parser)
    args = parser.parse_args()
    if args.worker:
        return ranks.work(args.worker, _measure)
    flags = f"{FLAGS} --expert-model-parallel-size {max(1, args.processes // 2)}"
    with ranks.noise():
        task = {"flags": flags, "pairs": args.pairs}
        jobs = [ranks.job(__file__, args.processes, task) for _ in range(args.repeats)]
    print(
        "ratio recorded/plain of the median iteration time | ms:",
        ranks.compare([one["seconds"] for one in jobs], *SIDES),
    )
    calls = {side: statistics.median(one["call"][side] for one in jobs) * 1e6 for side in SIDES}
    print(
        f"{jobs[0]['operations']:.0f} operations an iteration and rank; one costs the host {calls['recorded']:.1f} us "
        f"with the recorder and {calls['plain']:.1f} us without it"
    )
    return 0


def _measure(task: ranks.Task, machine: "Machine") -> dict:
    """Return a rank's seconds of the iterations of each side, seconds of a call, and operations per iteration."""
    import torch
    import torch.distributed as dist

    from megatron_balance.job.collectives import Collectives
    from megatron_balance.training.loop import train_step

    run = ranks.build({"run": task["flags"]}, machine)["run"]
    collectives = Collectives()
    sides = {"recorded": collectives.recorded, "plain": contextlib.nullcontext}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(ranks.WARMUP):
        train_step(run)
    for pair in range(task["pairs"]):
        for side in SIDES if pair % 2 else SIDES[::-1]:
            dist.barrier()
            with sides[side]():
                seconds[side].append(train_step(run).seconds)
    operations = sum(channel.last for channel in collectives.record().values()) / task["pairs"]
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    value = torch.zeros(1, device=torch.cuda.current_device())
    call = {}
    for side in SIDES:
        with sides[side]():
            start = time.perf_counter()
            for _ in range(CALLS):
                dist.all_reduce(value, group=alone)
            call[side] = (time.perf_counter() - start) / CALLS
    return {"seconds": seconds, "operations": operations, "call": call}


if __name__ == "__main__":
    sys.exit(main())
