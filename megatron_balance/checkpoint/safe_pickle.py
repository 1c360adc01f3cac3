"""Check that reading a checkpoint runs no code from it, before any reader unpickles it without restriction.

Three readers of the torch_dist format would call any function that a file names:

    .metadata      torch.distributed.checkpoint: pickle.load
    *.distcp       its load planner: torch.load(weights_only=False) on every entry that is not a tensor
    common.pt      megatron.core: torch.load with a default that an environment variable switches off

`read_common` replaces the last reader, also for the object that replaced the file in megatron-core 0.19.

`check_metadata` unpickles .metadata with an allow-list. All other objects are read once with `weights_only=True`. A
file that passes is also safe for the unrestricted readers, as long as it does not change. The checks concern code only:
an object within its size limit may still need more memory than there is.
"""

import dataclasses
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

from megatron_balance.checkpoint.manifest import Damaged, is_plain_name
from megatron_balance.messages import cleaned

COMMON, COMMON_OBJECT = "common.pt", "common_state/shard_0_1"
"""The file, and since 0.19 the object, that all ranks share."""

MAX_BYTES = 1 << 30
"""Limit for .metadata, where a shard of a tensor takes about 300 bytes, and for an object. Tensors have no limit."""

_CONFIG_WITHOUT_COMMON = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_CONFIG = _CONFIG_WITHOUT_COMMON | {"common_backend": "torch", "common_backend_version": 1}
"""Content of metadata.json: with a common.pt, and without one, as megatron-core 0.19 writes it."""

_INSTRUCTIONS = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.TUPLE, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.STACK_GLOBAL),
)
"""Instructions of protocols 4 and 5 that .metadata needs, besides those that `_MetadataUnpickler` restricts."""

_CALLS = (torch.Size, PosixPath, _get_layout, _MEM_FORMAT_ENCODING, WriteItemType)
"""Functions that .metadata may call, with numbers and strings."""

_FIELDS = {
    kind: {field.name for field in dataclasses.fields(kind)}
    for kind in (
        *(Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, TensorProperties, StorageMeta),
        *(MetadataIndex, _StorageInfo, SavePlan, WriteItem, BytesIOWriteData, TensorWriteData),
    )
}
"""Classes of .metadata, and their fields."""
# They name code that would decode the bytes
_FIELDS[_StorageInfo].discard("transform_descriptors")
# megatron-core adds it, and torch before 2.13 does not have it
_FIELDS[Metadata].add("all_local_plans")

_GLOBALS: dict[tuple[str, str], Any] = {
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{(known.__module__, known.__name__): known for known in (*_FIELDS, *_CALLS)},
    # Python 3.13 moved the class
    ("pathlib._local", "PosixPath"): PosixPath,
    ("pathlib", "PosixPath"): PosixPath,
}
"""Classes and functions that .metadata may refer to, by module and name."""


_PythonUnpickler: Any = pickle._Unpickler


class _MetadataUnpickler(_PythonUnpickler):
    """Python's unpickler with an allow-list of instructions, classes, fields and calls.

    The unpickler in C would let a file change attributes of classes, and hash keys that take forever.
    """

    dispatch: ClassVar[dict[int, Any]] = {code[0]: _PythonUnpickler.dispatch[code[0]] for code in _INSTRUCTIONS}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise ValueError(f"asks for {module}.{name}, which no checkpoint needs")
        return _GLOBALS[module, name]

    def load_reduce(self) -> None:
        function, arguments = self.stack[-2:]
        plain = arguments[0] if function is torch.Size else arguments
        if function not in _CALLS or any(type(item) not in (int, str) for item in plain):
            raise ValueError("has a call that no checkpoint needs")
        super().load_reduce()

    def load_newobj(self) -> None:
        made, arguments = self.stack[-2:]
        if made not in tuple(_FIELDS) or arguments != ():
            raise ValueError("makes an object that no checkpoint needs")
        super().load_newobj()

    def load_build(self) -> None:
        target, state = self.stack[-2:]
        kind = type(target)
        fields = _FIELDS.get(kind, set())
        good = type(state) is tuple if kind is TensorProperties else type(state) is dict and state.keys() <= fields
        if not fields or not good or vars(target):
            raise ValueError(f"fills a {kind.__name__} with something else than its fields")
        super().load_build()

    def load_setitem(self) -> None:
        _check_key(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        super().load_setitems()

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
    }


