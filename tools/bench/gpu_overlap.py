"""Measures how much of the work on a side stream the experts' products hide, and how much it slows them down.

    python tools/bench/gpu_overlap.py --output overlap.json

The main stream computes products of experts (`main`). Our side stream (megatron_balance/device/side_stream.py) does
other work for about as long (`side`):

    kernel            copies within the device's memory by a kernel, as Trans and Agg's messages within a node read it
    copy_             the same by torch's copy_, for which the driver chooses the engine
    device to host    copies by a copy engine to pinned memory; and back
    foreach_add_      sums of gradients
    16 blocks         copies by a kernel that uses few multiprocessors, as NCCL's do; started before the products

Columns: milliseconds alone and of both together; `both/sum`; `hidden`, the part of the shorter one that both together
save over one after the other, from 0 to 1; `slower`, the times of each beside the other over those alone. Run it with
CUDA_DEVICE_MAX_CONNECTIONS=1, too, which gives the device a single queue. --cpu tries it at tiny sizes.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import device_timer
from megatron_balance.device import clock, quiet
from megatron_balance.device.side_stream import SideStream

REPEATS = 9
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"

Work = Callable[[], object]


class Times(NamedTuple):
    """Seconds from the start of a pass."""

    main: float
    """Until the products are done; 0 without them."""
    side: float
    """Until the side stream is done; 0 without it."""
    both: float
    host: float
    """Seconds of the host to queue everything."""


def passed(timer: device_timer.Timer, stream: SideStream, main: Work | None, side: Work | None, busy: float) -> Times:
    """Run works together.

    Args:
        busy: seconds for which the device is kept busy first, so that the host has queued everything when it starts.
    """
    timer.synchronize()
    if timer.cuda:
        torch.cuda._sleep(int(device_timer.CYCLES_PER_SECOND * min(busy, device_timer.LONGEST_WAIT)))
    queued = time.perf_counter()
    start = clock.mark()
    started = stream.start(side) if side else None
    if main:
        main()
    after_main = clock.mark()
    after_side = started.wait()[1] if started else start
    end = clock.mark()
    host = time.perf_counter() - queued
    timer.synchronize()
    main_seconds, side_seconds, both = (clock.seconds(start, mark) for mark in (after_main, after_side, end))
    return Times(main_seconds if main else 0.0, side_seconds, both, host)


def measure(results: device_timer.Results, name: str, stream: SideStream, main: Work, one: Work) -> None:
    """Measure the products and one kind of side work, which is repeated until both take about the same time."""
    timer = results.timer

    def median(main: Work | None, side: Work | None) -> tuple[Times, list[Times]]:
        busy = 2 * max(passed(timer, stream, main, side, 0.0).host for _ in range(2)) + 1e-3
        found = [passed(timer, stream, main, side, busy) for _ in range(REPEATS)]
        return Times(*(statistics.median(column) for column in zip(*found, strict=True))), found

    count = max(1, min(100, round(median(main, None)[0].both / max(median(None, one)[0].both, 1e-6))))

    def side() -> None:
        for _ in range(count):
            one()

    alone = median(main, None)[0].both
    other = median(None, side)[0].both
    together, all_together = median(main, side)
    low, _, high = statistics.quantiles([times.both for times in all_together], n=4, method="inclusive")
    numbers = {
        "times": count,
        "main ms": 1e3 * alone,
        "side ms": 1e3 * other,
        "both ms": 1e3 * together.both,
        "both/sum": together.both / (alone + other),
        "hidden": (alone + other - together.both) / min(alone, other),
        "main slower": together.main / alone,
        "side slower": together.side / other,
    }
    spreads = {"both ms": (high - low) / 2 / together.both}
    connections = os.environ.get(CONNECTIONS, "default")
    for number, value in numbers.items():
        key = {"connections": connections, "side": name, "number": number}
        results.add("overlap", "milliseconds, and parts of times", key, value, spreads.get(number))


def works(device: torch.device, num_bytes: int) -> Mapping[str, Work]:
    """Return the works of the side stream, for tensors of this size."""
    from gpu_products import random

    count = num_bytes // 4
    source, target = (random(count, device=device, dtype=torch.float32) for _ in range(2))
    host = torch.empty(count, dtype=torch.float32, pin_memory=device.type == "cuda").zero_()
    parts = target.split(max(1, count // 16))
    others = source.split(max(1, count // 16))
    few = {} if device.type == "cpu" else {f"{blocks} blocks": blocks for blocks in (8, 16, 32)}
    return {
        **{name: partial(_copy, source, target, blocks) for name, blocks in few.items()},
        "kernel": lambda: torch.neg(source, out=target),
        "copy_": lambda: target.copy_(source),
        "device to host": lambda: host.copy_(source, non_blocking=True),
        "host to device": lambda: target.copy_(host, non_blocking=True),
        "foreach_add_": lambda: torch._foreach_add_(parts, others),
    }


def _copy(source: torch.Tensor, target: torch.Tensor, blocks: int) -> None:
    from bench_kernels import BLOCK, copy_kernel

    copy_kernel[(blocks,)](source, target, len(source), BLOCK=BLOCK, num_warps=16)


def products(device: torch.device, experts: int, rows: int, hidden: int, ffn: int) -> Work:
    """Return the products of the main stream: both projections of experts with gated units."""
    from gpu_products import random
    from megatron_balance.flow.grouped_gemm import RowSplit, TorchGemm

    first, second = (random(experts, *shape, device=device) for shape in ((2 * ffn, hidden), (hidden, ffn)))
    rows_RH, rows_RF = (random(experts * rows, width, device=device) for width in (hidden, ffn))
    gemm = TorchGemm()
    split = RowSplit([rows] * experts, device)

    def compute() -> None:
        gemm.outputs(rows_RH, [first], split)
        gemm.outputs(rows_RF, [second], split)

    return compute


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the results, as JSON")
    parser.add_argument("--cpu", action="store_true", help="try all of it on the CPU, at tiny sizes")
    args = parser.parse_args(arguments)
    quiet.silence_expected_warnings()
    timer = device_timer.Timer(device_timer.device_of(args.cpu))
    results = device_timer.Results(timer, args.output, 60)
    main_work = products(timer.device, *((8, 1024, 4096, 14336) if timer.cuda else (2, 4, 16, 8)))
    stream = SideStream("side")
    for name, work in works(timer.device, 200 * 10**6 if timer.cuda else 4096).items():
        results.section(name, partial(measure, results, name, stream, main_work, work))
    return results.finish({"overlap": ("number",)})


if __name__ == "__main__":
    sys.exit(main())
