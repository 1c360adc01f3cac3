"""The tensor class of `tensor`, under its older module name."""

from .tensor.float8_tensor import Float8Tensor

__all__ = ["Float8Tensor"]