def _check_key(key: object) -> None:
    """Raise ValueError unless a key can be hashed quickly: nested tuples could take forever."""
    parts = vars(key).values() if type(key) is MetadataIndex else [key]
    if any(type(part) not in (str, int, type(None), torch.Size) for part in parts):
        raise ValueError(f"has a {type(key).__name__} as a key")


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
    directory = Path(directory)
    path = directory / "metadata.json"
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, Damaged) else Damaged(path, f"is not JSON: {error}") from error
    if config not in (_CONFIG, _CONFIG_WITHOUT_COMMON):
        raise Damaged(path, f"has {str(config)[:200]} instead of {_CONFIG}")
    # Since 0.19 the content of common.pt is one of the objects, but megatron-core still reads a common.pt if it exists
    if config == _CONFIG or (directory / COMMON).exists():
        check_common(directory, foreign)
    metadata = check_metadata(directory / ".metadata")
    check_objects(directory, metadata, foreign)
    return metadata


def read_common(directory: str | Path, metadata: Metadata | None = None) -> dict[str, Any]:
    """Return the state that all ranks share: the content of common.pt or, since megatron-core 0.19, of an object.

    Args:
        metadata: the content of .metadata, if it is already known.

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
    found = _load_safe(path, COMMON_OBJECT, _read(path, info.offset, min(info.length, MAX_BYTES)), foreign=True)
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], dict):
        raise Damaged(path, f"{COMMON_OBJECT} is {type(found).__name__} instead of a list of one dict")
    return found[0]


def check_common(directory: str | Path, foreign: bool = False) -> Any:
    """Return the content of common.pt.

    Raises:
        Damaged: it holds more than tensors, plain containers and classes that megatron.core registers.
    """
    path = Path(directory) / COMMON
    return _load_safe(path, "", _read(path), foreign)


def check_metadata(path: str | Path) -> Metadata:
    """Return the content of .metadata.

    Raises:
        Damaged: it is not a pickle, or contains something that no checkpoint needs.
    """
    path = Path(path)
    content = _read(path)
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        sound = (
            type(metadata) is Metadata
            and all(_is_description(*item) for item in metadata.state_dict_metadata.items())
            and all(_is_place(*item) for item in metadata.storage_data.items())
        )
    except Exception as error:
        raise Damaged(path, f"is not safe to read: {cleaned(error, 400)}") from error
    if not sound:
        raise Damaged(path, "has objects of other types than a checkpoint's metadata")
    return metadata


def _is_description(name: object, entry: object) -> bool:
    if type(entry) is not TensorStorageMetadata:
        return type(name) is str and type(entry) is BytesStorageMetadata
    sizes = [entry.size, *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes))]
    is_typed = isinstance(entry.properties.dtype, torch.dtype)
    return type(name) is str and is_typed and all(type(size) is torch.Size for size in sizes)


def _is_place(index: object, info: object) -> bool:
    return (
        type(index) is MetadataIndex
        and type(info) is _StorageInfo
        and (type(info.relative_path), type(info.offset), type(info.length)) == (str, int, int)
    )


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
            if info.length > MAX_BYTES:
                raise Damaged(path, f"{name} takes {info.length} bytes; an object has {MAX_BYTES} at most")
            _load_safe(path, name, _read(path, info.offset, info.length), foreign)


def _load_safe(path: Path, name: str, content: bytes, foreign: bool) -> Any:
    """Return what torch's restricted unpickler reads from `content`, or raise Damaged."""
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
        subject = f"{name} is" if name else "is"
        if foreign and "Unsupported global" in reason:
            reason += "; save the checkpoint again without it"
        raise Damaged(path, f"{subject} not safe to read: {type(error).__name__}: {reason}") from error


def _size(path: Path) -> int:
    try:
        if not path.is_file():
            raise Damaged(path, "is absent")
        return path.stat().st_size
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error


def _read(path: Path, offset: int = 0, length: int | None = None) -> bytes:
    """Return `length` bytes from `offset`; default: the whole file."""
    if length is None and (length := _size(path)) > MAX_BYTES:
        raise Damaged(path, f"has {length} bytes; such a file has at most {MAX_BYTES}")
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error
