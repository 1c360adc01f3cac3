"""Check that reading a checkpoint runs no code from it, before any reader unpickles it without restriction.

Three readers of the torch_dist format would call any function that a file names:

    .metadata      torch.distributed.checkpoint: pickle.load
    *.distcp       its load planner: torch.load(weights_only=False) on every entry that is not a tensor
    common.pt      megatron.core: torch.load with a default that an environment variable switches off

`read_metadata` unpickles .metadata with an allow-list. All other objects are read once with `weights_only=True`. A file
that passes is also safe for the unrestricted readers, as long as it does not change.
"""

import io
import json
import pickle
from pathlib import Path, PosixPath
from typing import Any, ClassVar

# Registers megatron-core's checkpoint classes with torch's restricted unpickler
import megatron.core  # noqa: F401
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.serialization import _get_layout, get_unsafe_globals_in_checkpoint, safe_globals

from megatron_balance.checkpoint.manifest import Damaged, is_plain_name, reading
from megatron_balance.messages import cleaned

COMMON, COMMON_OBJECT = "common.pt", "common_state/shard_0_1"
"""The file, and since 0.19 the object, that all ranks share."""

METADATA, CONFIG = ".metadata", "metadata.json"
"""Files that describe the whole checkpoint."""

_CONFIG_WITHOUT_COMMON = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_CONFIG = _CONFIG_WITHOUT_COMMON | {"common_backend": "torch", "common_backend_version": 1}
"""Content of metadata.json: with a common.pt, and without one, as megatron-core 0.19 writes it."""

_CLASSES = (
    *(Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties, StorageMeta),
    *(MetadataIndex, _StorageInfo, SavePlan, WriteItem, BytesIOWriteData, TensorWriteData),
)
_GLOBALS: dict[tuple[str, str], Any] = {
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{
        (known.__module__, known.__name__): known
        for known in (*_CLASSES, torch.Size, _get_layout, _MEM_FORMAT_ENCODING, WriteItemType)
    },
    # Python 3.13 moved the class
    ("pathlib._local", "PosixPath"): PosixPath,
    ("pathlib", "PosixPath"): PosixPath,
}
"""Classes and functions that .metadata may refer to, by module and name. None of them runs code from its arguments."""

_PythonUnpickler: Any = pickle._Unpickler


class _MetadataUnpickler(_PythonUnpickler):
    """Unpickler with an allow-list. It is Python's, because the one in C would let a file change classes themselves."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise ValueError(f"asks for {module}.{name}, which no checkpoint needs")
        return _GLOBALS[module, name]

    def load_build(self) -> None:
        if type(self.stack[-2]) not in _CLASSES:
            raise ValueError(f"fills a {type(self.stack[-2]).__name__}, which no checkpoint needs")
        super().load_build()

    dispatch: ClassVar[dict[int, Any]] = _PythonUnpickler.dispatch | {pickle.BUILD[0]: load_build}


class Foreign:
    """Stands in for an object of a class of Megatron's that this version lacks, such as a new enumeration's member."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def check_pickles(directory: Path) -> None:
    """Check that reading this checkpoint runs no code from it, by reading everything but the tensors once. Raise
    Damaged, which names the file and the code, if a file refers to code or is not in torch_dist's format."""
    metadata = read_metadata(directory)
    # Since 0.19 the content of common.pt is one of the objects, but megatron-core still reads a common.pt if it exists
    if _read_config(directory) == _CONFIG or (directory / COMMON).exists():
        _load_safe(directory / COMMON, "", _read(directory / COMMON))
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            _load_safe(*_object(directory, metadata, name))


