"""Proof that reading a checkpoint runs no code from it: what others unpickle freely is read here first.

Three readers of the torch_dist format would call whatever a file tells them to call:

    .metadata      torch.distributed.checkpoint: pickle.load
    *.distcp       its load planner: torch.load(weights_only=False) on every entry that is not a tensor
    common.pt      megatron.core: torch.load with a default that an environment variable switches off

`.metadata` is read by `_Metadata`, which knows the few things such a file consists of. The others are read once with
`weights_only=True`. What passes is inert also for the free readers, as long as the file stays the same. This is about
code: an object within its size limit may still ask for more memory than there is.
"""

import io
import json
import pickle
from pathlib import Path, PosixPath
from typing import Any, NoReturn

# Registers the classes that it puts into checkpoints with torch's restricted unpickler
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
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.serialization import _get_layout

from megatron_balance.checkpoint.manifest import Damaged, is_plain_name

MAX_METADATA_BYTES = 1 << 30
"""About 300 bytes for every shard of a tensor: room for three million shards."""

MAX_OBJECT_BYTES = 1 << 30
"""Objects are generator states and the like; tensors have no limit."""

_Types = tuple[type, ...]
_NONE = type(None)

_FIELDS: dict[type, dict[str, _Types]] = {
    Metadata: {
        "state_dict_metadata": (dict,),
        "planner_data": (_NONE, dict, list),
        "storage_data": (dict,),
        "storage_meta": (_NONE, StorageMeta),
        "version": (_NONE, str),
        "all_local_plans": (list,),
    },
    BytesStorageMetadata: {},
    ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
    TensorStorageMetadata: {"properties": (TensorProperties,), "size": (torch.Size,), "chunks": (list,)},
    MetadataIndex: {"fqn": (str,), "offset": (_NONE, torch.Size), "index": (_NONE, int)},
    StorageMeta: {
        "checkpoint_id": (_NONE, str, PosixPath),
        "save_id": (_NONE, str),
        "load_id": (_NONE, str),
        "modules": (list,),
    },
    # No `transform_descriptors`: they name code that would decode the bytes
    _StorageInfo: {"relative_path": (str,), "offset": (int,), "length": (int,)},
    SavePlan: {"items": (list,), "storage_data": (_NONE,), "planner_data": (_NONE, dict, list), "usable": (bool,)},
    WriteItem: {
        "index": (MetadataIndex,),
        "type": (WriteItemType,),
        "bytes_io_data": (_NONE, BytesIOWriteData),
        "tensor_data": (_NONE, TensorWriteData),
    },
    BytesIOWriteData: {"nbytes": (int,)},
    TensorWriteData: {"chunk": (ChunkStorageMetadata,), "properties": (TensorProperties,), "size": (torch.Size,)},
}
"""Classes of .metadata, and the types that their fields may have."""

_CONFIG_WITHOUT_COMMON = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_CONFIG = _CONFIG_WITHOUT_COMMON | {"common_backend": "torch", "common_backend_version": 1}
"""metadata.json with a common.pt, and as megatron-core writes it since 0.19."""

_OPTIONAL = {"all_local_plans", "offset", "index"}

_PROPERTIES = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)
"""The state of a TensorProperties, a tuple."""

_CALLS = {torch.Size: int, PosixPath: str, _get_layout: str, _MEM_FORMAT_ENCODING: int, WriteItemType: int}
"""What .metadata may call, and the type of the arguments."""

# By identity: whatever stands in the place of a function need not be hashable
_WANTED = {id(function): wanted for function, wanted in _CALLS.items()}
_MADE = {id(made) for made in (*_FIELDS, TensorProperties)}

_GLOBALS: dict[tuple[str, str], Any] = {
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{(known.__module__, known.__name__): known for known in (*_FIELDS, *_CALLS, TensorProperties)},
    # Python 3.13 has moved the class
    ("pathlib._local", "PosixPath"): PosixPath,
    ("pathlib", "PosixPath"): PosixPath,
}


def check_pickles(directory: str | Path) -> Metadata:
    """Prove that reading this checkpoint runs no code from it; costs one read of everything but the tensors.

    Returns:
        The content of .metadata.

    Raises:
        Damaged: which file is not one of torch_dist's, or asks for what.
    """
    config = check_config(directory)
    # Since 0.19 what common.pt held is one of the objects, but a common.pt that is there is still read
    if config.keys() == _CONFIG.keys() or (Path(directory) / "common.pt").exists():
        check_common(directory)
    metadata = check_metadata(Path(directory) / ".metadata")
    check_objects(directory, metadata)
    return metadata


def check_config(directory: str | Path) -> dict[str, Any]:
    """The content of metadata.json, which selects the readers; Damaged unless it selects those of torch_dist."""
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
    """Damaged unless common.pt consists of tensors, plain containers and the classes that megatron.core registered."""
    path = Path(directory) / "common.pt"
    _prove(path, "", io.BytesIO(_read(path, 0, MAX_OBJECT_BYTES)))


