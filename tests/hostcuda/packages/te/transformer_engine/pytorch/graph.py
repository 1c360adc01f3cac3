"""CUDA graphs."""

from typing import Any


def make_graphed_callables(*args: Any, **kwargs: Any) -> None:
    """Capture modules as CUDA graphs."""
    raise NotImplementedError("make_graphed_callables")


def save_fp8_tensors(*args: Any, **kwargs: Any) -> None:
    """Save low-precision state before a capture."""
    raise NotImplementedError("save_fp8_tensors")


def restore_fp8_tensors(*args: Any, **kwargs: Any) -> None:
    """Restore what `save_fp8_tensors` saved."""
    raise NotImplementedError("restore_fp8_tensors")


def set_capture_start() -> None:
    """Mark the start of a capture."""
    raise NotImplementedError("set_capture_start")


def set_capture_end() -> None:
    """Mark the end of a capture."""
    raise NotImplementedError("set_capture_end")
