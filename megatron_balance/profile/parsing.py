"""Converts the content of a JSON or YAML file to classes with typed fields, and checks it."""

import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_balance.files.reading import shown
from megatron_balance.messages import cleaned


def parse(
    wanted: Any, content: Any, number: Callable[[Any, str], Any], where: str = "", *, may_omit: bool = False
) -> Any:
    """Convert `content` to the type `wanted`: a number, a string, a class with fields, a mapping, a tuple, or None.

    Args:
        number: returns a number, given its place in the file; raises ValueError if it is out of its range.
        where: place of `content` in the file, for messages.
        may_omit: whether fields with a default may be missing.

    Raises:
        ValueError: the content has another type, or a name is missing or unknown; the message names the place.
    """

    def inner(kind: Any, value: Any, place: str) -> Any:
        return parse(kind, value, number, place, may_omit=may_omit)

    if wanted is Any:
        return content
    if wanted in (int, float):
        return number(content, where)
    if wanted is str:
        if not isinstance(content, str) or not content:
            raise ValueError(f"{where}: {shown(content)} is not a string; write one")
        return content
    choices = typing.get_args(wanted)
    if isinstance(wanted, types.UnionType):
        return None if content is None else inner(choices[0], content, where)
    if typing.get_origin(wanted) is tuple:
        if not isinstance(content, list):
            raise ValueError(f"{where}: {shown(content)} is not a list")
        return tuple(inner(choices[0], one, f"{where}[{index}]") for index, one in enumerate(content))
    dotted = f"{where}." if where else ""
    if typing.get_origin(wanted) is Mapping:
        # Annotated[str, NAMES]: exactly these keys; str: any keys
        names = getattr(choices[0], "__metadata__", [()])[0]
        _check_names(content, names, names, where)
        return {name: inner(choices[1], value, f"{dotted}{cleaned(name)}") for name, value in content.items()}
    hints = typing.get_type_hints(wanted, include_extras=True)
    required = [name for name in hints if not (may_omit and hasattr(wanted, name))]
    _check_names(content, hints, required, where)
    return wanted(**{name: inner(hints[name], value, f"{dotted}{name}") for name, value in content.items()})


def _check_names(content: Any, known: Collection[str], required: Collection[str], where: str) -> None:
    """Check that `content` is an object with keys in `known` (empty: any keys) and all keys in `required`."""
    listed = ", ".join(known) or "names"
    if not isinstance(content, dict):
        raise ValueError(f"{where or 'the file'}: {shown(content)} is not an object with {listed}")
    dotted = f"{where}." if where else ""
    for name in content:
        if known and name not in known:
            raise ValueError(f"{dotted}{cleaned(name)}: is unknown; choose from {listed}")
    for name in required:
        if name not in content:
            raise ValueError(f"{dotted}{name}: is missing")
