"""Facts that all ranks of a job must share; the ranks compare them before anything is built."""

import dataclasses
import enum
import importlib.machinery
import importlib.metadata
import platform
import sys
from collections.abc import Iterator
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
"""Settings that may differ between ranks, by field name, and the reason why ranks need not agree on them."""

PACKAGES = ("torch", "megatron-core", "numpy", "numba", "scipy", "transformer-engine", "apex")

FILES = {
    "balance": ("balance_profile", "balance_calibrate"),
    "tokenizer": ("tokenizer_model", "tokenizer_metadata", "vocab_file", "merge_file"),
}
"""Fields that may name a file or directory whose content affects the run, by part of the configuration."""

NO_PATHS = {"balance_profile": ("builtin", "auto"), "balance_calibrate": ("off", "on")}
"""Values of these fields that name no file."""

MODULES = {
    "balance": ("balance_policy",),
    "comm": ("moe_comm_alltoall", "moe_comm_codec", "moe_comm_order"),
}
"""Fields that may name `module:Class`, by part of the configuration."""

PROGRAM = Path(__file__).resolve().parents[1]
ENTRY_POINT = PROGRAM.parent / "pretrain_gpt_moe.py"


def gather(config: RunConfig, flags: Facts, topology: Topology) -> Facts:
    """Return what this rank would train with: flags, versions, digests of files and sources, and resulting settings.

    Args:
        flags: the value of every flag, as it is written.
    """
    flags = {name: value for name, value in flags.items() if name[2:].replace("-", "_") not in MAY_DIFFER}
    nodes = {"the number of processes on a node (LOCAL_WORLD_SIZE, or --moe-comm-node-size)": str(topology.node_size)}
    return {
        **flags,
        **nodes,
        **_versions(),
        **_files(config),
        **_modules(config),
        **_program(),
        **_consequences(config),
    }


def _versions() -> Facts:
    return {"the version of Python": platform.python_version()} | {
        f"the version of {package}": _version(package) for package in PACKAGES
    }


def _version(package: str) -> str:
    if package == "torch":
        # This also names the CUDA version of the build, which the package metadata lack
        return torch.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _files(config: RunConfig) -> Facts:
    named = {name: getattr(getattr(config, part), name) for part, names in FILES.items() for name in names}
    return {
        f"the content of --{name.replace('_', '-')} {path}": content_digest(Path(path))
        for name, path in named.items()
        if path is not None and path not in NO_PATHS.get(name, ())
    }


def _modules(config: RunConfig) -> Facts:
    named = [getattr(getattr(config, part), name) for part, names in MODULES.items() for name in names]
    modules = [name.partition(":")[0] for name in named if ":" in name]
    return {f"the source of {module}": source_of(module) for module in modules}


def _program() -> Facts:
    paths = [*sorted(PROGRAM.rglob("*.py")), *([ENTRY_POINT] if ENTRY_POINT.is_file() else [])]
    return {f"the source of {path.relative_to(PROGRAM.parent)}": content_digest(path) for path in paths}


def _consequences(config: RunConfig) -> Facts:
    """Return all settings as the run reads them, because a missing package changes some that no flag has set."""
    parts = {part.name: getattr(config, part.name) for part in dataclasses.fields(config)}
    return {
        f"{CONSEQUENCE}{part}.{field.name}": _text(getattr(section, field.name))
        for part, section in parts.items()
        for field in dataclasses.fields(section)
        if field.name not in MAY_DIFFER
    }


def _text(value: Any) -> str:
    """Return a text that is equal in all processes with equal settings."""
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
    for name in _prefixes(module):
        found = _found(name, places)
        if found is None:
            return "not found"
        places = found.submodule_search_locations
        path = found.origin
    return content_digest(Path(path)) if path is not None else "no file"


def _prefixes(module: str) -> Iterator[str]:
    """Yield `a`, `a.b` and `a.b.c` for `a.b.c`."""
    parts = module.split(".")
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


def _found(name: str, places: Any) -> importlib.machinery.ModuleSpec | None:
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
    try:
        return next((spec for finder in finders if (spec := finder.find_spec(name, places)) is not None), None)
    except Exception:  # from a third party's finder; importing the module later reports the problem
        return None
