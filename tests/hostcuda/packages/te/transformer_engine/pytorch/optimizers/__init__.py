"""Optimizers, and kernels over lists of tensors."""

from .fused_adam import FusedAdam
from .fused_sgd import FusedSGD
from .multi_tensor_apply import (
    MultiTensorApply,
    multi_tensor_adam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
)

__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_adam",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
]
