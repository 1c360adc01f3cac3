"""Functions that megatron-core applies to low-precision parameters."""

from typing import Any


def replace_raw_data(tensor: Any, new_raw_data: Any) -> None:
    """Replace a parameter's memory."""
    raise NotImplementedError("replace_raw_data")


def cast_master_weights_to_fp8(
    model_weights: list,
    master_weights: list,
    start_offsets: list,
    group: Any,
    fsdp_shard_model_weights: Any = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Write main parameters into the model's parameters."""
    if model_weights:
        raise NotImplementedError("cast_master_weights_to_fp8")


def post_all_gather_processing(model_weights: list) -> None:
    """Post-process gathered parameters."""
    if model_weights:
        raise NotImplementedError("post_all_gather_processing")
