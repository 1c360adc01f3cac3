"""What a device costs whatever the sizes: launches, graphs, events, copies to and from the host; for gpu_rates.py."""

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


def graphs(results: device_timer.Results) -> None:
    """Measure the replay of a CUDA graph of small kernels: time of the device per node, and of the host per replay."""
    numbers = torch.zeros(1, device=results.timer.device)

    def many() -> None:
        for _ in range(LAUNCHES):
            numbers.add_(1)

    replay = captured(many) if results.timer.cuda else many
    key = {"nodes": LAUNCHES}
    results.rate("device time of a graph's node", key, lambda _: replay(), parts=LAUNCHES)
    _host(results, "host time of a graph's replay", key, replay, 1)


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of work that is captured as a CUDA graph, after three runs on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def waits(results: device_timer.Results) -> None:
    """Measure how long the host takes to launch a small kernel or to read a few bytes, and to wait for it."""
    timer = results.timer
    numbers = torch.zeros(256, device=timer.device)
    there = pinned(1024, timer).view(torch.float32)
    event = torch.cuda.Event() if timer.cuda else None
    works = {
        "synchronize": lambda: None,
        "add_, synchronize": lambda: numbers.add_(1),
        "read 1 KiB, synchronize": lambda: there.copy_(numbers, non_blocking=True),
    }
    for name, work in works.items():

        def wait(work: Callable[[], object] = work) -> None:
            work()
            if event is not None:
                event.record()
                event.synchronize()

        _host(results, "host time of a wait", {"work": name}, wait, 1)
    _host(results, "host time of a wait", {"work": "add_, item"}, lambda: numbers.add_(1)[0].item(), 1)


def transfers(results: device_timer.Results, num_bytes: int) -> None:
    """Measure copies between the host's memory, pinned and not, and the device's."""
    timer = results.timer
    for size, unit in ((num_bytes, "large"), (4096, "4 KiB")):
        there = torch.randint(256, (size,), dtype=torch.uint8, device=timer.device)
        for name, here in (("pinned", pinned(size, timer)), ("pageable", torch.empty(size, dtype=torch.uint8))):
            here.zero_()
            calls = {
                "host to device": lambda _, here=here, there=there: there.copy_(here, non_blocking=True),
                "device to host": lambda _, here=here, there=there: here.copy_(there, non_blocking=True),
            }
            for direction, call in calls.items():
                key = {"direction": direction, "memory": name, "bytes": size}
                table = "host copies" if unit == "large" else "host copies, small"
                results.rate(table, key, call, num_bytes=size if unit == "large" else 0)


def pinned(num_bytes: int, timer: device_timer.Timer) -> torch.Tensor:
    """Return host memory that a device can read and write while the host goes on."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=timer.cuda)


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
