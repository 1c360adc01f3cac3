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

    @classmethod
    def get_fp8_recipe(cls) -> None:
        raise NotImplementedError("FP8GlobalStateManager.get_fp8_recipe")

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Do nothing; megatron-core calls this before each iteration with CUDA graphs."""


@contextlib.contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Let modules compute in low precision inside the context."""
    if enabled or calibrating:
        raise NotImplementedError("autocast to low precision")
    yield


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Enter `autocast` under its older name."""
    with autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph):
        yield


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Let modules built inside the context have low-precision parameters."""
    if enabled:
        raise NotImplementedError("parameters in low precision")
    yield


fp8_model_init = quantized_model_init
