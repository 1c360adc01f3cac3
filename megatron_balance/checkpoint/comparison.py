"""Which flags may change between the run that saved a checkpoint and a run that loads it, and what follows. Pure.

Every flag has one kind: that of its field in `FIELDS`, or else that of its part of the configuration in `SECTIONS`. All
other flags of the model and of the optimizer may change: they do not affect what is learned.
"""

import enum
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_balance.checkpoint.saved_flags import FUNCTION_FIELDS, NEGATED, WEIGHT_FIELDS, flat
from megatron_balance.config.flags import flag_of, in_words


class Kind(enum.Enum):
    """Consequence of a difference. The first three are errors; for the others, the log shows both values."""

    WEIGHTS = "the checkpoint is of another model"
    """An error, because the weights have other shapes, or another meaning."""

    STATE = "the optimizer's state does not fit"
    """An error if the optimizer's state is loaded; else as `TRAINING`."""

    SCHEDULE = "the learning-rate or weight-decay schedule differs from the checkpoint's"
    """An error unless a flag chooses between the two schedules. `SCHEDULE_FLAGS` are compared, not these fields."""

    FUNCTION = "the model no longer computes what the weights were trained for"
    TRAINING = "the run is not trained as before"
    """A warning if the run resumes, not if it starts anew with the weights."""

    DATA = (
        "the checkpoint's position in the data is kept, but the data are others (--finetune starts at their beginning)"
    )
    """As `TRAINING`."""

    ANY = ""
    """No consequence."""


SECTIONS = {
    "data": Kind.DATA,
    "tokenizer": Kind.DATA,
    "scheduler": Kind.SCHEDULE,
    **dict.fromkeys(("balance", "comm", "ddp", "train", "checkpoint", "log", "profiling", "launch"), Kind.ANY),
}
"""Part of the configuration -> the kind of its flags."""

