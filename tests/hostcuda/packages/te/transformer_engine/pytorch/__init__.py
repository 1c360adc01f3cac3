# ruff: noqa: F401
"""The part of Transformer Engine for torch that megatron-core and this project use."""

from . import ops, optimizers
from .attention import DotProductAttention
from .distributed import CudaRNGStatesTracker, checkpoint
from .fp8 import fp8_autocast, fp8_model_init
from .module import GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm
