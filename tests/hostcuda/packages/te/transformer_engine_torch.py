"""Transformer Engine's extension module: megatron-core imports it at load, and calls it for context parallelism."""


def thd_get_partitioned_indices(cu_seqlens: object, total_tokens: int, world_size: int, rank: int) -> None:
    """Tokens of packed sequences by context-parallel rank."""
    raise NotImplementedError("thd_get_partitioned_indices")
