"""Measures what `--moe-comm-alltoall auto` adds to an exchange: the host's time for predictions and for choices.

    python tools/bench/choice_time.py [--ranks 64 256 1024] [--node-size 8]

Nothing is sent. For each number of ranks, this prints the milliseconds of a prediction, of a choice that still holds,
and their mean over the exchanges for which a prediction holds.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from megatron_balance.comm.registry import TURNS, Chooser
from megatron_balance.profile.cluster_profile import builtin

NAMES = ("default", "pipe", "2dh", "1dh")


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median over the repeats."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--node-size", type=int, default=8)
    args = parser.parse_args()
    print(f"{'ranks':>6} {'prediction ms':>14} {'held choice ms':>15} {'mean ms':>8}")
    for ranks in args.ranks:
        predicted, held = times(ranks, args.node_size)
        print(f"{ranks:6d} {predicted:14.3f} {held:15.4f} {held + predicted / TURNS:8.4f}")
    return 0


def times(ranks: int, node_size: int) -> tuple[float, float]:
    """Return the milliseconds of a prediction, and of a choice that still holds."""
    chooser = Chooser(builtin(ranks, node_size, 1024, 1024), NAMES)
    splits_DD = torch.from_numpy(np.random.default_rng(0).integers(0, 100, (ranks, ranks)))
    predicted = milliseconds(lambda: chooser.predict(splits_DD.numpy() * 4096.0), max(5, 2000 // ranks))
    return predicted, milliseconds(lambda: chooser.choose(splits_DD, 4096), TURNS - 2)


if __name__ == "__main__":
    sys.exit(main())
