"""Read a torch_dist checkpoint's .metadata, which is a pickle, without unpickling it."""

import pickle
from pathlib import Path, PosixPath
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_balance.checkpoint.manifest import Damaged
from megatron_balance.checkpoint.metadata_schema import (
    ARGUMENT_TYPES,
    CLASSES,
    FIELDS,
    GLOBALS,
    OPTIONAL,
    PROPERTIES,
)


class MetadataReader:
    """Interpreter of the subset of pickle protocols 4 and 5 that .metadata uses.

    It calls only the functions of `CALLS` and sets only the fields of `FIELDS`, once per object. Keys are strings,
    numbers or MetadataIndex objects, so that hashing is cheap. Memory is proportional to the file's size.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self.content = content
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.unfilled = 0
        self.frame_end: int | None = None

    def load(self) -> Metadata:
        """Return the file's content.

        Raises:
            Damaged: the file is not a pickle, or contains something that `metadata_schema` does not list.
        """
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
        content = self.content
        stack = self.stack
        memo = self.memo
        at = 0
        while (code := content[at]) != _STOP:
            at += 1
            # Half of all instructions are one of these three
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
        """Begin a frame. Frames must adjoin: where one ends inside an instruction, pickle would read other bytes."""
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
            # A MetadataIndex hashes its fields, which `_build` has set
            if type(target) is not dict or type(key) not in (str, int, MetadataIndex):
                self._refuse(f"sets a {type(key).__name__} of a {type(target).__name__}")
            target[key] = value

    def _find(self) -> None:
        module, name = self._pop(2)
        if (module, name) not in GLOBALS:
            self._refuse(f"asks for {f'{module}.{name}'[:200]}, which no checkpoint needs")
        self.stack.append(GLOBALS[module, name])

    def _call(self) -> None:
        """Make a size, a path, an enum member or a layout: calls without side effects."""
        function, arguments = self._pop(2)
        wanted = ARGUMENT_TYPES.get(id(function))
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
        if id(made) not in CLASSES or arguments != ():
            self._refuse(f"makes a {getattr(made, '__name__', type(made).__name__)}")
        self.unfilled += made is not BytesStorageMetadata
        self.stack.append(object.__new__(made))

    def _build(self) -> None:
        target, state = self._pop(2)
        kind = type(target)
        if kind is TensorProperties:
            good = type(state) is tuple and tuple(map(type, state)) == PROPERTIES
        else:
            fields = FIELDS.get(kind)
            good = fields and type(state) is dict and fields.keys() - OPTIONAL <= state.keys() <= fields.keys()
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
    pickle.PROTO[0]: MetadataReader._protocol,
    pickle.FRAME[0]: MetadataReader._frame,
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
    pickle.STACK_GLOBAL[0]: MetadataReader._find,
    pickle.REDUCE[0]: MetadataReader._call,
    pickle.NEWOBJ[0]: MetadataReader._new,
    pickle.BUILD[0]: MetadataReader._build,
}
