# ruff: noqa: F401
"""Optimizers, and kernels over lists of tensors."""

from .fused_adam import FusedAdam
from .multi_tensor_apply import multi_tensor_adam, multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale


class FusedSGD:
    """megatron-core imports it together with FusedAdam."""

    def __init__(self, *args: object, **options: object) -> None:
        raise NotImplementedError("FusedSGD")
