"""Read files from outside with bounds: limits, not the file, determine how much time and memory the reading takes.

Only regular files are opened. A FIFO, which a shell creates for `<(...)`, may never end, and only one rank could
read it. It is therefore refused like a device, and the message asks for a regular file.
"""

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron_balance.messages import cleaned

KIB = 1 << 10
MIB = 1 << 20

MAX_YAML_BYTES = 64 * KIB

MAX_WHOLE_BYTES = 64 * MIB
"""Larger files are compared by their size and a few samples. Tokenizers have a few megabytes."""

_SAMPLES, _SAMPLE_BYTES = 8, 32 * KIB
"""Samples of a larger file, spread evenly from its first byte to its last."""


def check_regular(path: str | Path, flag: str = "") -> int:
    """Return the size of a regular file in bytes. Raise ValueError, which names the file and the flag that named it, if
    it does not exist or is not regular."""
    with _naming(path, flag):
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise ValueError("is a directory; name the file in it")
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("is not a regular file (FIFOs, as `<(...)` makes them, and devices are refused); name one")
        return status.st_size


def read_bounded(path: str | Path, limit: int, flag: str = "") -> bytes:
    """Return the content of a regular file. Raise ValueError, which names the file and the flag that named it, if it is
    larger than `limit` bytes or cannot be read."""
    check_regular(path, flag)
    with _naming(path, flag), open(path, "rb") as file:
        content = file.read(limit + 1)
        if len(content) > limit:
            words = f"{limit // MIB} MiB" if limit >= MIB else f"{limit // KIB} KiB"
            raise ValueError(f"is larger than {words}, the limit for such a file")
        return content


def read_text(path: str | Path, limit: int, flag: str = "") -> str:
    """Return the text in a file; raise like `read_bounded`, or ValueError if it is not UTF-8 or has a zero byte."""
    content = read_bounded(path, limit, flag)
    with _naming(path, flag):
        if (zero := content.find(0)) >= 0:
            raise ValueError(f"is not text: byte {zero + 1} is zero")
        return content.decode("utf-8")


def read_object(path: str | Path, limit: int, flag: str = "") -> dict[str, Any]:
    """Return the JSON object in a file; raise like `read_text` and `parse_json`, or ValueError if it is no object."""
    text = read_text(path, limit, flag)
    with _naming(path, flag):
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError(f"holds {shown(content)} instead of a JSON object")
        return content


def parse_json(text: str) -> Any:
    """Parse standard JSON; raise ValueError for anything else: NaN, infinity, or a duplicate key in an object."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("is not JSON that can be read: its objects and arrays nest too deep") from error


def read_yaml(path: str | Path, flag: str = "") -> yaml.Node | None:
    """Return the nodes of a small YAML document, without constructing objects; None if it is empty. Raise ValueError as
    `read_bounded`, and if the file is not one YAML document, or has anchors, aliases or tags."""
    text = read_bounded(path, MAX_YAML_BYTES, flag)
    with _naming(path, flag):
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = f"line {event.start_mark.line + 1}"
            if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
                raise ValueError(f"{line}: anchors and aliases are not supported; write the value out")
            if tag := getattr(event, "tag", None):
                raise ValueError(f"{line}: tags ({cleaned(tag, 80)}) are not supported; leave it out")
        try:
            return yaml.compose(text, Loader=yaml.SafeLoader)
        except RecursionError as error:
            raise ValueError("its sections nest too deep; use fewer") from error


def inside(directory: Path, name: str) -> Path:
    """Return the path of `directory / name` with links resolved.

    A downloaded model may contain links in place of its files. A link must lead to a file inside the model's directory.
    In Hugging Face's cache, links in `snapshots/REVISION` may also lead to the repository's `blobs`.

    Raises:
        ValueError: a link leads out of the directory, or to itself.
    """
    path = directory / name
    root = directory.resolve()
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{path}: is a link that leads nowhere; put the file there") from error
    roots = [root, *(parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")]
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise ValueError(
            f"{path}: is a link to {cleaned(target)}, outside of the directory; put the file itself there (cp -L)"
        )
    return target


def shown(value: object) -> str:
    """Return a value from a file, short enough for a message."""
    if isinstance(value, str | int | float | bool) or value is None:
        return cleaned(repr(value), 80)
    return {dict: "an object", list: "a list"}.get(type(value), type(value).__name__)


def number_in(value: Any, low: float, high: float, where: str, *, unit: str = "", whole: bool = False) -> Any:
    """Return `value` if it is a number from `low` to `high` and, with `whole`, an integer; else raise ValueError, which
    names the place `where` and the unit."""
    kinds = int if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
        kind = "an integer" if whole else "a number"
        unit = f" {unit}" if unit else ""
        raise ValueError(f"{where}: {shown(value)} is not {kind} from {low:.12g} to {high:.12g}{unit}")
    return value


@contextlib.contextmanager
def _naming(path: str | Path, flag: str) -> Iterator[None]:
    """Turn an error inside the block into a ValueError that names the flag, the path and the reason."""
    try:
        yield
    except (OSError, ValueError, OverflowError, yaml.YAMLError) as error:
        reason = cleaned(error, 300)
        if isinstance(error, OSError):
            reason = f"cannot be read: {error.strerror}"
        elif isinstance(error, UnicodeDecodeError):
            reason = f"is not text in UTF-8: {error.reason} at byte {error.start + 1}"
        raise ValueError(f"{flag} {cleaned(path, 500)}: {reason}".lstrip()) from error


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"has the key {shown(name)} twice in one object; keep one of them")
        content[name] = value
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"is not JSON: {name} is not a JSON number")


def content_digest(path: Path, max_bytes: int = MAX_WHOLE_BYTES) -> str:
    """Return a digest of a file, or of the files in a directory; files above `max_bytes` are represented by their size
    and a few samples. Never raise: the code that uses the file raises."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        if path.is_dir():
            for one in filter(Path.is_file, sorted(path.iterdir())):
                digest.update(f"{one.name} {content_digest(one)}\n".encode())
            return digest.hexdigest()
        size = check_regular(path)
        with path.open("rb") as file:
            if size <= max_bytes:
                digest.update(file.read())
                return digest.hexdigest()
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
        return f"{size} bytes, {digest.hexdigest()} in samples"
    except (OSError, ValueError) as error:
        return str(error)
