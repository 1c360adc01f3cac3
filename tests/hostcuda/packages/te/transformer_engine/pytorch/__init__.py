"""The part of Transformer Engine for torch that megatron-core uses."""

from . import ops, optimizers
from .attention import DotProductAttention
from .cpu_offload import get_cpu_offload_context
from .cross_entropy import parallel_cross_entropy
from .distributed import CudaRNGStatesTracker, checkpoint
from .graph import make_graphed_callables
from .module import Fp8Padding, Fp8Unpadding, GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm
from .permutation import (
    moe_permute,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from .quantization import autocast, fp8_autocast, fp8_model_init, quantized_model_init

__all__ = [
    "CudaRNGStatesTracker",
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "autocast",
    "checkpoint",
    "fp8_autocast",
    "fp8_model_init",
    "get_cpu_offload_context",
    "make_graphed_callables",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "ops",
    "optimizers",
    "parallel_cross_entropy",
    "quantized_model_init",
]
