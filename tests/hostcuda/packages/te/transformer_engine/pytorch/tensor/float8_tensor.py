"""Tensors in low precision."""

from ..quantized_tensor import QuantizedTensor


class Float8Tensor(QuantizedTensor):
    """A scale for each tensor."""
