"""Attention."""

from .dot_product_attention import DotProductAttention

__all__ = ["DotProductAttention"]
