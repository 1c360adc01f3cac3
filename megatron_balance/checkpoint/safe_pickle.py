"""Check that reading a checkpoint runs no code from it, before any reader unpickles it without restriction.

Three readers of the torch_dist format would call any function that a file names:

    .metadata      torch.distributed.checkpoint: pickle.load
    *.distcp       its load planner: torch.load(weights_only=False) on every entry that is not a tensor
    common.pt      megatron.core: torch.load with a default that an environment variable switches off

`read_common` reads the last one in its place, and the object that replaced it in megatron-core 0.19.

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
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megatron_balance.checkpoint.manifest import Damaged, is_plain_name
from megatron_balance.checkpoint.metadata_reader import MetadataReader

COMMON, COMMON_OBJECT = "common.pt", "common_state/shard_0_1"
"""The file, and since 0.19 the object, that all ranks share."""

MAX_METADATA_BYTES = 1 << 30
"""Limit for .metadata. A shard of a tensor takes about 300 bytes, so there is room for three million shards."""

MAX_OBJECT_BYTES = 1 << 30
"""Limit for an object, such as a generator's state. Tensors have no limit."""

_CONFIG_WITHOUT_COMMON = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_CONFIG = _CONFIG_WITHOUT_COMMON | {"common_backend": "torch", "common_backend_version": 1}
"""Content of metadata.json: with a common.pt, and without one, as megatron-core 0.19 writes it."""


class Foreign:
    """Stands in for an object of a class of Megatron's that this version lacks, such as a new enumeration's member."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def check_pickles(directory: str | Path, foreign: bool = False) -> Metadata:
    """Check that reading this checkpoint runs no code from it. This reads everything but the tensors once.

    Args:
        foreign: whether objects may have unknown classes of Megatron's, which is safe for `read_common` only.

    Returns:
        The content of .metadata.

    Raises:
        Damaged: a file is not in torch_dist's format, or refers to code; the message names the file and the code.
    """
    config = check_config(directory)
    # Since 0.19 the content of common.pt is one of the objects, but megatron-core still reads a common.pt if it exists
    if config.keys() == _CONFIG.keys() or (Path(directory) / COMMON).exists():
        check_common(directory, foreign)
    metadata = check_metadata(Path(directory) / ".metadata")
    check_objects(directory, metadata, foreign)
    return metadata


def read_common(directory: str | Path, metadata: Metadata | None = None) -> dict[str, Any]:
    """Return what all ranks share: the content of common.pt or, since megatron-core 0.19, of an object.

    Args:
        metadata: the content of .metadata, if it is read already.

    Raises:
        Damaged: it is absent, or refers to code; a class of Megatron's that this version lacks becomes `Foreign`.
    """
    directory = Path(directory)
    if (directory / COMMON).exists():
        return check_common(directory, foreign=True)
    metadata = metadata or check_metadata(directory / ".metadata")
    info = metadata.storage_data.get(MetadataIndex(COMMON_OBJECT))
    if info is None or not is_plain_name(info.relative_path):
        raise Damaged(directory / COMMON, f"is absent, and .metadata has no {COMMON_OBJECT}")
    path = directory / info.relative_path
    content = _read(path, info.offset, min(info.length, MAX_OBJECT_BYTES), whole=False)
    found = _load_safe(path, COMMON_OBJECT, io.BytesIO(content), foreign=True)
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], dict):
        raise Damaged(path, f"{COMMON_OBJECT} is {type(found).__name__!s} instead of a list of one dict")
    return found[0]


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


def check_common(directory: str | Path, foreign: bool = False) -> Any:
    """Return the content of common.pt.

    Raises:
        Damaged: it holds more than tensors, plain containers and classes that megatron.core registers.
    """
    path = Path(directory) / COMMON
    return _load_safe(path, "", io.BytesIO(_read(path, 0, MAX_OBJECT_BYTES)), foreign)


def check_metadata(path: str | Path) -> Metadata:
    """Return the content of .metadata without unpickling it; raise Damaged if it contains anything unexpected."""
    return MetadataReader(Path(path), _read(Path(path), 0, MAX_METADATA_BYTES)).load()


def check_objects(directory: str | Path, metadata: Metadata, foreign: bool = False) -> None:
    """Raise Damaged unless all entries are inside the directory's files, and the objects are safe to read."""
    directory = Path(directory)
    sizes = dict[str, int]()
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
            _load_safe(path, name, io.BytesIO(_read(path, info.offset, info.length, whole=False)), foreign)


def _load_safe(path: Path, name: str, content: io.BytesIO, foreign: bool) -> Any:
    """Return what torch's restricted unpickler reads from `content`, or raise Damaged."""
    try:
        unknown = get_unsafe_globals_in_checkpoint(content) if foreign else []
        content.seek(0)
        replaced: Any = [(type(kind, (Foreign,), {}), kind) for kind in unknown if kind.startswith("megatron.")]
        with safe_globals(replaced):
            # The explicit argument overrides TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD
            return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch surrounds the reason with advice to load the file anyway
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition(". ")[0].partition("\n")[0]
        what = f"{name} is" if name else "is"
        if foreign and "Unsupported global" in reason:
            reason += "; save the checkpoint again without it"
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
