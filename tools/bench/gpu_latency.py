"""Times of launches and of copies between the host and the device; for gpu_rates.py."""

import statistics
import time
from collections.abc import Callable

import torch

import device_timer

LAUNCHES = 50
"""Launches in a row. A stream's queue holds those of all timed calls; beyond about a thousand, the host waits."""

REPEATS = 15


def launches(results: device_timer.Results) -> None:
    """Measure the host's time to launch a small kernel, and the device's time for it in a row of them."""
    numbers = torch.zeros(1, device=results.timer.device)
    matrix = torch.zeros(16, 16, device=results.timer.device)
    calls: dict[str, Callable[[], object]] = {
        "aten add_": lambda: numbers.add_(1),
        "aten mm": lambda: torch.mm(matrix, matrix, out=matrix),
        "aten empty": lambda: torch.empty_like(numbers),
    }
    if results.timer.cuda:
        from bench_kernels import empty_kernel

        calls["triton"] = lambda: empty_kernel[(1,)](numbers)
        calls["event record"] = torch.cuda.Event().record
        calls["stream wait"] = lambda: torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    for name, call in calls.items():

        def many(_: int, call: Callable[[], object] = call) -> None:
            for _ in range(LAUNCHES):
                call()

        results.rate("device time of a launch", {"launch": name}, many, parts=LAUNCHES)
        _host(results, "host time of a launch", {"launch": name}, lambda many=many: many(0), LAUNCHES)


def transfers(results: device_timer.Results, num_bytes: int) -> None:
    """Measure copies between the host's memory, pinned and not, and the device's."""
    timer = results.timer
    there = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=timer.device)
    for name, pinned in (("pinned", timer.cuda), ("pageable", False)):
        here = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        calls = {
            "host to device": lambda _, here=here: there.copy_(here, non_blocking=True),
            "device to host": lambda _, here=here: here.copy_(there, non_blocking=True),
        }
        for direction, call in calls.items():
            key = {"direction": direction, "memory": name, "bytes": num_bytes}
            results.rate("host copies", key, call, num_bytes=num_bytes)


def _host(results: device_timer.Results, table: str, key: dict, call: Callable[[], object], parts: int) -> None:
    """Add the host's microseconds of a part of a call, which begins when the device is idle."""
    call()
    found = []
    for _ in range(REPEATS):
        results.timer.synchronize()
        start = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - start) / parts)
    low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
    results.add(table, "us", key, middle, (high - low) / 2 / max(middle, 1e-9))
