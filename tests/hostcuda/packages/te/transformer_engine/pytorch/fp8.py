"""`quantization` under its older name."""

from .quantization import FP8GlobalStateManager, fp8_autocast, fp8_model_init

__all__ = ["FP8GlobalStateManager", "fp8_autocast", "fp8_model_init"]
