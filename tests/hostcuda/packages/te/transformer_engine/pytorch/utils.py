"""Helpers."""

from typing import Any


def divide(numerator: int, denominator: int) -> int:
    """Divide without a remainder."""
    assert numerator % denominator == 0, f"{numerator} is not divisible by {denominator}"
    return numerator // denominator


def make_weak_ref(x: Any) -> None:
    """Return a tensor that does not own its memory, for CUDA graphs."""
    raise NotImplementedError("make_weak_ref")