def read_metadata(directory: Path) -> Metadata:
    """Return the content of .metadata, after checking that the files have room for all entries. Raise Damaged if a file
    is absent or not in torch_dist's format, or .metadata contains what no checkpoint needs."""
    _read_config(directory)
    path = directory / METADATA
    content = _read(path)
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        kinds = {type(metadata)}
        kinds |= {type(entry) for entry in (*metadata.state_dict_metadata.values(), *metadata.storage_data.values())}
        if unknown := kinds - {Metadata, TensorStorageMetadata, BytesStorageMetadata, _StorageInfo}:
            raise ValueError(f"has a {unknown.pop().__name__} in place of a checkpoint's metadata")
        check_places(directory, metadata)
        return metadata
    except Damaged:
        raise
    except Exception as error:
        raise Damaged(path, f"is not safe to read: {cleaned(error, 400)}") from error


def _read_config(directory: Path) -> Any:
    path = directory / CONFIG
    content = _read(path)
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"is not JSON: {error}") from error
    if config not in (_CONFIG, _CONFIG_WITHOUT_COMMON):
        raise Damaged(path, f"has {str(config)[:200]} instead of {_CONFIG}")
    return config


def check_places(directory: Path, metadata: Metadata) -> None:
    """Raise Damaged unless all entries are, unencoded, inside the directory's files."""
    sizes = dict[str, int]()
    for index, info in metadata.storage_data.items():
        # Descriptors would let a reader decode the bytes into others than those that are checked here
        if getattr(info, "transform_descriptors", None):
            raise Damaged(directory / METADATA, f"{index.fqn} is encoded, which no checkpoint needs")
        if info.relative_path not in sizes:
            if not is_plain_name(info.relative_path):
                raise Damaged(directory / METADATA, f"{index.fqn} is in {info.relative_path!r}, elsewhere")
            with reading(directory / info.relative_path) as path:
                sizes[info.relative_path] = path.stat().st_size
        if not 0 <= info.offset <= info.offset + info.length <= sizes[info.relative_path]:
            span = f"bytes {info.offset} to {info.offset + info.length} of {sizes[info.relative_path]}"
            raise Damaged(directory / info.relative_path, f"cannot hold {index.fqn}: {span}")


def read_common(directory: Path) -> dict[str, Any]:
    """Return the state that all ranks share: the content of common.pt or, since megatron-core 0.19, of an object. A
    class of Megatron's that this version lacks becomes `Foreign`. Raise Damaged if it is absent, or refers to code."""
    path = directory / COMMON
    if path.exists():
        return _load_safe(path, "", _read(path), foreign=True)
    found = _load_safe(*_object(directory, read_metadata(directory), COMMON_OBJECT), foreign=True)
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], dict):
        raise Damaged(path, f"{COMMON_OBJECT} is {type(found).__name__} instead of a list of one dict")
    return found[0]


def _object(directory: Path, metadata: Metadata, name: str) -> tuple[Path, str, bytes]:
    """Return the file with an object, the object's name and its content."""
    info = metadata.storage_data.get(MetadataIndex(name))
    if info is None:
        raise Damaged(directory / METADATA, f"does not say where {name} is")
    path = directory / info.relative_path
    return path, name, _read(path, info.offset, info.length)


def _load_safe(path: Path, name: str, content: bytes, foreign: bool = False) -> Any:
    """Return what torch's restricted unpickler reads from `content`, or raise Damaged. With `foreign`, objects of
    unknown classes of Megatron's become `Foreign`."""
    file = io.BytesIO(content)
    try:
        unknown = get_unsafe_globals_in_checkpoint(file) if foreign else []
        file.seek(0)
        replaced: Any = [(type(kind, (Foreign,), {}), kind) for kind in unknown if kind.startswith("megatron.")]
        with safe_globals(replaced):
            # The explicit argument overrides TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch surrounds the reason with advice to load the file anyway
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition(". ")[0].partition("\n")[0]
        if foreign and "Unsupported global" in reason:
            reason += "; save the checkpoint again without it"
        raise Damaged(path, f"{name} is not safe to read: {type(error).__name__}: {reason}".lstrip()) from error


def _read(path: Path, offset: int = 0, length: int = -1) -> bytes:
    """Return `length` bytes from `offset`; default: the whole file."""
    with reading(path), open(path, "rb") as file:
        file.seek(offset)
        return file.read(length)
