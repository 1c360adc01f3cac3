"""A stand-in for NVIDIA's apex (commit 10417ac, of November 2025)."""

from . import normalization, optimizers

__all__ = ["normalization", "optimizers"]
