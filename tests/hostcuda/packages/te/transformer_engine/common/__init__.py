"""What does not depend on the framework."""

from . import recipe

__all__ = ["recipe"]
