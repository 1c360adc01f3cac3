"""Reads a ClusterProfile from its JSON file, and checks every number."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_balance.files.reading import MIB, number_in, read_object, shown
from megatron_balance.messages import cleaned
from megatron_balance.profile.cluster_profile import (
    COLLECTIVES,
    GROUPS,
    LEVELS,
    ROUNDS,
    VERSION,
    ClusterProfile,
    CodecTimes,
    Fit,
    ParallelLines,
    Throughput,
)

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
    try:
        profile = _parse(content)
    except ValueError as error:
        raise ValueError(f"{where}: damaged profile ({error}); measure again") from error
    if (profile.num_ranks, profile.node_size) != (num_ranks, node_size):
        raise ValueError(
            f"{where}: is for {profile.num_ranks} expert-parallel ranks in nodes of {profile.node_size}, but this job "
            f"has {num_ranks} in nodes of {node_size}; measure again or use --balance-profile builtin"
        )
    return profile


def _parse(content: Any) -> ClusterProfile:
    _keys(content, ("version", *(field.name for field in dataclasses.fields(ClusterProfile))), "the file")
    links = _keys(content["links"], COLLECTIVES, "links")
    batches = _keys(content["messages"], LEVELS, "messages")
    codecs = content["codecs"]
    members = content["all_to_alls"]
    rates = content["rates"]
    if not (isinstance(codecs, dict) and isinstance(members, dict) and isinstance(rates, list)):
        raise ValueError("codecs, all_to_alls, rates: are not two objects and a list")
    parallel = content["parallel"]
    num_ranks = _number(content["num_ranks"], "num_ranks")
    if len(rates) not in (0, num_ranks):
        raise ValueError(f"rates: has {len(rates)} numbers for {num_ranks} ranks")
    return ClusterProfile(
        num_ranks=num_ranks,
        node_size=_number(content["node_size"], "node_size"),
        links={
            kind: {
                group: _numbers(Fit, line, f"links.{kind}.{group}")
                for group, line in _keys(lines, GROUPS, f"links.{kind}").items()
            }
            for kind, lines in links.items()
        },
        forward=_numbers(Throughput, content["forward"], "forward"),
        backward=_numbers(Throughput, content["backward"], "backward"),
        launches={
            kind: {
                level: _numbers(Fit, line, f"launches.{kind}.{level}")
                for level, line in _keys(lines, LEVELS, f"launches.{kind}").items()
            }
            for kind, lines in _keys(content["launches"], ROUNDS if content["launches"] else (), "launches").items()
        },
        messages={level: _numbers(Fit, line, f"messages.{level}") for level, line in batches.items()},
        starts={
            kind: _number(value, f"starts.{kind}")
            for kind, value in _keys(content["starts"], ROUNDS if content["starts"] else (), "starts").items()
        },
        tensors=_number(content["tensors"], "tensors"),
        rates=tuple(_number(rate, f"rates[{rank}].rate") for rank, rate in enumerate(rates)),
        all_to_alls={name: _numbers(Fit, line, f"all_to_alls.{cleaned(name)}") for name, line in members.items()},
        codecs={
            name: CodecTimes(
                **{
                    way: _numbers(Throughput, line, f"codecs.{cleaned(name)}.{way}")
                    for way, line in _keys(times, CodecTimes._fields, f"codecs.{cleaned(name)}").items()
                }
            )
            for name, times in codecs.items()
        },
        parallel=None if parallel is None else _parallel(parallel),
    )


def _parallel(content: Any) -> ParallelLines:
    found = _keys(content, ParallelLines._fields, "parallel")
    for name, value in found.items():
        if name in RANGES:
            found[name] = _number(value, f"parallel.{name}")
        elif value is not None or name not in ParallelLines._field_defaults:
            found[name] = _numbers(Fit, value, f"parallel.{name}")
    return ParallelLines(**found)


def _keys(content: Any, names: Sequence[str], where: str) -> dict[str, Any]:
    """Return `content` in the order of `names`, after checking that it is an object with exactly these keys."""
    if not isinstance(content, dict):
        raise ValueError(f"{where}: {shown(content)} is not an object with {', '.join(names)}")
    if wrong := sorted(content.keys() ^ set(names)):
        state = "is unknown" if wrong[0] in content else "is missing"
        raise ValueError(f"{where}: {cleaned(wrong[0])} {state}")
    return {name: content[name] for name in names}


def _numbers(kind: Any, content: Any, where: str) -> Any:
    """Convert an object to a named tuple of numbers."""
    fields = _keys(content, kind._fields, where)
    return kind(**{name: _number(value, f"{where}.{name}") for name, value in fields.items()})


def _number(value: Any, where: str) -> Any:
    by_message = where.startswith(_BY_MESSAGE) and where.endswith(".beta")
    low, high, unit = _SECONDS if by_message else RANGES[where.rpartition(".")[2]]
    return number_in(value, low, high, where, unit=unit, whole=not unit)