FIELDS: dict[str, Kind] = {
    **dict.fromkeys(WEIGHT_FIELDS, Kind.WEIGHTS),
    **dict.fromkeys(FUNCTION_FIELDS, Kind.FUNCTION),
    "optimizer": Kind.STATE,
    **dict.fromkeys(("lr", "min_lr", "weight_decay", "train_iters", "train_samples"), Kind.SCHEDULE),
    **dict.fromkeys(
        (
            # What is minimized
            *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"),
            *("moe_router_bias_update_rate", "moe_router_quantile_balancing_ema", "mtp_loss_scaling_factor"),
            *("calculate_per_token_loss", "eod_mask_loss", "allow_ambiguous_pad_tokens", "reset_position_ids"),
            *("reset_attention_mask", "dataloader_inter_document_masking", "moe_router_force_load_balancing"),
            *("moe_router_force_workload", "moe_routing_replay_path", "test_mode"),
            *("moe_comm_codec", "moe_comm_codec_directions"),
            # In which batches and by which steps
            *("global_batch_size", "rampup_batch_size", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"),
            *("sgd_momentum", "muon_momentum", "muon_use_nesterov", "muon_nesterov", "muon_split_qkv"),
            *("muon_scale_mode", "muon_fp32_matmul_prec", "muon_coefficient_type", "muon_num_ns_steps"),
            *("muon_tp_mode", "muon_extra_scale_factor", "decoupled_lr", "decoupled_min_lr"),
            "apply_wd_to_qk_layernorm",
            # In which precision
            *("bf16", "fp16", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
            *("use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype"),
            *("exp_avg_sq_dtype", "grad_reduce_in_fp32", "grad_reduce_in_bf16", "moe_router_dtype"),
            *("attention_softmax_in_fp32", "apply_query_key_layer_scaling", "disable_bf16_reduced_precision_matmul"),
        ),
        Kind.TRAINING,
    ),
    "seq_length": Kind.DATA,
    "seed": Kind.DATA,
    **dict.fromkeys(
        (
            *("data_cache_path", "num_workers", "data_args_path", "per_split_data_args_path", "mmap_bin_files"),
            *("num_dataset_builder_threads", "dataloader_fast_cache_load", "dataloader_defer_npy_index_mmap"),
            *("tokenizer_hf_use_fast", "trust_remote_code", "overlap_moe_expert_parallel_comm"),
        ),
        Kind.ANY,
    ),
}
"""Field -> the kind of its flag, if its section has no kind or another one."""

SCHEDULE_FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction (in samples)",
    "lr_decay_steps": "--lr-decay-iters, --lr-decay-samples or --train-iters (in samples)",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--start-weight-decay or --weight-decay",
    "end_wd": "--end-weight-decay or --weight-decay",
    "wd_incr_steps": "--train-iters or --train-samples (in samples)",
    "wd_incr_style": "--weight-decay-incr-style",
}
"""Settings of megatron-core's scheduler that its state has -> the flags that they follow from."""

STATELESS_FLAGS = {
    "init_lr": "--lr-warmup-init",
    "wsd_decay_steps": "--lr-wsd-decay-iters or --lr-wsd-decay-samples (in samples)",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
}
"""Settings of the scheduler that its state lacks: they always come from the flags."""


class Loaded(NamedTuple):
    """What a run takes from a checkpoint in addition to its weights."""

    progress: bool
    """The iteration, the position in the data, and the random numbers; False: the run starts anew."""
    schedule: bool
    """The state of the learning-rate and weight-decay schedule."""
    optimizer: bool
    """The optimizer's state."""


class Differences(NamedTuple):
    """Differences between the flags of a checkpoint and of a run, as sentences."""

    refused: list[str]
    warned: list[str]


def kind_of(section: str, name: str) -> Kind:
    """Return the kind of the flag of a field in a section of RunConfig."""
    return FIELDS.get(name, SECTIONS.get(section, Kind.ANY))


def compare(saved: Mapping[str, Any], mine: Mapping[str, Mapping[str, Any]], loaded: Loaded) -> Differences:
    """Compare the flags of a checkpoint with those of a run that loads it.

    Args:
        saved: the checkpoint's settings by field name, as `saved_flags.read` returns them.
        mine: the run's settings by section and field, as `saved_flags.sections` returns them.
    """
    flags = flat(mine)
    found: dict[Kind, list[str]] = defaultdict(list)
    for section, fields in mine.items():
        for name, value in fields.items():
            if name in saved and saved[name] != value:
                found[_kind(section, name, saved, flags)].append(_difference(name, value, saved[name]))
    refused = []
    if found[Kind.WEIGHTS]:
        remedy = "leave them out" if flags["use_checkpoint_args"] else "change them, or give --use-checkpoint-args"
        refused.append(f"{_sentence(Kind.WEIGHTS, found)}; {remedy}")
    if loaded.optimizer and found[Kind.STATE]:
        refused.append(
            f"{_sentence(Kind.STATE, found)}; change them, or give --no-load-optim to start with a new state"
        )
    elif loaded.progress:
        found[Kind.TRAINING] += found[Kind.STATE]
    kinds_to_warn_of = [Kind.FUNCTION, *([Kind.TRAINING, Kind.DATA] if loaded.progress else [])]
    warned = [_sentence(kind, found) for kind in kinds_to_warn_of if found[kind]]
    if loaded.schedule:
        _compare_schedules(saved, flags, Differences(refused, warned))
    return Differences(refused, warned)


def _kind(section: str, name: str, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> Kind:
    if name in ("bf16", "fp16") and _is_half(saved) != _is_half(mine):
        # In half precision, the optimizer has float32 copies of the weights
        return Kind.STATE
    if name == "sgd_momentum" and bool(saved.get(name)) != bool(mine[name]):
        # Without momentum, SGD has no state
        return Kind.STATE
    if name == "max_position_embeddings" and mine["position_embedding_type"] != "learned_absolute":
        return Kind.ANY
    rotary = ("rope", "yarn")
    if name == "position_embedding_type" and mine[name] in rotary and saved.get(name) in rotary:
        return Kind.FUNCTION
    if name == "moe_router_enable_expert_bias" and mine[name]:
        # The bias starts at zero, which changes nothing at first
        return Kind.TRAINING
    return kind_of(section, name)


def _is_half(flags: Mapping[str, Any]) -> bool:
    return bool(flags.get("bf16") or flags.get("fp16"))


def _sentence(kind: Kind, found: Mapping[Kind, Sequence[str]]) -> str:
    return f"{kind.value}: {'; '.join(found[kind])}"


def _difference(name: str, mine: Any, saved: Any, flag: str | None = None) -> str:
    flag = flag or flag_of(name)
    if isinstance(mine, bool) and isinstance(saved, bool):
        given = mine != (name in NEGATED)
        return f"{flag} {'given: the checkpoint was saved without it' if given else 'missing: the checkpoint has it'}"
    return f"{flag} {in_words(mine) or 'not given'}: the checkpoint has {in_words(saved) or 'not given'}"


def _compare_schedules(saved: Mapping[str, Any], mine: Mapping[str, Any], found: Differences) -> None:
    """Add the differences of the schedules of the learning rate and of weight decay, by megatron-core's rules."""

    def differing(names: Mapping[str, str]) -> list[str]:
        return [
            _difference(name, mine[name], saved[name], flag)
            for name, flag in names.items()
            if name in saved and saved[name] != mine[name]
        ]

    kept = differing(SCHEDULE_FLAGS)
    batches = [flags.get("global_batch_size") for flags in (mine, saved)]
    if kept and batches[0] != batches[1]:
        # Its default follows from the number of ranks, and a schedule in iterations follows from it
        kept.insert(0, _difference("global_batch_size", *batches))
    follows = "the learning-rate or weight-decay schedule follows the"
    if kept and mine["use_checkpoint_opt_param_scheduler"]:
        found.warned.append(f"{follows} checkpoint: {'; '.join(kept)}")
    elif kept and mine["override_opt_param_scheduler"]:
        found.warned.append(f"{follows} flags: {'; '.join(kept)}")
    elif kept:
        found.refused.append(
            f"{Kind.SCHEDULE.value}: {'; '.join(kept)}; give --override-opt_param-scheduler to use the flags' "
            "schedule, or --use-checkpoint-opt_param-scheduler"
        )
    if own := differing(STATELESS_FLAGS):
        found.warned.append(f"{follows} flags: {'; '.join(own)}")
