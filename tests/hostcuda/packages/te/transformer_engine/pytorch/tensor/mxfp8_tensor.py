"""Tensors in low precision."""

from ..quantized_tensor import QuantizedTensor


class MXFP8Tensor(QuantizedTensor):
    """A power of two for each 32 elements."""
