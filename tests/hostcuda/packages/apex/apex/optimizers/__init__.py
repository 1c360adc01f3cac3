"""The apex optimizers that megatron-core uses."""

from .fused_adam import FusedAdam

__all__ = ["FusedAdam", "FusedSGD"]


class FusedSGD:
    """megatron-core imports it together with FusedAdam."""

    def __init__(self, *args: object, **options: object) -> None:
        raise NotImplementedError("FusedSGD")
