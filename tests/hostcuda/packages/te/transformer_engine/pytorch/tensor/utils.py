"""What megatron-core does to parameters in low precision."""

from typing import Any


def replace_raw_data(tensor: Any, new_raw_data: Any) -> None:
    """Give a parameter other memory."""
    raise NotImplementedError("replace_raw_data")


def cast_master_weights_to_fp8(
    model_weights: list,
    master_weights: list,
    start_offsets: list,
    group: Any,
    fsdp_shard_model_weights: Any = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Write main parameters into those of the model."""
    if model_weights:
        raise NotImplementedError("cast_master_weights_to_fp8")


def post_all_gather_processing(model_weights: list) -> None:
    """Finish parameters that were gathered."""
    if model_weights:
        raise NotImplementedError("post_all_gather_processing")
