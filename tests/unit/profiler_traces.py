"""Traces written by hand, in the format of torch.profiler's; times are microseconds."""

from typing import Any

from device_trace import Event, Trace

MAIN = (7, 7)
AUTOGRAD = (7, 8)
WINDOW = Event("", "", MAIN, 0, 1000, {})


def event(category: str, name: str, start: float, us: float, thread: tuple[int, int] = MAIN, **args: Any) -> dict:
    (pid, tid) = thread
    args = {name.replace("_", " "): value for name, value in args.items()}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": us, "args": args}


def call(name: str, start: float, us: float, number: int = 0, thread: tuple[int, int] = MAIN) -> dict:
    return event("cuda_runtime", name, start, us, thread, correlation=number)


def kernel(name: str, start: float, us: float, number: int, stream: int = 7) -> dict:
    return event("kernel", name, start, us, (0, stream), correlation=number)


def trace(*events: Any) -> Trace:
    return Trace({"schemaVersion": 1, "traceEvents": list(events)})


ITERATION = (
    event("user_annotation", "one iteration", 0, 1000),
    event("cpu_op", "aten::masked_select", 31, 48),
    event("cpu_op", "aten::nonzero", 35, 40),
    call("cudaLaunchKernel", 40, 5, 1),
    call("cudaMemcpyAsync", 46, 4, 2),
    call("cudaStreamSynchronize", 50, 10),
    # Reported by the driver, too
    event("cuda_driver", "cuStreamSynchronize", 51, 8),
    call("cudaEventSynchronize_v3020", 140, 30),
    call("cudaStreamWaitEvent", 180, 2),
    call("cudaEventQuery", 183, 2),
    call("cudaLaunchKernelExC_v11060", 195, 5, 3),
    call("cudaGraphLaunch", 220, 5, 4),
    call("cudaMemsetAsync", 230, 5, 5),
    event("cuda_driver", "cuLaunchKernel", 240, 5, correlation=6),
    # In autograd's thread, which has no functions of Python
    event("cpu_op", "autograd::engine::evaluate_function: IndexBackward0", 500, 100, AUTOGRAD),
    event("cpu_op", "aten::item", 510, 50, AUTOGRAD),
    call("cudaMemcpy", 520, 20, 7, AUTOGRAD),
    # After the iteration
    call("cudaDeviceSynchronize", 1001, 20),
    kernel("gather", 60, 10, 1),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 72, 2, (0, 9), correlation=2, bytes=64),
    kernel("gemm", 210, 40, 3),
    kernel("gemm", 240, 30, 4, stream=8),
    kernel("gather", 290, 5, 4),
    event("gpu_memset", "Memset (Device)", 300, 1, (0, 7), correlation=5, bytes=8),
    kernel("triton_fit", 310, 10, 6),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 530, 5, (0, 7), correlation=7, bytes=4),
    kernel("of another iteration", 2000, 1000, 99),
    event("gpu_user_annotation", "one iteration", 60, 500, (0, 7)),
)
