"""Read files from outside with bounds: limits, not the file, determine how much time and memory the reading takes.

Only regular files are opened. A FIFO, which a shell creates for `<(...)`, may never end, and only one rank could
read it. It is therefore refused like a device, and the message asks for a regular file.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron_balance.messages import cleaned

KIB = 1 << 10
MIB = 1 << 20

MAX_DEPTH = 32
"""Maximum nesting depth of JSON arrays and objects."""

MAX_DIGITS = 20
"""Maximum number of digits of a JSON integer."""

MAX_YAML_BYTES = 64 * KIB
MAX_YAML_EVENTS = 4000
"""Maximum number of parser events (scalars, starts and ends of collections); PyYAML then takes less than a second."""

MAX_YAML_DEPTH = 8
"""Maximum nesting depth of YAML sections, including a list in the innermost section."""

_KINDS = {
    stat.S_IFDIR: "a directory; name the file in it",
    stat.S_IFIFO: "a FIFO, as `<(...)` makes them; write the content into a file and name that",
    stat.S_IFCHR: "a device; name a regular file",
    stat.S_IFBLK: "a device; name a regular file",
    stat.S_IFSOCK: "a socket; name a regular file",
}
"""Kinds of files that are not regular, with the remedy."""

MAX_WHOLE_BYTES = 64 * MIB
"""Larger files are compared by their size and a few samples. Tokenizers have a few megabytes."""

_SAMPLES, _SAMPLE_BYTES = 8, 32 * KIB
"""Samples of a larger file, spread evenly from its first byte to its last."""

_STRING = re.compile(rb'"(?:[^"\\]+|\\.)*+"')
_BRACES_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def check_regular(path: str | Path, flag: str = "") -> int:
    """Return the size of a regular file in bytes.

    Args:
        flag: the flag that named the path, for the message.

    Raises:
        ValueError: the file does not exist or is not regular.
    """
    with _naming(path, flag):
        return _regular(os.stat(path))


def read_bounded(path: str | Path, limit: int, flag: str = "") -> bytes:
    """Return the content of a regular file.

    Args:
        limit: largest allowed size in bytes. If the file grows while it is read, reading stops there.
        flag: the flag that named the path, for the message.

    Raises:
        ValueError: the file is larger, not regular, or cannot be read.
    """
    with _naming(path, flag):
        # Check before opening, because opening a device may already have an effect
        _check_size(_regular(os.stat(path)), limit)
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _regular(os.fstat(file.fileno()))
            content = file.read(limit + 1)
        _check_size(len(content), limit)
        return content


def read_text(path: str | Path, limit: int, flag: str = "") -> str:
    """Return the text in a file; raise like `read_bounded`, or ValueError if it is not UTF-8 or has a zero byte."""
    content = read_bounded(path, limit, flag)
    with _naming(path, flag):
        if (zero := content.find(0)) >= 0:
            raise ValueError(f"is not text: byte {zero + 1} is zero")
        return content.decode("utf-8")


def read_json(path: str | Path, limit: int, flag: str = "") -> Any:
    """Return the JSON value in a file; raise like `read_text` and `parse_json`."""
    text = read_text(path, limit, flag)
    with _naming(path, flag):
        return parse_json(text)


def read_object(path: str | Path, limit: int, flag: str = "") -> dict[str, Any]:
    """Return the JSON object in a file; raise like `read_json`, or ValueError if it holds something else."""
    content = read_json(path, limit, flag)
    with _naming(path, flag):
        if not isinstance(content, dict):
            raise ValueError(f"holds {shown(content)} instead of a JSON object")
    return content


def parse_json(text: str) -> Any:
    """Parse standard JSON: no NaN, no infinity, no number that overflows to infinity, no duplicate key in an object.

    Raises:
        ValueError: the text is something else, or nests objects and arrays deeper than `MAX_DEPTH`.
    """
    deep = f"nests objects and arrays more than {MAX_DEPTH} deep"
    try:
        content = json.loads(
            text,
            object_pairs_hook=_without_duplicates,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(deep) from error
    if _deeper(text.encode("utf-8", "surrogatepass"), MAX_DEPTH):
        raise ValueError(deep)
    return content


def read_yaml(path: str | Path, flag: str = "") -> yaml.Node | None:
    """Return the nodes of a small YAML document, without constructing objects; None if the document is empty.

    Raises:
        ValueError: as for `read_bounded`; or the file is not one YAML document, nests deeper than `MAX_YAML_DEPTH`, has
            more than `MAX_YAML_EVENTS` events, or has anchors, aliases or tags.
    """
    text = read_bounded(path, MAX_YAML_BYTES, flag)
    depth = 0
    with _naming(path, flag):
        for count, event in enumerate(yaml.parse(text, Loader=yaml.SafeLoader)):
            line = f"line {event.start_mark.line + 1}"
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_YAML_DEPTH:
                raise ValueError(f"{line}: nested more than {MAX_YAML_DEPTH} deep; use fewer sections")
            if count > MAX_YAML_EVENTS:
                raise ValueError(f"{line}: more than {MAX_YAML_EVENTS} keys and values; give a smaller file")
            if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
                raise ValueError(f"{line}: anchors and aliases are not supported; write the value out")
            if tag := getattr(event, "tag", None):
                raise ValueError(f"{line}: tags ({cleaned(tag, 80)}) are not supported; leave it out")
        return yaml.compose(text, Loader=yaml.SafeLoader)


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
    """Return `value` if it is a number from `low` to `high`.

    Args:
        where: the place of the value, for the message.
        unit: the unit of the value, for the message.
        whole: whether the value must be an integer.

    Raises:
        ValueError: the value is something else, such as a boolean.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (whole and not isinstance(value, int)) or not low <= value <= high:
        kind = "an integer" if whole else "a number"
        unit = f" {unit}" if unit else ""
        raise ValueError(f"{where}: {shown(value)} is not {kind} from {low:.12g} to {high:.12g}{unit}")
    return value


