"""Kernels in Triton, which comes with torch for CUDA. A kernel's result equals that of the function of the same name
outside this package to the bit; sums in half precision, to one unit in the last place. Only the modules here import
triton, and other packages import these modules on demand only.

    rows    a layer's rows: their order, copies of tokens, sums of rows
"""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch


def of_rows(device: torch.device) -> ModuleType | None:
    """Return `kernels.rows` if it supports tensors of `device`; None: use torch instead."""
    return _rows() if device.type == "cuda" else None


@functools.cache
def _rows() -> ModuleType | None:
    # Triton does not work with torch's build for CPUs, even if it is installed
    found = torch.backends.cuda.is_built() and importlib.util.find_spec("triton") is not None
    return importlib.import_module("megatron_balance.kernels.rows") if found else None
