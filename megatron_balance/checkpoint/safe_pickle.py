"""Check that reading a checkpoint runs no code from it, before any reader unpickles it without restriction.

Three readers of the torch_dist format would call any function that a file names:

    .metadata      torch.distributed.checkpoint: pickle.load
    *.distcp       its load planner: torch.load(weights_only=False) on every entry that is not a tensor
    common.pt      megatron.core: torch.load with a default that an environment variable switches off

`MetadataReader` reads .metadata and accepts only the few kinds of objects that such a file contains. The others are
read once with `weights_only=True`. A file that passes is also safe for the unrestricted readers, as long as it does not
change. The checks concern code only: an object within its size limit may still require more memory than there is.
"""

import io
import json
from pathlib import Path
from typing import Any

# Registers megatron-core's checkpoint classes with torch's restricted unpickler
import megatron.core  # noqa: F401
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from megatron_balance.checkpoint.manifest import Damaged, is_plain_name
from megatron_balance.checkpoint.metadata_reader import MetadataReader

MAX_METADATA_BYTES = 1 << 30
"""Limit for .metadata. A shard of a tensor takes about 300 bytes, so there is room for three million shards."""

MAX_OBJECT_BYTES = 1 << 30
"""Limit for an object, such as a generator's state. Tensors have no limit."""

_CONFIG_WITHOUT_COMMON = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_CONFIG = _CONFIG_WITHOUT_COMMON | {"common_backend": "torch", "common_backend_version": 1}
"""Content of metadata.json: with a common.pt, and without one, as megatron-core 0.19 writes it."""


def check_pickles(directory: str | Path) -> Metadata:
    """Check that reading this checkpoint runs no code from it. This reads everything but the tensors once.

    Returns:
        The content of .metadata.

    Raises:
        Damaged: a file is not in torch_dist's format, or refers to code; the message names the file and the code.
    """
    config = check_config(directory)
    # Since 0.19 the content of common.pt is one of the objects, but megatron-core still reads a common.pt if it exists
    if config.keys() == _CONFIG.keys() or (Path(directory) / "common.pt").exists():
        check_common(directory)
    metadata = check_metadata(Path(directory) / ".metadata")
    check_objects(directory, metadata)
    return metadata


def check_config(directory: str | Path) -> dict[str, Any]:
    """Return the content of metadata.json; raise Damaged unless it selects the readers of the torch_dist format."""
    path = Path(directory) / "metadata.json"
    raw = _read(path, 0, 1 << 16)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Damaged(path, f"is not JSON: {error}") from error
    if content not in (_CONFIG, _CONFIG_WITHOUT_COMMON):
        raise Damaged(path, f"has {str(content)[:200]} instead of {_CONFIG}")
    return content


def check_common(directory: str | Path) -> None:
    """Raise Damaged if common.pt holds more than tensors, plain containers and classes that megatron.core registers."""
    path = Path(directory) / "common.pt"
    _check_safe(path, "", io.BytesIO(_read(path, 0, MAX_OBJECT_BYTES)))


def check_metadata(path: str | Path) -> Metadata:
    """Return the content of .metadata without unpickling it; raise Damaged if it contains anything unexpected."""
    return MetadataReader(Path(path), _read(Path(path), 0, MAX_METADATA_BYTES)).load()


def check_objects(directory: str | Path, metadata: Metadata) -> None:
    """Raise Damaged unless all entries are inside the directory's files, and the objects are safe to read."""
    directory, sizes = Path(directory), dict[str, int]()
    for index, info in metadata.storage_data.items():
        if info.relative_path not in sizes:
            if not is_plain_name(info.relative_path):
                raise Damaged(directory / ".metadata", f"{index.fqn} is in {info.relative_path!r}, elsewhere")
            sizes[info.relative_path] = _size(directory / info.relative_path)
        if not 0 <= info.offset <= info.offset + info.length <= sizes[info.relative_path]:
            span = f"bytes {info.offset} to {info.offset + info.length} of {sizes[info.relative_path]}"
            raise Damaged(directory / info.relative_path, f"cannot hold {index.fqn}: {span}")
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            info = metadata.storage_data.get(MetadataIndex(name))
            if info is None:
                raise Damaged(directory / ".metadata", f"does not say where {name} is")
            path = directory / info.relative_path
            if info.length > MAX_OBJECT_BYTES:
                raise Damaged(path, f"{name} takes {info.length} bytes; an object has {MAX_OBJECT_BYTES} at most")
            _check_safe(path, name, io.BytesIO(_read(path, info.offset, info.length, whole=False)))


def _check_safe(path: Path, name: str, content: io.BytesIO) -> None:
    """Raise Damaged unless torch's restricted unpickler reads `content`."""
    try:
        # The explicit argument overrides TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD
        torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch surrounds the reason with advice to load the file anyway
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition(". ")[0].partition("\n")[0]
        what = f"{name} is" if name else "is"
        raise Damaged(path, f"{what} not safe to read: {type(error).__name__}: {reason}") from error


def _size(path: Path) -> int:
    try:
        if not path.is_file():
            raise Damaged(path, "is absent")
        return path.stat().st_size
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error


def _read(path: Path, offset: int, length: int, whole: bool = True) -> bytes:
    """Return `length` bytes from `offset`; with `whole`, return the whole file, of `length` bytes at most."""
    if whole and _size(path) > length:
        raise Damaged(path, f"has {_size(path)} bytes; such a file has at most {length}")
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error
