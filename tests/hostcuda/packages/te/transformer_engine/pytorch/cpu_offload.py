"""Offloading of activations to host memory."""

import contextlib
from collections.abc import Callable
from typing import Any


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple[contextlib.AbstractContextManager, Callable]:
    """Return a context and a function to call after each layer; both do nothing unless `enabled`."""
    if enabled or manual_synchronization:
        raise NotImplementedError("get_cpu_offload_context, enabled")
    return contextlib.nullcontext(), lambda output: output
