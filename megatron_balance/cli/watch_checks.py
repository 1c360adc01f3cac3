"""Checks of flags for what one watches: profilers, memory, Weights & Biases. Called by checks.py."""

from collections.abc import Mapping
from typing import Any

from megatron_balance.device.machine import Machine


def watching(values: Mapping[str, Any], machine: Machine, notices: list[str]) -> None:
    """Check the flags of logs and profilers; add a notice for those without an effect on this machine.

    Raises:
        ValueError: something cannot be watched this way; the error names the remedy.
    """
    if values["profile"]:
        _profile(values, machine, notices)
    if values["record_memory_history"] and not machine.cuda:
        raise ValueError("--record-memory-history: records memory of a CUDA device; leave it out on a CPU")
    if values["log_device_memory_used"] and not machine.cuda:
        notices.append("--log-device-memory-used has no effect without CUDA")
    every = values["log_memory_interval"]
    line = values["log_interval"]
    if every is not None and every % line:
        raise ValueError(f"--log-memory-interval {every}: must be a multiple of --log-interval {line}")
    if values["manual_gc_interval"] < 0:
        raise ValueError(f"--manual-gc-interval {values['manual_gc_interval']}: give 0 (never) or more")
    if values["wandb_project"]:
        _wandb(values, machine)


def _profile(values: Mapping[str, Any], machine: Machine, notices: list[str]) -> None:
    start = values["profile_step_start"]
    end = values["profile_step_end"]
    if not 0 <= start < end:
        raise ValueError(f"--profile-step-start {start} --profile-step-end {end}: give 0 or more, and a later end")
    if values["use_pytorch_profiler"] and values["tensorboard_dir"] is None:
        raise ValueError("--use-pytorch-profiler: also give --tensorboard-dir, where it writes traces")
    if not values["use_pytorch_profiler"] and not machine.cuda:
        raise ValueError("--profile: starts CUDA's profiler; on a CPU, also give --use-pytorch-profiler")
    absent = [rank for rank in values["profile_ranks"] if not 0 <= rank < machine.world_size]
    if absent:
        notices.append(f"--profile-ranks {' '.join(map(str, absent))}: no such rank among {machine.world_size}")


def _wandb(values: Mapping[str, Any], machine: Machine) -> None:
    flag = f"--wandb-project {values['wandb_project']}"
    if not machine.wandb:
        raise ValueError(f"{flag}: needs the package wandb; pip install wandb, or leave the flag out")
    if values["wandb_exp_name"] == "":
        raise ValueError("--wandb-exp-name: is empty; give the run a name, or leave the flag out")
    if not (values["wandb_save_dir"] or values["save"]):
        raise ValueError(f"{flag}: also give --wandb-save-dir or --save, for its local files")
