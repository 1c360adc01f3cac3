"""CUDA graphs."""

from typing import Any


def make_graphed_callables(*args: Any, **kwargs: Any) -> None:
    """Capture modules."""
    raise NotImplementedError("make_graphed_callables")


def save_fp8_tensors(*args: Any, **kwargs: Any) -> None:
    """State of low precision before a capture."""
    raise NotImplementedError("save_fp8_tensors")


def restore_fp8_tensors(*args: Any, **kwargs: Any) -> None:
    """The inverse of `save_fp8_tensors`."""
    raise NotImplementedError("restore_fp8_tensors")


def set_capture_start() -> None:
    """A capture starts."""
    raise NotImplementedError("set_capture_start")


def set_capture_end() -> None:
    """A capture ends."""
    raise NotImplementedError("set_capture_end")
