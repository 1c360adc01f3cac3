"""Layer norms for machines without apex and Transformer Engine, and a norm that megatron-core does not have.

megatron-core's fallback (`WrappedTorchNorm`) refuses sequence parallelism, although it needs only a mark on the
parameters. Each tensor-parallel rank sees only its part of the sequence, so the gradients must be summed over the
tensor-parallel group. `finalize_model_grads` does so for parameters marked `sequence_parallel`.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class TorchNorm:
    """Builds the module that `config.normalization` names: `torch.nn.LayerNorm` or `torch.nn.RMSNorm`."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> torch.nn.Module:
        norm = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        module = norm(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module


class AcrossHeadsNorm(torch.nn.Module):
    """RMS norm over all heads of a token's queries or keys (OLMoE, section 2; OLMo 2).

    Each tensor-parallel rank has part of the heads, so the ranks all-reduce the sum of squares.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, heads: int, tp_group: dist.ProcessGroup) -> None:
        """
        Args:
            hidden_size: channels of a head.
            heads: number of heads on all tensor-parallel ranks together.
        """
        super().__init__()
        self.channels = heads * hidden_size
        self.eps = config.layernorm_epsilon
        self.tp_group = tp_group
        mine = heads // tp_group.size() * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(mine, dtype=config.params_dtype))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """
        Args:
            heads: this rank's heads [s, b, heads, channels].
        """
        single = heads.float()
        squares = single.square().sum((-2, -1), keepdim=True)
        if self.tp_group.size() > 1:
            squares = differentiable.all_reduce(squares, group=self.tp_group)
        normal = single * torch.rsqrt(squares / self.channels + self.eps)
        return self.weight.view(heads.shape[-2:]) * normal.to(heads.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
