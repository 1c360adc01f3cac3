"""A stand-in for Transformer Engine."""

from . import common, pytorch

__version__ = "2.11.0"
__all__ = ["common", "pytorch"]
