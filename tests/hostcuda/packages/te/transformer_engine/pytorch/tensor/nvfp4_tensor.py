"""Tensors in low precision."""

from ..quantized_tensor import QuantizedTensor


class NVFP4Tensor(QuantizedTensor):
    """Four bits and a scale for each 16 elements."""
