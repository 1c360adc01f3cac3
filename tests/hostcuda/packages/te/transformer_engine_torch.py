"""Transformer Engine's extension module: megatron-core imports it at startup, and calls it for context parallelism."""


def thd_get_partitioned_indices(cu_seqlens: object, total_tokens: int, world_size: int, rank: int) -> None:
    """Partition the tokens of packed sequences over context-parallel ranks."""
    raise NotImplementedError("thd_get_partitioned_indices")
