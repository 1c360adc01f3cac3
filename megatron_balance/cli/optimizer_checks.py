"""Checks of the flags of Muon (build/optimizer.py)."""

from megatron.core.optimizer import OptimizerConfig
from packaging.version import Version

from megatron_balance.cli.command_line import CommandLine
from megatron_balance.config.flags import flag_of

FLAG = "--optimizer muon"

NEWER = hasattr(OptimizerConfig, "muon_nesterov")
"""Whether megatron-core uses the names of emerging-optimizers 0.2 and later; 0.16 uses those of 0.1."""

RELEASE = "0.2.0" if NEWER else "0.1.0"
INSTALL = f"pip install 'emerging_optimizers @ git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers.git@v{RELEASE}'"


def check_optimizer(line: CommandLine) -> None:
    """Refuse what Muon cannot do, and note what depends on the layout."""
    nesterov = "muon_nesterov" if NEWER else "muon_use_nesterov"
    if line.optimizer != "muon":
        for name in ("muon_split_qkv", nesterov, "muon_coefficient_type"):
            if name in line.given:
                line.notices.append(f"{flag_of(name)} has no effect without {FLAG}")
        return
    reasons = {
        "fp16": "megatron-core's Muon does not scale losses; use --bf16",
        "use_distributed_optimizer": "Muon needs whole matrices, and that optimizer cuts them anywhere; leave it out",
    }
    for name in (name for name in reasons if getattr(line, name)):
        raise ValueError(f"{flag_of(name)}: not with {FLAG}: {reasons[name]}")
    if line.muon_num_ns_steps < 1:
        raise ValueError(f"{line['muon_num_ns_steps']}: give 1 or more")
    if not 0 <= line.muon_momentum < 1:
        raise ValueError(f"{line['muon_momentum']}: give a number from 0 to below 1")
    tensor = line.tensor_model_parallel_size
    shards = max(tensor, line.expert_tp)
    if line.muon_split_qkv and line.group_query_attention and line.num_query_groups < tensor:
        reason = f"a rank has no whole query group of {line['num_query_groups']}"
        raise ValueError(f"{line['tensor_model_parallel_size']}: {reason}; also give --muon-no-split-qkv")
    if shards > 1 and line.muon_tp_mode == "blockwise":
        line.notices.append(
            f"{FLAG}: each tensor-parallel rank orthogonalizes its part of a matrix alone, so the run depends on their "
            "number; --muon-tp-mode duplicated does not"
        )
    elif shards > 1 and not line.perform_initialization:
        reason = "megatron-core notes which axis of a matrix is divided when it initializes it"
        raise ValueError(f"--no-initialization: not with {line['muon_tp_mode']}, because {reason}; leave it out")
    _check_package(line.machine.emerging)


def _check_package(version: str | None) -> None:
    if version is None:
        raise ValueError(f"{FLAG}: needs the package emerging-optimizers, from its repository: {INSTALL}")
    number = Version(version)
    if (number.release[:2] < (0, 2)) if NEWER else (number.release[:2] != (0, 1)):
        raise ValueError(f"{FLAG}: this megatron-core cannot use emerging-optimizers {version}; {INSTALL}")
