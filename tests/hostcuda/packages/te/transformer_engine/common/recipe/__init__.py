"""Names of the low-precision recipes; none is implemented."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Format(Enum):
    """Types of the forward pass and of the backward pass."""

    E4M3 = ("e4m3", "e4m3")
    HYBRID = ("e4m3", "e5m2")


class Recipe:
    """Base class of all recipes."""


@dataclass
class DelayedScaling(Recipe):
    """Scales from earlier iterations."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8CurrentScaling(Recipe):
    """A scale for each tensor."""

    fp8_format: Format = Format.HYBRID


@dataclass
class Float8BlockScaling(Recipe):
    """A scale for each block."""

    fp8_format: Format = Format.E4M3


@dataclass
class MXFP8BlockScaling(Recipe):
    """A power of two for each 32 elements."""

    margin: int = 0
    fp8_format: Format = Format.E4M3


@dataclass
class NVFP4BlockScaling(Recipe):
    """A scale for each 16 elements of four bits."""

    fp4_format: Any = None


@dataclass
class CustomRecipe(Recipe):
    """A user-defined recipe."""

    qfactory: Callable
