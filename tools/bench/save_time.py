"""Measures the time that the manifest adds to a save, and the time of a load.

    torchrun --nproc-per-node 2 tools/bench/save_time.py [--rounds 7] [--hidden-size 512] [--directory DIR]

Saves with and without digests take turns in one job; everything else, including fsync, is the same.
"""

import argparse
import dataclasses
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from megatron_balance.device import cpu, quiet

FLAGS = (
    "--num-layers 4 --num-attention-heads 8 --seq-length 128 --micro-batch-size 1 --num-experts 8 "
    "--moe-token-dispatcher-type alltoall --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 8000 --num-workers 0"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="saves of either kind")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "save_time")
    parser.add_argument("--flags", default="", help="further flags of the run, such as --bf16 or --async-save")
    args = parser.parse_args()
    quiet.silence_expected_warnings()
    cpu.install()
    import torch.distributed as dist

    from megatron_balance.build.run import build_run
    from megatron_balance.checkpoint import manifest
    from megatron_balance.checkpoint.checkpoints import Checkpoints
    from megatron_balance.cli.arguments import parse_args
    from megatron_balance.cli.checks import Machine
    from megatron_balance.job import job
    from megatron_balance.training.logging import RunLog
    from megatron_balance.training.loop import train_step

    launch = job.Launch.from_environment()
    machine = Machine.here(launch.world_size)
    flags = f"{FLAGS} --hidden-size {args.hidden_size} --expert-model-parallel-size {launch.world_size} {args.flags}"
    config = parse_args(f"{flags} --save {args.directory} --keep-last 1".split(), machine).config
    job.start(launch, config.launch.distributed_backend, 10)
    run = build_run(config)
    quiet_log = RunLog(config, run.length.iterations, run.vocab_size)
    quiet_log.prints = False
    train_step(run)

    digest = manifest.digest
    seconds = {"with": [], "without": [], "load": []}

    def no_digest(path: Path) -> manifest.Entry:
        return manifest.Entry(path.stat().st_size, "0" * 64)

    for index in range(2 * args.rounds + 2):
        kind = ("with", "without")[(index + index // 2) % 2]
        manifest.digest = digest if kind == "with" else no_digest
        checkpoints = Checkpoints(run, quiet_log, patience=600.0)
        shutil.rmtree(args.directory, ignore_errors=True)
        dist.barrier()
        start = time.perf_counter()
        checkpoints.save()
        checkpoints.finish()
        # The first save of either kind is a warm-up
        if index >= 2:
            seconds[kind].append(time.perf_counter() - start)
        if kind == "with":
            settings = dataclasses.replace(config.checkpoint, load=str(args.directory))
            resumed = dataclasses.replace(run, config=config.replace(checkpoint=settings))
            start = time.perf_counter()
            Checkpoints(resumed, quiet_log, patience=600.0).load()
            seconds["load"].append(time.perf_counter() - start)
    if launch.rank == 0:
        size = sum(path.stat().st_size for path in args.directory.glob("*/*")) / 1e6
        medians = {kind: statistics.median(values) for kind, values in seconds.items()}
        pairs = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
        print(
            f"{size:.0f} MB: save {medians['with']:.3f} s with digests, {medians['without']:.3f} s without: ratio "
            f"{medians['with'] / medians['without']:.3f} (pairs {min(pairs):.3f} to {max(pairs):.3f}); "
            f"load with verification {medians['load']:.3f} s"
        )
        shutil.rmtree(args.directory, ignore_errors=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
