"""Contexts of low precision; they can be entered only with low precision switched off."""

import contextlib
from collections.abc import Iterator
from typing import Any


class FP8GlobalStateManager:
    """State of low precision, which is never on."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Let modules compute in low precision inside the context."""
    if enabled or calibrating:
        raise NotImplementedError("low precision")
    yield


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Let modules built inside the context have low-precision parameters."""
    if enabled:
        raise NotImplementedError("parameters in low precision")
    yield
