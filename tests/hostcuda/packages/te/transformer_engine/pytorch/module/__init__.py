"""Layers."""

from ._norm import LayerNorm, RMSNorm
from .grouped_linear import GroupedLinear
from .layernorm_linear import LayerNormLinear
from .linear import Linear

__all__ = ["GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm"]
