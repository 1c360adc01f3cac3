"""Names of fused operations that megatron-core imports; none is implemented."""

import torch


class FusibleOperation(torch.nn.Module):
    """Base class of all operations."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"transformer_engine.pytorch.ops.{type(self).__name__}")


class Sequential(FusibleOperation):
    """A sequence of operations."""
