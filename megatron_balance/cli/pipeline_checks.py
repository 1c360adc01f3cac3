"""Checks of how pipeline stages share the layers. Called by checks.py."""

import re
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_balance.config.flags import flag_of

MAX_DIGITS = 4
"""Of the numbers in a layout; megatron-core writes repetitions out."""

OTHER_LAYOUTS = (
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)


def virtual_pipeline_size(values: Mapping[str, Any]) -> int | None:
    """Return the number of model chunks in each pipeline stage; None without the interleaved schedule."""
    if values["pipeline_model_parallel_layout"] is not None:
        return _layout(values)
    stages = values["pipeline_model_parallel_size"]
    ends = ("embedding", "loss")
    layers = values["num_layers"] + sum(values[f"account_for_{end}_in_pipeline_split"] for end in ends)
    uneven = values["num_layers_in_first_pipeline_stage"] or values["num_layers_in_last_pipeline_stage"]
    if layers % stages and not uneven:
        raise ValueError(f"--num-layers {layers}: must be a multiple of --pipeline-model-parallel-size {stages}")
    names = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    wanted = {name: values[name] for name in names if values[name] is not None}
    if not wanted:
        return None
    if len(wanted) > 1:
        raise ValueError(f"{' and '.join(map(flag_of, wanted))}: give one of them")
    ((name, value),) = wanted.items()
    if stages == 1:
        raise ValueError(f"{flag_of(name)} {value}: needs --pipeline-model-parallel-size above 1")
    if stages == 2 and not values["overlap_p2p_comm"]:
        # In a batch, the two messages between the same two ranks could not be distinguished
        raise ValueError(
            "--no-overlap-p2p-communication: needs --pipeline-model-parallel-size above 2 with the interleaved schedule"
        )
    if value < 1 or uneven or layers // stages % value:
        raise ValueError(f"{flag_of(name)} {value}: must divide the {layers // stages} layers of a stage")
    return value if name == "num_virtual_stages_per_pipeline_rank" else layers // stages // value


def _layout(values: Mapping[str, Any]) -> int | None:
    """Check `--pipeline-model-parallel-layout` and return the number of model chunks in each stage, as above."""
    text = values["pipeline_model_parallel_layout"]
    stages = values["pipeline_model_parallel_size"]
    flag = f"--pipeline-model-parallel-layout {text}"
    for name in OTHER_LAYOUTS:
        if values[name]:
            raise ValueError(f"{flag_of(name)}: not with {flag}; leave one of them out")
    for end in ("first", "last"):
        if values[f"num_layers_in_{end}_pipeline_stage"]:
            raise ValueError(f"--decoder-{end}-pipeline-num-layers: not with {flag}; leave one of them out")
    if any(len(number) > MAX_DIGITS for number in re.findall(r"\d+", text)):
        raise ValueError(f"{flag[:200]}: repeats a part more often than any model has layers; give smaller numbers")
    try:
        layout = PipelineParallelLayerLayout.from_str(text, stages)
        layout.validate_layer_layout(values["num_layers"], values["mtp_num_layers"])
    except (AssertionError, IndexError) as error:
        raise ValueError(
            f"{flag}: {error}; describe --pipeline-model-parallel-size {stages} stages or a multiple, with E, a t for "
            "each of --num-layers, an m for each of --mtp-num-layers, and L"
        ) from error
    if values["mtp_num_layers"] and LayerType.mtp not in layout.layout[-1][-1]:
        raise ValueError(f"{flag}: puts multi-token prediction before the last stage; write m before L")
    chunks = layout.virtual_pipeline_model_parallel_size
    if chunks > 1 and stages == 1:
        raise ValueError(f"{flag}: describes {chunks} stages, but --pipeline-model-parallel-size is 1; raise it")
    if chunks > 1 and stages == 2 and not values["overlap_p2p_comm"]:
        raise ValueError(f"--no-overlap-p2p-communication: needs --pipeline-model-parallel-size above 2 with {flag}")
    return chunks if chunks > 1 else None


def prediction(values: Mapping[str, Any], virtual: int) -> None:
    """Check what multi-token prediction requires, with `virtual` model chunks in each pipeline stage."""
    flag = f"--mtp-num-layers {values['mtp_num_layers']}"
    positions = values["position_embedding_type"]
    if positions == "learned_absolute":
        raise ValueError(
            f"--position-embedding-type {positions}: {flag} shifts tokens by a place; use rope (or none for a model "
            "without positions)"
        )
    if values["recompute_granularity"] == "full" and (values["recompute_method"], values["recompute_num_layers"]) != (
        *("uniform", 1),
    ):
        raise ValueError(
            f"--recompute-method {values['recompute_method']} --recompute-num-layers {values['recompute_num_layers']}: "
            f"with {flag} use --recompute-method uniform --recompute-num-layers 1"
        )
    ends = sum(values[f"account_for_{end}_in_pipeline_split"] for end in ("embedding", "loss"))
    chunks = values["pipeline_model_parallel_size"] * virtual
    if values["account_for_loss_in_pipeline_split"] and values["num_layers"] + ends == chunks:
        raise ValueError(
            f"--account-for-loss-in-pipeline-split: the last pipeline stage would have no layer, which {flag} copies; "
            "leave it out"
        )
