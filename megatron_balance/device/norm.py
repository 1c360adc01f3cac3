"""Layer norms for machines without apex and Transformer Engine, and one that megatron-core does not have.

megatron-core's fallback (`WrappedTorchNorm`) refuses sequence parallelism. All that is missing there is a mark on the
parameters: each tensor-parallel rank sees only its part of the sequence, so their gradients have to be summed over
the tensor-parallel group, which `finalize_model_grads` does for parameters marked `sequence_parallel`.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class TorchNorm:
    """Builds `torch.nn.LayerNorm` or `torch.nn.RMSNorm`, as `config.normalization` says."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> torch.nn.Module:
        norm = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        module = norm(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module


class AcrossHeadsNorm(torch.nn.Module):
    """RMS norm of a token's queries, or keys, of all heads together (OLMoE, section 2; OLMo 2).

    Tensor-parallel ranks have a part of the heads: they add up their squares.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, heads: int, tp_group: dist.ProcessGroup) -> None:
        """
        Args:
            hidden_size: channels of a head.
            heads: on all tensor-parallel ranks together.
        """
        super().__init__()
        self.channels, self.eps, self.tp_group = heads * hidden_size, config.layernorm_epsilon, tp_group
        mine = heads // tp_group.size() * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(mine, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """
        Args:
            heads: of this rank, [s, b, heads, channels].
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
