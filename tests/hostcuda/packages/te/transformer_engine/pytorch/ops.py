"""Names of fused operations that megatron-core's type hints and base classes mention; none is implemented."""

import torch


class FusibleOperation(torch.nn.Module):
    pass


class Sequential(FusibleOperation):
    pass
