"""Differences between versions of megatron-core that affect several packages."""

from typing import Any


def number_of(module: Any) -> int:
    """Return the number, from 1, of a transformer layer, MoE layer or router in the whole model. Layers for multi-token
    prediction follow the decoder's. megatron-core 0.19 numbers them from 1."""
    assert module.layer_number is not None
    return module.layer_number + (module.config.num_layers if getattr(module, "is_mtp_layer", False) else 0)
