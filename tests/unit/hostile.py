"""Pickles that run code if they are loaded without restrictions: each touches its own file, the canary."""

import contextlib
import copyreg
import functools
import importlib
import io
import os
import pathlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata

Payload = Callable[[Path], bytes]


class Call:
    """Unpickles as the result of `function(*arguments)`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> tuple:
        return self.reduced

    def __call__(self) -> None:
        """Do nothing. Pickle requires the function of another `Call` to be callable."""


def touch(canary: Path) -> Call:
    return Call(os.system, f"touch {canary}")


def code(canary: Path) -> str:
    return f"__import__('pathlib').Path({str(canary)!r}).touch()"


def saved(obj: Any) -> bytes:
    return pickle.dumps(obj, protocol=4)


def text(value: str) -> bytes:
    """Push a string."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


def find(module: str, name: str) -> bytes:
    """Push a global; `name` may have dots."""
    return text(module) + text(name) + b"\x93"


def command(canary: Path) -> bytes:
    return text(f"touch {canary}")


FREE_LOAD = functools.partial(torch.load, weights_only=False)

PROTOCOL = b"\x80\x04"
SYSTEM = find("posix", "system")
METADATA = find("torch.distributed.checkpoint.metadata", "Metadata")
STORAGE_INFO = find("torch.distributed.checkpoint.filesystem", "_StorageInfo")
SETTER = b"}" + text("__setstate__") + SYSTEM + b"s"
"""A dict with a __setstate__ that runs a command."""

CALLS: dict[str, Payload] = {
    "os.system": lambda canary: saved(touch(canary)),
    "eval": lambda canary: saved(Call(eval, code(canary))),
    "open": lambda canary: saved(Call(open, str(canary), "w")),
    "pickle.loads": lambda canary: saved(Call(pickle.loads, saved(touch(canary)))),
    "functools.partial": lambda canary: saved(Call(functools.partial(os.system, f"touch {canary}"))),
    "getattr": lambda canary: saved(
        Call(Call(getattr, Call(importlib.import_module, "os"), "system"), f"touch {canary}")
    ),
    "torch.load": lambda canary: saved(Call(FREE_LOAD, io.BytesIO(saved(touch(canary))))),
    "numpy object array": lambda canary: saved(np.array([touch(canary)], dtype=object)),
}
"""Payloads that consist of one call."""

PLACES: dict[str, Payload] = {
    "key of state_dict_metadata": lambda canary: saved(Metadata({touch(canary): None})),
    "planner_data": lambda canary: saved(Metadata({}, planner_data={"weight": ("weight", [touch(canary)])})),
    "unknown attribute": lambda canary: saved(with_attribute(Metadata({}), "mcore_data", touch(canary))),
    "what follows is fine": lambda canary: saved(touch(canary))[:-1] + b"0" + saved(Metadata({}))[2:],
}
"""Payloads with a call somewhere in .metadata."""

OPCODES: dict[str, Payload] = {
    "protocol 2": lambda canary: pickle.dumps(touch(canary), protocol=2),
    "INST": lambda canary: f"(S'touch {canary}'\niposix\nsystem\n.".encode(),
    # `registered` registers the code
    "EXT1": lambda canary: PROTOCOL + b"\x82\xfb" + command(canary) + b"\x85R.",
    "OBJ": lambda canary: b"(cposix\nsystem\n" + f"S'touch {canary}'\no.".encode(),
    "dotted name from the metadata's own module": lambda canary: (
        PROTOCOL + find("torch.distributed.checkpoint.metadata", "os.system") + command(canary) + b"\x85R."
    ),
    "method of an allowed class": lambda canary: (
        PROTOCOL + find("pathlib", "PosixPath.touch") + saved(pathlib.PosixPath(canary))[2:-1] + b"\x85R."
    ),
    "BUILD of __setstate__": lambda canary: PROTOCOL + METADATA + b")\x81" + SETTER + b"b" + command(canary) + b"b.",
    "BUILD of __setstate__ as a slot": lambda canary: (
        PROTOCOL + STORAGE_INFO + b")\x81N" + SETTER + b"\x86b" + command(canary) + b"b."
    ),
    # Corrupts the class for its next user
    "BUILD of a class": lambda canary: PROTOCOL + METADATA + b"N" + SETTER + b"\x86b)\x81" + command(canary) + b"b.",
    "BUILD of an enum's member": lambda canary: (
        PROTOCOL
        + find("torch.distributed.checkpoint.planner", "WriteItemType")
        + b"K\x01\x85RN"
        + SETTER
        + b"\x86b"
        + command(canary)
        + b"b."
    ),
    "memoized global": lambda canary: PROTOCOL + SYSTEM + b"\x940" + METADATA + b"0h\x00" + command(canary) + b"\x85R.",
}
"""Payloads for single pickle opcodes."""


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Register os.system as pickle's extension 251."""
    copyreg.add_extension("posix", "system", 251)
    try:
        yield
    finally:
        copyreg.remove_extension("posix", "system", 251)


def with_attribute(obj: Any, name: str, value: Any) -> Any:
    setattr(obj, name, value)
    return obj
