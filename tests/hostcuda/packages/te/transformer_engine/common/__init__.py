"""The framework-independent part."""

from . import recipe

__all__ = ["recipe"]
