"""Tensors in low precision."""

from ..quantized_tensor import QuantizedTensor


class Float8BlockwiseQTensor(QuantizedTensor):
    """A scale for each block."""
