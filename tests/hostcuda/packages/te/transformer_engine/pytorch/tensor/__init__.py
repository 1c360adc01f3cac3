"""Names of the tensor classes for low precision."""

from ..quantized_tensor import QuantizedTensor
from .float8_blockwise_tensor import Float8BlockwiseQTensor
from .float8_tensor import Float8Tensor
from .mxfp8_tensor import MXFP8Tensor
from .nvfp4_tensor import NVFP4Tensor

__all__ = ["Float8BlockwiseQTensor", "Float8Tensor", "MXFP8Tensor", "NVFP4Tensor", "QuantizedTensor"]