def _regular(status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'not a regular file')}")
    return status.st_size


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        words = f"{limit // MIB} MiB" if limit >= MIB else f"{limit // KIB} KiB"
        raise ValueError(f"is larger than {words}, the limit for such a file")


@contextlib.contextmanager
def _naming(path: str | Path, flag: str) -> Iterator[None]:
    """Turn an error inside the block into a ValueError that names the flag, the path and the reason."""
    try:
        yield
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        cause = error
    except UnicodeDecodeError as error:
        reason = f"is not text in UTF-8: {error.reason} at byte {error.start + 1}"
        cause = error
    except (ValueError, OverflowError, yaml.YAMLError) as error:
        reason = cleaned(error, 300)
        cause = error
    else:
        return
    raise ValueError(f"{flag} {cleaned(path, 500)}: {reason}".lstrip()) from cause


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) == len(pairs):
        return content
    seen: set[str] = set()
    name = next(name for name, _ in pairs if name in seen or seen.add(name))
    raise ValueError(f"has the key {shown(name)} twice in one object; keep one of them")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"is not JSON: {name} is not a JSON number")


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"has a number of {len(text)} digits, {text[:10]}...; integers have at most {MAX_DIGITS}")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"has the number {cleaned(text, 30)}, which is too large")
    return value


def _deeper(json_text: bytes, depth: int) -> bool:
    """Return whether valid JSON nests deeper than `depth`: remove the innermost objects and arrays `depth` times."""
    brackets = _STRING.sub(b"", json_text).translate(_BRACES_TO_BRACKETS, _NO_BRACKETS)
    for _ in range(depth):
        brackets = brackets.replace(b"[]", b"")
    return bool(brackets)


def content_digest(path: Path, max_bytes: int = MAX_WHOLE_BYTES) -> str:
    """Return a digest of a file, or of the files in a directory. Never raise: the code that uses the file raises.

    Args:
        max_bytes: larger files are represented by their size and a few samples.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            inside = [f"{one.name} {content_digest(one)}" for one in sorted(path.iterdir()) if one.is_file()]
            return hashlib.blake2b("\n".join(inside).encode(), digest_size=8).hexdigest()
        if not stat.S_ISREG(mode):
            return "no file"
        size = path.stat().st_size
        with path.open("rb") as file:
            if size <= max_bytes:
                return hashlib.blake2b(file.read(), digest_size=8).hexdigest()
            digest = hashlib.blake2b(digest_size=8)
            for sample in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
        return f"{size} bytes, {digest.hexdigest()} in samples"
    except OSError as error:
        return error.strerror or "unreadable"
