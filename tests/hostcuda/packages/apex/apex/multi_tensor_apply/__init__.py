"""apex's interface to kernels over lists of tensors."""

from tests.hostcuda.packages.kernels import multi_tensor_applier

__all__ = ["multi_tensor_applier"]
