"""Operations that are fused: names that megatron-core asks for; none can be computed."""

import torch


class FusibleOperation(torch.nn.Module):
    """Base of all."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"transformer_engine.pytorch.ops.{type(self).__name__}")


class Sequential(FusibleOperation):
    """Operations one after the other."""
