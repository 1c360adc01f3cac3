"""Layer norms for machines without apex and Transformer Engine.

megatron-core's fallback (`WrappedTorchNorm`) refuses sequence parallelism. All that is missing there is a mark on the
parameters: each tensor-parallel rank sees only its part of the sequence, so their gradients have to be summed over
the tensor-parallel group, which `finalize_model_grads` does for parameters marked `sequence_parallel`.
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class TorchNorm:
    """Builds `torch.nn.LayerNorm` or `torch.nn.RMSNorm`, as `config.normalization` says."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> torch.nn.Module:
        norm = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        module = norm(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module
