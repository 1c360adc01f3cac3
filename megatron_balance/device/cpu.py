"""Run megatron-core on a machine without CUDA.

The entry point installs these replacements of CUDA if `torch.cuda.is_available()` is false.

| megatron-core uses                              | replacement on the CPU     | reason                           |
|-------------------------------------------------|----------------------------|----------------------------------|
| `torch.cuda.current_device()`                   | the `cpu` device           | the `device=` of new tensors     |
| `torch.cuda.synchronize`, `empty_cache`, ...    | nothing                    | CPU work is already done         |
| `torch.cuda.Stream`, `Event`, `stream(...)`     | objects that never wait    | one stream: program order        |
| `torch.cuda.{get,set}_rng_state`, `manual_seed` | the CPU generator          | dropout and init fork RNG states |
| `device="cuda"` literals                        | `device="cpu"`             | optimizer, clipping, aux losses  |
| `pin_memory=True`                               | nothing                    | rotary angles, context parallel  |
| `tensor.type() == "torch.cuda.FloatTensor"`     | the CUDA name              | optimizers sort parameters by it |
| `Tensor.cuda()`, `Module.cuda()`                | identity                   | everything is in host memory     |
| CUDA's caching allocator                        | malloc that keeps memory   | fewer page faults per step       |
| `torch.compile` (its `jit_fuser`)               | the plain function         | compiling needs a C++ compiler   |
| averages of quantile balancing's biases         | a sum, then a division     | gloo does not average            |
| `maybe_move_tensor_to_cpu(..., as_numpy=True)`  | a NumPy array              | gloo refuses tensors as splits   |
"""

import contextlib
import ctypes
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from megatron_balance.device import without_engine

CPU = torch.device("cpu")
META = torch.device("meta")
"""Device of tensors that have a shape and a dtype but no memory."""

FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)
"""Functions of torch that take a `device=`."""

MALLOPT = {-1: 1 << 30, -3: 1 << 25}
"""glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD (the latter at its maximum), in bytes."""

_TENSOR_TO: Callable[..., torch.Tensor] = torch.Tensor.to
_TENSOR_TYPE = torch.Tensor.type


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None: ...


class _Stream:
    """The only stream of a CPU; each call completes before it returns."""

    __init__ = wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: Any = None) -> "_Event":
        return event or _Event()


class _Event:
    __init__ = record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True


def _on_cpu(factory: Callable) -> Callable:
    """Return `factory` with any CUDA device replaced by the CPU, and without pinned memory."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _tensor_to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _TENSOR_TO(tensor, *(CPU if _is_cuda(arg) else arg for arg in args), **kwargs)


def _tensor_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    result = _TENSOR_TYPE(tensor, *args, **kwargs)
    return f"torch.cuda.{result.split('.')[-1]}" if isinstance(result, str) else result


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


_STREAM = _Stream()


def _same(value: Any, *args: Any, **kwargs: Any) -> Any:
    return value


def _no_compile(function: Callable | None = None, **options: Any) -> Callable:
    return _same if function is None else function


def _rng_state(device: Any = None, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = None, **kwargs: Any) -> None:
    torch.set_rng_state(new_state)


TORCH_CUDA = {
    "current_device": lambda: CPU,
    # Three functions, because torch's compiler refuses a function with several names
    "set_device": lambda device: None,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "stream": contextlib.nullcontext,
    "Stream": _Stream,
    "Event": _Event,
    "get_rng_state": _rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": torch.default_generator.manual_seed,
}


def keep_freed_memory() -> None:
    """Tell glibc to keep freed memory; otherwise the next step causes a page fault for each page."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in MALLOPT.items():
            mallopt(parameter, value)


def installed() -> bool:
    """Return whether the replacements are installed in this process."""
    return torch.cuda.Stream is _Stream


def install(always: bool = False) -> None:
    """Replace CUDA calls if CUDA is not available, and complete megatron-core if Transformer Engine is not installed.
    Call this before importing `megatron.core`, whose modules apply `torch.compile` when imported. A second call has no
    effect. `always`: whether to use the CPU even if CUDA is available."""
    if installed():
        return
    if always or not torch.cuda.is_available():
        _patch_torch()
        _patch_megatron_core()
    without_engine.complete()


def _with_sums(update: Callable[..., None]) -> Callable[..., None]:
    """Return a function of megatron-core's with its averages over ranks replaced by sums and divisions."""

    @functools.wraps(update)
    def call(*args: Any, **kwargs: Any) -> None:
        all_reduce = dist.all_reduce

        def average(tensor: torch.Tensor, op: Any, group: dist.ProcessGroup) -> None:
            assert op == dist.ReduceOp.AVG
            all_reduce(tensor, group=group)
            tensor.div_(group.size())

        dist.all_reduce = average
        try:
            update(*args, **kwargs)
        finally:
            dist.all_reduce = all_reduce

    return call


def _patch_torch() -> None:
    # `with torch.device(...)` recognizes factories by identity, so let torch cache the originals first
    _device_constructors()
    for name, replacement in TORCH_CUDA.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.random.get_rng_state = _rng_state
    torch.cuda.random.set_rng_state = _set_rng_state
    torch.Tensor.cuda = _same  # pyright: ignore[reportAttributeAccessIssue]
    torch.nn.Module.cuda = _same  # pyright: ignore[reportAttributeAccessIssue]
    torch.compile = _no_compile
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _on_cpu(_tensor_to)
    torch.Tensor.type = _tensor_type  # pyright: ignore[reportAttributeAccessIssue]
    keep_freed_memory()


@contextlib.contextmanager
def allocating_nothing() -> Iterator[None]:
    """Inside the block, new tensors have a shape and a dtype but no memory."""
    assert installed()
    torch.cuda.current_device = lambda: META
    try:
        with META:
            yield
    finally:
        torch.cuda.current_device = TORCH_CUDA["current_device"]


def _patch_megatron_core() -> None:
    """Replace functions of megatron-core that patching `torch.cuda` does not reach."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = _rng_state
    random._set_cuda_rng_state = _set_rng_state

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host
    # The package exports a function with the name of this module
    finalizing: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    if hasattr(finalizing, "_update_router_qb_beta"):  # since 0.19
        finalizing._update_router_qb_beta = _with_sums(finalizing._update_router_qb_beta)