def check_metadata(path: str | Path) -> Metadata:
    """The content of .metadata, without unpickling it; Damaged names what does not belong there."""
    return _Metadata(Path(path), _read(Path(path), 0, MAX_METADATA_BYTES)).load()


def check_objects(directory: str | Path, metadata: Metadata) -> None:
    """Damaged unless all entries lie inside the directory's files, and those that are not tensors pass `_prove`."""
    directory, sizes = Path(directory), dict[str, int]()
    for index, info in metadata.storage_data.items():
        if info.relative_path not in sizes:
            if not is_plain_name(info.relative_path):
                raise Damaged(directory / ".metadata", f"{index.fqn} lies in {info.relative_path!r}, elsewhere")
            sizes[info.relative_path] = _size(directory / info.relative_path)
        if not 0 <= info.offset <= info.offset + info.length <= sizes[info.relative_path]:
            span = f"bytes {info.offset} to {info.offset + info.length} of {sizes[info.relative_path]}"
            raise Damaged(directory / info.relative_path, f"cannot hold {index.fqn}: {span}")
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            info = metadata.storage_data.get(MetadataIndex(name))
            if info is None:
                raise Damaged(directory / ".metadata", f"does not say where {name} lies")
            path = directory / info.relative_path
            if info.length > MAX_OBJECT_BYTES:
                raise Damaged(path, f"{name} takes {info.length} bytes; an object has {MAX_OBJECT_BYTES} at most")
            _prove(path, name, io.BytesIO(_read(path, info.offset, info.length, whole=False)))


def _prove(path: Path, name: str, content: io.BytesIO) -> None:
    """Damaged unless torch's restricted unpickler reads `content`."""
    try:
        # An explicit argument is stronger than TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD
        torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch wraps the reason in advice to load the file nevertheless
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
    """`length` bytes from `offset` on; the `whole` file if it has no more than that."""
    if whole and _size(path) > length:
        raise Damaged(path, f"has {_size(path)} bytes; {length} are the most that such a file has")
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise Damaged(path, f"cannot be read: {error.strerror}") from error


class _Metadata:
    """Reader of the part of the pickle format that .metadata is written in, protocols 4 and 5.

    Nothing is called but what `_call` and `_build` name; a class is filled once, with the fields it has; a key is a
    string, a number or a MetadataIndex, so that hashing is cheap; memory is proportional to the file.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        self.path, self.content, self.at = path, content, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.unfilled = 0
        self.frame_end: int | None = None

    def load(self) -> Metadata:
        try:
            self._run()
            (metadata,) = self.stack
            if self.frame_end not in (None, len(self.content)):
                raise ValueError("its last frame ends elsewhere")
        except Damaged:
            raise
        except Exception as error:
            self._refuse(f"is not a pickle: {error}", error)
        if type(metadata) is not Metadata or self.unfilled:
            self._refuse(f"holds a {type(metadata).__name__} instead of complete Metadata")
        for name, entry in metadata.state_dict_metadata.items():
            if type(name) is not str or type(entry) not in (TensorStorageMetadata, BytesStorageMetadata):
                self._refuse(f"describes {str(name)[:200]} by a {type(entry).__name__}")
        for index, info in metadata.storage_data.items():
            if type(index) is not MetadataIndex or type(info) is not _StorageInfo:
                self._refuse(f"places {str(index)[:200]} by a {type(info).__name__}")
        return metadata

    def _run(self) -> None:
        content, stack, memo, at = self.content, self.stack, self.memo, 0
        while (code := content[at]) != _STOP:
            at += 1
            # Half of all instructions
            if code == _MEMOIZE:
                memo.append(stack[-1])
            elif code == _LONG_BINGET:
                stack.append(memo[int.from_bytes(content[at : at + 4], "little")])
                at += 4
            elif code == _BINGET:
                stack.append(memo[content[at]])
                at += 1
            else:
                self.at = at
                if code not in _STEPS:
                    self._refuse(f"has pickle instruction {bytes([code])!r}")
                _STEPS[code](self)
                at = self.at

    def _refuse(self, reason: str, error: Exception | None = None) -> NoReturn:
        raise Damaged(self.path, f"{reason} (at byte {self.at})") from error

    def _take(self, count: int) -> bytes:
        taken = self.content[self.at : self.at + count]
        if len(taken) != count:
            raise ValueError("it ends early")
        self.at += count
        return taken

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _push_signed(self, size: int) -> None:
        self.stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _push_text(self, size: int) -> None:
        self.stack.append(self._take(size).decode("utf-8"))

    def _pop_mark(self) -> list[Any]:
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def _push_tuple(self, items: list[Any]) -> None:
        self.stack.append(tuple(items))

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("nothing on the stack")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _protocol(self) -> None:
        if (protocol := self._number(1)) not in (4, 5):
            self._refuse(f"has pickle protocol {protocol}")

    def _frame(self) -> None:
        """Frames follow each other without gaps; pickle reads another text where one ends within an instruction."""
        if self.frame_end not in (None, self.at - 1):
            raise ValueError("it has a frame that ends elsewhere")
        self.frame_end = self._number(8) + self.at

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            self._refuse(f"appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            # A MetadataIndex hashes its fields, which it has from `_build` on
            if type(target) is not dict or type(key) not in (str, int, MetadataIndex):
                self._refuse(f"sets a {type(key).__name__} of a {type(target).__name__}")
            target[key] = value

    def _find(self) -> None:
        module, name = self._pop(2)
        if (module, name) not in _GLOBALS:
            self._refuse(f"asks for {f'{module}.{name}'[:200]}, which no checkpoint needs")
        self.stack.append(_GLOBALS[module, name])

    def _call(self) -> None:
        """A size, a path, an enum's member or a layout from its name: calls without effects."""
        function, arguments = self._pop(2)
        wanted = _WANTED.get(id(function))
        if wanted is None or type(arguments) is not tuple:
            self._refuse(f"calls a {type(function).__name__}")
        if function is not PosixPath:
            (argument,) = arguments
        for item in argument if function is torch.Size else arguments:
            if type(item) is not wanted:
                self._refuse(f"calls {function.__name__} with something else than {wanted.__name__}")
        self.stack.append(function(*arguments))

    def _new(self) -> None:
        made, arguments = self._pop(2)
        if id(made) not in _MADE or arguments != ():
            self._refuse(f"makes a {getattr(made, '__name__', type(made).__name__)}")
        self.unfilled += made is not BytesStorageMetadata
        self.stack.append(object.__new__(made))

    def _build(self) -> None:
        target, state = self._pop(2)
        kind = type(target)
        if kind is TensorProperties:
            good = type(state) is tuple and tuple(map(type, state)) == _PROPERTIES
        else:
            fields = _FIELDS.get(kind)
            good = fields and type(state) is dict and fields.keys() - _OPTIONAL <= state.keys() <= fields.keys()
            good = good and all(type(value) in fields[name] for name, value in state.items())
        if not good or vars(target):
            keys = [str(key)[:50] for key in state][:10] if type(state) is dict else f"a {type(state).__name__}"
            self._refuse(f"fills a {kind.__name__} with {keys}")
        if kind is TensorProperties:
            target.__setstate__(state)
        else:
            vars(target).update(state)
        self.unfilled -= 1
        self.stack.append(target)


