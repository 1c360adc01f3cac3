"""Facts that all ranks of a job must share. The ranks compare them before anything is built."""

import dataclasses
import enum
import importlib.metadata
import itertools
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_balance.config.run_config import RunConfig
from megatron_balance.files.reading import content_digest
from megatron_balance.job.agreement import CONSEQUENCE, Facts
from megatron_balance.job.groups import Topology

MAY_DIFFER = {
    "balance_log_dir": "each rank writes to its own files",
    "balance_timeline": "each rank writes to its own file",
    "moe_routing_trace_path": "each rank writes to its own file",
    **dict.fromkeys(("tensorboard_dir", "wandb_save_dir", "memory_snapshot_path"), "one rank writes"),
    "data_cache_path": "every node may have its own caches of the same data",
    "cluster": "only --dry-run reads it",
    "num_workers": "only the loading time depends on it",
    "num_dataset_builder_threads": "only the indexing time depends on it",
}
"""Settings that may differ between ranks, by field name, with the reason."""

PACKAGES = ("torch", "megatron-core", "numpy", "numba", "scipy", "transformer-engine", "apex", "emerging-optimizers")

FILES = (
    *(("balance", name) for name in ("balance_profile", "balance_calibrate", "moe_routing_replay_path")),
    *(("tokenizer", name) for name in ("tokenizer_model", "tokenizer_metadata", "vocab_file", "merge_file")),
)
"""Section and field of settings that may name a file or directory whose content affects the run."""

MODULES = (
    ("balance", "balance_policy"),
    *(("comm", name) for name in ("moe_comm_alltoall", "moe_comm_codec", "moe_comm_order")),
)
"""Section and field of settings that may name `module:Class`."""

PROGRAM = Path(__file__).resolve().parents[1]
ENTRY_POINT = PROGRAM.parent / "pretrain_gpt_moe.py"


def gather(config: RunConfig, flags: Facts, topology: Topology) -> Facts:
    """Return the facts that this rank would train with; `flags` has the value of every flag as it is written."""
    facts = {name: value for name, value in flags.items() if name[2:].replace("-", "_") not in MAY_DIFFER}
    facts["the number of processes on a node (LOCAL_WORLD_SIZE, or --moe-comm-node-size)"] = str(topology.node_size)
    facts["the version of Python"] = platform.python_version()
    facts |= {f"the version of {package}": _version(package) for package in PACKAGES}
    for part, name in FILES:
        path = getattr(getattr(config, part), name)
        if path is not None and path not in ("builtin", "auto", "off", "on"):
            facts[f"the content of --{name.replace('_', '-')} {path}"] = content_digest(Path(path))
    for part, name in MODULES:
        module, colon, _ = getattr(getattr(config, part), name).partition(":")
        if colon:
            facts[f"the source of {module}"] = source_of(module)
    for path in sorted([*PROGRAM.rglob("*.py"), *PROGRAM.rglob("*.yaml"), ENTRY_POINT]):
        if path.is_file():
            facts[f"the source of {path.relative_to(PROGRAM.parent)}"] = content_digest(path)
    # Also settings in their final form: a missing package changes some of them without a flag
    for part in dataclasses.fields(config):
        section = getattr(config, part.name)
        for field in dataclasses.fields(section):
            if field.name not in MAY_DIFFER:
                facts[f"{CONSEQUENCE}{part.name}.{field.name}"] = _text(getattr(section, field.name))
    return facts


def _version(package: str) -> str:
    if package == "torch":
        # Includes the build's CUDA version, which the package metadata lack
        return torch.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _text(value: Any) -> str:
    """Return a text that is equal in all processes whose settings are equal."""
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return str(value)
    if isinstance(value, enum.Enum):
        return value.name
    return getattr(value, "__qualname__", type(value).__qualname__)


def source_of(module: str) -> str:
    """Return the `content_digest` of a module's file, found without importing the module or its packages."""
    places = None
    path = None
    for name in itertools.accumulate(module.split("."), "{}.{}".format):
        specs = (finder.find_spec(name, places) for finder in sys.meta_path)
        found = next(filter(None, specs), None)
        if found is None:
            return "not found"
        places = found.submodule_search_locations
        path = found.origin
    return content_digest(Path(path)) if path is not None else "no file"
