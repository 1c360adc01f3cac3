"""Reading traces of torch.profiler: waits, launches and kernels of an iteration and of its parts."""

import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import device_trace
from device_trace import Trace
from tests.unit.profiler_traces import AUTOGRAD, ITERATION, WINDOW, call, event, kernel, trace


def test_the_summary_of_an_iteration() -> None:
    found = device_trace.summary(trace(*ITERATION), WINDOW, ["nothing of this name"])
    # A synchronization of a stream, also reported by the driver, one of an event, and a copy
    assert (found["waits"], found["launches"], found["kernels"]) == (3, 3, 5)
    assert (found["host_ms"], found["host_busy_ms"]) == (1.0, 0.94)
    assert found["kernel_ms"] == pytest.approx(0.095)
    # From 60 to 535; streams overlap from 240 to 250
    assert (found["device_span_ms"], found["device_busy_ms"]) == pytest.approx((0.475, 0.093))
    assert found["device_idle_fraction"] == pytest.approx(1 - 93 / 475)
    assert [(one["name"], one["count"]) for one in found["kernels_by_time"]] == [
        ("gemm", 2),
        ("gather", 2),
        ("triton_fit", 1),
    ]
    assert found["spans"] == {}
    json.dumps(found)


def test_a_span_has_a_backward_pass_in_another_thread() -> None:
    found = device_trace.summary(
        trace(
            event("user_annotation", "MoE layer", 100, 100),
            # Not of the layer, but with the number of the next operator
            event("cpu_op", "aten::view", 90, 5, Sequence_number=3, Fwd_thread_id=0),
            event("cpu_op", "aten::mul", 110, 20, Sequence_number=3, Fwd_thread_id=0),
            call("cudaLaunchKernel", 115, 5, 1),
            event("cpu_op", "aten::detach", 190, 5, Sequence_number=4, Fwd_thread_id=0),
            event("cpu_op", "aten::sum", 210, 20, Sequence_number=4, Fwd_thread_id=0),
            *(
                event("cpu_op", f"{prefix}{name}", start, 40, AUTOGRAD, Sequence_number=number, Fwd_thread_id=1)
                for name, number, start in (("SumBackward0", 4, 300), ("MulBackward0", 3, 400))
                for prefix in ("autograd::engine::evaluate_function: ", "")
            ),
            call("cudaLaunchKernel", 310, 5, 2, AUTOGRAD),
            call("cudaLaunchKernel", 410, 5, 3, AUTOGRAD),
            call("cudaEventSynchronize", 420, 10, 0, AUTOGRAD),
            *(kernel("k", 600 + 10 * number, number, number) for number in (1, 2, 3)),
        ),
        WINDOW,
        ["MoE layer"],
    )["spans"]
    assert found == {
        "MoE layer": {
            "host_ms": 0.1,
            "host_busy_ms": 0.1,
            "waits": 0,
            "launches": 1,
            "kernels": 1,
            "kernel_ms": 0.001,
        },
        "MoE layer, backward": {
            "host_ms": 0.04,
            "host_busy_ms": 0.03,
            "waits": 1,
            "launches": 1,
            "kernels": 1,
            "kernel_ms": 0.003,
        },
    }


def test_a_trace_of_torch(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function("one iteration"):
        torch.stack([torch.ones(3)])
    file = tmp_path / "trace.json"
    profiled.export_chrome_trace(str(file))
    found = Trace(json.loads(file.read_text()))
    (window,) = found.annotations("one iteration")
    (operator,) = (one for one in found.operators if one.name == "aten::stack")
    assert window.start <= operator.start < operator.end <= window.end and operator.thread == window.thread
