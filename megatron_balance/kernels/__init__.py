"""Kernels in Triton, which comes with torch for CUDA. A kernel equals the function of its name outside this package to
the bit; a sum in half precision, to one unit in the last place. Only the modules here import triton, and no module of
another package imports them when it is imported itself.

    fit     the moves of planning/fit: decisions for loads that the host would have to wait for
    rows    a layer's rows: their order, copies of tokens, sums of rows
"""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch


def of_rows(device: torch.device) -> ModuleType | None:
    """Return `kernels.rows` where it can run on tensors of `device`; None: torch computes the same."""
    return _rows() if device.type == "cuda" else None


@functools.cache
def _rows() -> ModuleType | None:
    # A device in host memory has torch's build for CPUs, which triton cannot use
    found = torch.backends.cuda.is_built() and importlib.util.find_spec("triton") is not None
    return importlib.import_module("megatron_balance.kernels.rows") if found else None