_STOP, _MEMOIZE, _BINGET, _LONG_BINGET = (
    code[0] for code in (pickle.STOP, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET)
)

_STEPS = {
    pickle.PROTO[0]: _Metadata._protocol,
    pickle.FRAME[0]: _Metadata._frame,
    pickle.MARK[0]: lambda reader: reader.marks.append(len(reader.stack)),
    pickle.NONE[0]: lambda reader: reader.stack.append(None),
    pickle.NEWTRUE[0]: lambda reader: reader.stack.append(True),
    pickle.NEWFALSE[0]: lambda reader: reader.stack.append(False),
    pickle.BININT[0]: lambda reader: reader._push_signed(4),
    pickle.BININT1[0]: lambda reader: reader.stack.append(reader._number(1)),
    pickle.BININT2[0]: lambda reader: reader.stack.append(reader._number(2)),
    pickle.LONG1[0]: lambda reader: reader._push_signed(reader._number(1)),
    pickle.SHORT_BINUNICODE[0]: lambda reader: reader._push_text(reader._number(1)),
    pickle.BINUNICODE[0]: lambda reader: reader._push_text(reader._number(4)),
    pickle.EMPTY_TUPLE[0]: lambda reader: reader.stack.append(()),
    pickle.TUPLE1[0]: lambda reader: reader._push_tuple(reader._pop(1)),
    pickle.TUPLE2[0]: lambda reader: reader._push_tuple(reader._pop(2)),
    pickle.TUPLE3[0]: lambda reader: reader._push_tuple(reader._pop(3)),
    pickle.TUPLE[0]: lambda reader: reader._push_tuple(reader._pop_mark()),
    pickle.EMPTY_LIST[0]: lambda reader: reader.stack.append([]),
    pickle.APPEND[0]: lambda reader: reader._extend(reader._pop(1)),
    pickle.APPENDS[0]: lambda reader: reader._extend(reader._pop_mark()),
    pickle.EMPTY_DICT[0]: lambda reader: reader.stack.append({}),
    pickle.SETITEM[0]: lambda reader: reader._update(reader._pop(2)),
    pickle.SETITEMS[0]: lambda reader: reader._update(reader._pop_mark()),
    pickle.STACK_GLOBAL[0]: _Metadata._find,
    pickle.REDUCE[0]: _Metadata._call,
    pickle.NEWOBJ[0]: _Metadata._new,
    pickle.BUILD[0]: _Metadata._build,
}
