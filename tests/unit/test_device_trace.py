"""Reading traces of torch.profiler: waits and their places, launches, copies, kernels, gaps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import device_trace
from device_trace import Trace
from megatron_balance.device import without_engine
from tests.unit.profiler_traces import AUTOGRAD, ITERATION, WINDOW, call, event, kernel, trace


def test_waits_are_calls_of_cuda_that_return_when_the_device_is_done() -> None:
    assert device_trace.wait_places(trace(*ITERATION), WINDOW) == {
        "cudaStreamSynchronize: moe_utils.permute < loop.queue_step": 1,
        "cudaEventSynchronize: host_memory.wait": 1,
        "cudaMemcpy: aten::item < autograd::engine::evaluate_function: IndexBackward0": 1,
    }


def test_the_summary_of_an_iteration() -> None:
    found = device_trace.summary(trace(*ITERATION), WINDOW, ["nothing of this name"])
    assert (found["waits"], found["launches"], found["graph_launches"], found["kernels"]) == (3, 3, 1, 5)
    assert (found["host_ms"], found["host_waiting_ms"], found["host_busy_ms"]) == (1.0, 0.06, 0.94)
    assert found["copies"] == {
        "DtoH": {"count": 2, "bytes": 68, "ms": 0.007},
        "memset": {"count": 1, "bytes": 8, "ms": 0.001},
    }
    assert found["kernel_ms"] == pytest.approx(0.095)
    # From 60 to 535; streams overlap from 240 to 250
    assert (found["device_span_ms"], found["device_busy_ms"]) == pytest.approx((0.475, 0.093))
    assert found["device_idle_fraction"] == pytest.approx(1 - 93 / 475)
    assert found["gaps"][0] == {"us": 210, "after": "triton_fit", "before": "Memcpy DtoH (Device -> Pageable)"}
    assert [(one["name"], one["count"]) for one in found["kernels_by_time"]] == [
        ("gemm", 2),
        ("gather", 2),
        ("triton_fit", 1),
    ]
    assert found["spans"] == {}
    json.dumps(found)


def test_the_files_of_ours_that_launch_and_copy() -> None:
    assert device_trace.by_file(trace(*ITERATION), WINDOW) == {
        "?": {"launches": 0, "kernels": 0, "kernel_ms": 0.0, "host_bytes": 4},
        "loop": {"launches": 3, "kernels": 5, "kernel_ms": pytest.approx(0.095), "host_bytes": 64},
    }


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


@pytest.mark.parametrize(
    "events",
    [
        [],
        None,
        [None, 3, {}, {"ph": "X"}, {"ph": "M", "name": "process_name", "args": {}}],
        [{"ph": "X", "cat": "kernel", "name": None, "ts": "x", "dur": None, "args": [1]}],
        [{"ph": "X", "cat": "gpu_memcpy", "name": "a copy", "ts": 5}, {"ph": "X", "cat": "cuda_runtime", "ts": 1}],
    ],
)
def test_unknown_events_count_as_nothing(events: Any) -> None:
    found = device_trace.summary(Trace({"traceEvents": events}), WINDOW, ["MoE layer"])
    assert (found["kernels"], found["waits"], found["device_idle_fraction"]) == (0, 0, None)
    assert device_trace.by_file(Trace({"traceEvents": events}), WINDOW) == {}


def test_the_places_in_a_trace_of_torch(tmp_path: Path) -> None:
    tensors = [[torch.ones(3)]]
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiled, record_function("one iteration"):
        without_engine.l2_norm(0, tensors[0][0], tensors, False)
    file = tmp_path / "trace.json"
    profiled.export_chrome_trace(str(file))
    found = Trace(json.loads(file.read_text()))
    (window,) = found.annotations("one iteration")
    (operator,) = (one for one in found.by_category["cpu_op"] if one.name == "aten::stack")
    assert window.start <= operator.start < operator.end <= window.end and operator.thread == window.thread
    assert (found.places([operator]), found.files([operator])) == (["without_engine.l2_norm"], ["without_engine"])
