"""Reads a ClusterProfile from its JSON file, and checks every number."""

import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_balance.files.reading import MIB, number_in, read_object, shown
from megatron_balance.messages import cleaned
from megatron_balance.profile.cluster_profile import COLLECTIVES, GROUPS, LEVELS, ROUNDS, VERSION, ClusterProfile

MAX_BYTES = 4 * MIB
"""Maximum size of a file; a profile for 64 ranks has 60 kB."""

_SECONDS = (0, 60, "seconds")
_ERROR = (0, 1e9, "times")
_COUNT = (1, 10**6, "")
RANGES: Mapping[str, tuple[float, float, str]] = {
    "alpha": _SECONDS,
    **dict.fromkeys(("trans", "agg"), _SECONDS),
    "beta": (0, 1e-3, "seconds per byte"),
    "overhead": _SECONDS,
    "seconds_per_token": _SECONDS,
    "rate": (1e-3, 1e3, "of the mean"),
    **dict.fromkeys(("residual", "held_out"), _ERROR),
    **dict.fromkeys(("num_ranks", "node_size", "tensors", "ranks", "nodes", "mp", "esp"), _COUNT),
}
"""Minimum, maximum and unit of each number in a file; a count has no unit.

A link carries between 1 kB/s and 100 TB/s (NVLink 5.0: 0.9 TB/s); `fit` returns a flat line if the measured times are
only noise. No message and no token takes a minute.
"""


_NAMES = {
    "links": COLLECTIVES,
    "links.": GROUPS,
    "messages": LEVELS,
    "launches": ROUNDS,
    "launches.": LEVELS,
    "starts": ROUNDS,
}
"""Keys of each object, and of the objects in it; those of others may have any names."""

_BY_MESSAGE = ("launches.", "messages.")
"""Lines whose beta is the seconds of a message, not of a byte."""


def load(path: Path, num_ranks: int, node_size: int) -> ClusterProfile:
    """Read a profile and check that it is for this cluster.

    Raises:
        ValueError: the file cannot be read or is damaged, or has another version, or is for another number of ranks or
            node size.
    """
    where = f"--balance-profile {path}"
    content = read_object(path, MAX_BYTES, "--balance-profile")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{where}: version {shown(content.get('version'))}, but this program reads version {VERSION}; measure the "
            "cluster again"
        )
    del content["version"]
    try:
        profile = _parse(ClusterProfile, content)
        if len(profile.rates) not in (0, profile.num_ranks):
            raise ValueError(f"rates: has {len(profile.rates)} numbers for {profile.num_ranks} ranks")
    except ValueError as error:
        raise ValueError(f"{where}: damaged profile ({error}); measure again") from error
    if (profile.num_ranks, profile.node_size) != (num_ranks, node_size):
        raise ValueError(
            f"{where}: is for {profile.num_ranks} expert-parallel ranks in nodes of {profile.node_size}, but this job "
            f"has {num_ranks} in nodes of {node_size}; measure again or use --balance-profile builtin"
        )
    return profile


def _parse(wanted: Any, content: Any, where: str = "") -> Any:
    """Convert `content` to the type `wanted`: a number, a class with fields, a mapping, a tuple of numbers, or None."""
    if wanted in (int, float):
        return _number(content, where)
    choices = typing.get_args(wanted)
    if isinstance(wanted, types.UnionType):
        return None if content is None else _parse(choices[0], content, where)
    if typing.get_origin(wanted) is tuple:
        if not isinstance(content, list):
            raise ValueError(f"{where}: {shown(content)} is not a list")
        return tuple(_parse(choices[0], one, f"{where}[{index}].rate") for index, one in enumerate(content))
    if typing.get_origin(wanted) is Mapping:
        outer, _, inner = where.partition(".")
        names = _NAMES.get(f"{outer}." if inner else outer, content)
        keys = _keys(content, names, where)
        return {name: _parse(choices[1], value, f"{where}.{cleaned(name)}") for name, value in keys.items()}
    hints = typing.get_type_hints(wanted)
    fields = _keys(content, [*hints], where or "the file").items()
    return wanted(**{name: _parse(hints[name], value, f"{where}.{name}" if where else name) for name, value in fields})


def _keys(content: Any, names: Iterable[str], where: str) -> dict[str, Any]:
    """Return `content` in the order of `names`, after checking that it is an object with exactly these keys."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: {shown(content)} is not an object with {', '.join(names)}")
    if wrong := sorted(content.keys() ^ set(names)):
        state = "is unknown" if wrong[0] in content else "is missing"
        raise ValueError(f"{where}: {cleaned(wrong[0])} {state}")
    return {name: content[name] for name in names}


def _number(value: Any, where: str) -> Any:
    by_message = where.startswith(_BY_MESSAGE) and where.endswith(".beta")
    low, high, unit = _SECONDS if by_message else RANGES[where.rpartition(".")[2]]
    return number_in(value, low, high, where, unit=unit, whole=not unit)
