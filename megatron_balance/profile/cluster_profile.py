"""Speed of a cluster's communication and computation: the constants of all cost models.

Times follow the alpha-beta model: a message of b bytes takes alpha + beta * b seconds.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import scipy  # imports its parts at their first use, so that a process which does not use them starts sooner

from megatron_balance.files.reading import MIB, number_in, read_object, shown
from megatron_balance.files.writing import whole_file
from megatron_balance.profile.kernel_times import Kernels
from megatron_balance.profile.parsing import parse

VERSION = 6
ROUNDS = ("trans", "agg")
"""Operations that send experts."""

COLLECTIVES = ("p2p", "one_way", "trans", "agg", "all_to_all", "all_gather", "all_reduce")
GROUPS = ("intra", "inter", "ep")
"""Group kinds: ranks of one node, one rank per node, the whole expert-parallel group."""

LEVELS = ("intra", "inter")
"""Kinds of links: within a node, and between nodes."""


class Fit(NamedTuple):
    """An alpha-beta line fitted to measured times."""

    alpha: float
    """Seconds of an empty message."""
    beta: float
    """Seconds per byte."""
    residual: float
    """Root mean square of (fitted - measured) / measured."""
    held_out: float
    """The same error of a line fitted to every other size, at the sizes in between."""

    def seconds(self, num_bytes: float) -> float:
        return self.alpha + self.beta * num_bytes


def fit(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit a line by least squares of relative errors, without negative numbers; ValueError: less than four sizes."""
    order = np.argsort(sizes_bytes, kind="stable")
    sizes = np.array(sizes_bytes, dtype=float)[order]
    times = np.array(seconds, dtype=float)[order]
    if len(np.unique(sizes[::2])) < 2 or len(np.unique(sizes[1::2])) < 2:
        raise ValueError(f"fit: give at least four different sizes, not {sorted(set(sizes.tolist()))}")
    is_held = np.arange(len(sizes)) % 2 == 1
    (alpha, beta), *errors = fit_terms(np.stack([1 / times, sizes / times], axis=1), is_held)
    return Fit(alpha, beta, *errors)


def fit_terms(terms: np.ndarray, is_held: np.ndarray) -> tuple[list[float], float, float]:
    """Return the seconds per unit of each term by least squares of relative errors, and both errors as in Fit.

    A negative value would be noise, and would make larger messages look faster.

    Args:
        terms: [measurements, terms] units of each term over the measured seconds.
        is_held: [measurements] bool; the others fit the line whose error at these is the held-out error.
    """
    found = _not_negative(terms)
    return found.tolist(), _error(terms, found), _error(terms[is_held], _not_negative(terms[~is_held]))


def _not_negative(terms: np.ndarray) -> np.ndarray:
    # Scale the terms, because a byte takes a millionth of a message's seconds
    scale = terms.max(0)
    return scipy.optimize.nnls(terms / scale, np.ones(len(terms)))[0] / scale


def _error(terms: np.ndarray, found: np.ndarray) -> float:
    return float(np.sqrt(np.mean((terms @ found - 1) ** 2)))


class Throughput(NamedTuple):
    """Computation on one rank: overhead + seconds_per_token * tokens."""

    seconds_per_token: float
    overhead: float
    residual: float
    """See Fit."""
    held_out: float
    """See Fit."""


class CodecTimes(NamedTuple):
    """Times of a codec for one rank's rows of this model."""

    encode: Throughput
    decode: Throughput


_QUICK = Throughput(1e-8, 10e-6, 0.0, 0.0)

UNMEASURED = CodecTimes(_QUICK, _QUICK)
"""Times of an unmeasured codec: a kernel that reads and writes rows of a few kilobytes at some hundred GB/s."""


class ParallelLines(NamedTuple):
    """Times of exchanges among tensor-parallel ranks and sharded experts, for `--moe-parallel-schedule auto`."""

    mp: int
    """Number of ranks with the same tokens."""
    esp: int
    """Number of shards of an expert."""
    all_to_all: Fit
    """EP&ESP-AlltoAll, by the bytes that a rank sends, including those that it keeps."""
    gathered: Fit
    """EP-AlltoAll and ESP-AllGather, there and back, by the bytes of one rank's rows."""
    all_gather: Fit | None = None
    """MP-AllGather, by the bytes of the gathered buffer."""
    simultaneous: Fit | None = None
    """EP&ESP-AlltoAll overlapped with an MP-AllGather of its results (SAA), by the bytes of `all_to_all`."""
    sorting: Fit | None = None
    """Copying rows by expert, summing returned rows, and the gradients of both, by the bytes of the rows."""


@dataclass(frozen=True, kw_only=True)
class ClusterProfile:
    """Constants of one cluster and one shape of expert, saved as JSON."""

    num_ranks: int
    """D, the expert-parallel size that the profile is for."""
    node_size: int
    """Number of expert-parallel ranks on one node."""
    links: Mapping[Annotated[str, COLLECTIVES], Mapping[Annotated[str, GROUPS], Fit]]
    """links[collective][group kind], by bytes: of the message or buffer; for the (default) all-to-all, those that the
    busiest rank sends to others or receives; for an all-gather, those gathered.

    In p2p, trans and agg, every rank sends and receives one message. In one_way, half of the ranks send one to the
    other half. In the group `ep`, all these messages go to another node at the same time if there are several nodes."""
    messages: Mapping[Annotated[str, LEVELS], Fit]
    """messages[intra or inter]: seconds of a batch of small messages, by the busiest rank's number of messages: alpha
    is the launch, beta the seconds of each message."""
    launches: Mapping[Annotated[str, ROUNDS], Mapping[Annotated[str, LEVELS], Fit]]
    """launches[trans or agg][intra or inter]: seconds of a batch of empty messages, by a rank's number of them."""
    forward: Throughput
    backward: Throughput
    starts: Mapping[Annotated[str, ROUNDS], float] = field(default_factory=lambda: dict.fromkeys(ROUNDS, 0.0))
    """starts[trans or agg]: seconds of a Trans or an Agg beyond those of its batches."""
    tensors: int = 1
    """Number of tensors of an expert. Each is a message of its own; every cut of an expert adds one message."""
    rates: tuple[float, ...] = ()
    """[D] relative speed of each rank: its computation takes `forward` / rate seconds. Empty: all 1."""
    all_to_alls: Mapping[str, Fit] = field(default_factory=dict)
    """Lines of the measured members of `--moe-comm-alltoall`, like that of `all_to_all` in the group `ep`."""
    flex: Mapping[Annotated[str, LEVELS], Fit] | None = None
    """flex[intra or inter]: one exchange of the flex dispatcher, by the bytes that a rank sends over links of a level.
    None: as `link("p2p")`."""
    kernels: Kernels | None = None
    """Speed of other computation; None: it is as fast as the experts."""
    codecs: Mapping[str, CodecTimes] = field(default_factory=dict)
    """Times of the measured codecs of `--moe-comm-codec`."""
    parallel: ParallelLines | None = None
    """None unless the run can choose between parallel schedules."""

    def link(self, collective: str, group: str = "ep") -> Fit:
        return self.links[collective][group]

    def codec(self, name: str) -> CodecTimes:
        """Return the times of `--moe-comm-codec name`; an unmeasured codec is assumed to be as fast as possible."""
        return self.codecs.get(name, UNMEASURED)

    @property
    def rate_D(self) -> np.ndarray:
        """[D] `rates`, or ones."""
        return np.array(self.rates) if self.rates else np.ones(self.num_ranks)

    def save(self, path: Path) -> None:
        """Write the profile as JSON; the file appears only when complete. OSError: it could not be written."""
        content = {"version": VERSION, **_as_json(vars(self))}
        text = json.dumps(content, indent=1, allow_nan=False)
        with whole_file(path) as unfinished:
            unfinished.write_text(f"{text}\n", encoding="utf-8")


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping) or hasattr(value, "_asdict"):
        return {name: _as_json(one) for name, one in (value if isinstance(value, Mapping) else value._asdict()).items()}
    return [_as_json(one) for one in value] if isinstance(value, tuple) else value


LAUNCHING = Fit(20e-6, 5e-6, 0.0, 0.0)
"""Host seconds to launch a batch of NCCL's sends and receives, if nothing was measured."""


def builtin(num_ranks: int, node_size: int, hidden: int, ffn: int, dtype_bytes: int = 2) -> ClusterProfile:
    """Return constants of a plausible GPU cluster, so that runs without a measured profile repeat on any machine.

    Every rank has its own adapter. An expert's two matrix products run at 200 TFLOP/s with 2-byte numbers, and half as
    fast with wider ones; a backward pass takes as long as two forward passes (Pro-Prophet Eq. 3).

    Args:
        hidden, ffn: width of the model, and inner width of one expert.
        dtype_bytes: size of the numbers that experts compute with.
    """
    flops = 200e12 if dtype_bytes <= 2 else 100e12
    per_token = 4 * hidden * ffn / flops
    near = Fit(10e-6, 1 / 150e9, 0.0, 0.0)
    far = Fit(25e-6, 1 / 25e9, 0.0, 0.0)
    return from_links(
        num_ranks,
        node_size,
        near,
        far,
        shared=far,
        forward=Throughput(per_token, 20e-6, 0.0, 0.0),
        backward=Throughput(2 * per_token, 40e-6, 0.0, 0.0),
        host=LAUNCHING,
    )


INSTANT = Fit(0.0, 0.0, 0.0, 0.0)
"""The host launches batches in no time."""

MESSAGE = 0.1
"""Each further message of a batch adds this share of a lone message's latency, if nothing was measured."""


def from_links(
    num_ranks: int,
    node_size: int,
    near: Fit,
    far: Fit,
    *,
    shared: Fit,
    forward: Throughput,
    backward: Throughput,
    host: Fit = INSTANT,
    rates: tuple[float, ...] = (),
    flex: Mapping[str, Fit] | None = None,
    kernels: Kernels | None = None,
) -> ClusterProfile:
    """Return the profile implied by a cluster's links, without measurements.

    Operations of the whole group pass the slowest link once, an all-reduce twice (a reduce and a broadcast). In an
    all-to-all, the fraction (D - node_size) / (D - 1) of the bytes that a rank sends leaves its node.

    Args:
        near, far: a message within a node, and between nodes while no other rank of the node sends.
        shared: a message between nodes while all ranks of the node send.
        host: host seconds to launch a batch of Trans or Agg, by its messages; they count if they exceed the links'.
    """
    far, shared = (far, shared) if num_ranks > node_size else (near, near)
    crossing = (num_ranks - node_size) / max(1, num_ranks - 1) if num_ranks > node_size else 0.0
    beta = max((1 - crossing) * near.beta, crossing * shared.beta)
    later = [MESSAGE * (count - 1) for count in (min(node_size, num_ranks) - 1, max(1, num_ranks - node_size))]
    alpha = max(near.alpha * (1 + max(0.0, later[0])), far.alpha * (1 + later[1]) if crossing else 0.0)
    links: dict[str, dict[str, Fit]] = {}
    for kind in COLLECTIVES:
        times = 2 if kind == "all_reduce" else 1
        slowest = near if near.beta > shared.beta and kind != "p2p" else shared
        lines = zip(GROUPS, (near, far, slowest), strict=True)
        links[kind] = {group: line._replace(beta=times * line.beta) for group, line in lines}
    links["all_to_all"]["ep"] = Fit(alpha, beta, 0.0, 0.0)
    messages = {
        level: Fit((1 - MESSAGE) * line.alpha, MESSAGE * line.alpha, 0.0, 0.0)
        for level, line in zip(LEVELS, (near, far), strict=True)
    }
    launches = {
        level: line._replace(alpha=max(line.alpha, host.alpha), beta=max(line.beta / 2, host.beta))
        for level, line in messages.items()
    }
    return ClusterProfile(
        num_ranks=num_ranks,
        node_size=node_size,
        links=links,
        messages=messages,
        forward=forward,
        backward=backward,
        launches=dict.fromkeys(ROUNDS, launches),
        rates=rates,
        flex=flex,
        kernels=kernels,
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
    "rates": (1e-3, 1e3, "of the mean"),
    **dict.fromkeys(("forward", "backward"), (0, 1, "seconds per operation")),
    **dict.fromkeys(("start", "launch", "host"), _SECONDS),
    "half_width": (0, 1e6, "channels"),
    "half_keys": (0, 1e6, "keys"),
    "uneven": (0, 10, "times"),
    "memory": (0, 1e15, "bytes per second"),
    **dict.fromkeys(("occupied", "casts"), (0, 1e4, "times")),
    **dict.fromkeys(("exchange", "computation"), (0, 10, "of the time alone")),
    **dict.fromkeys(("residual", "held_out"), _ERROR),
    **dict.fromkeys(("num_ranks", "node_size", "tensors", "ranks", "nodes", "mp", "esp"), _COUNT),
}
"""Minimum, maximum and unit of each number in a file; a count has no unit.

`fit` returns a flat line if the measured times are only noise. No message and no token takes a minute."""

_BY_MESSAGE = ("launches.", "messages.")
"""Lines whose beta is in seconds per message instead of per byte."""


def load(path: Path, num_ranks: int, node_size: int) -> ClusterProfile:
    """Read a profile; ValueError: it is damaged, or for another version, number of ranks or node size."""
    where = f"--balance-profile {path}"
    content = read_object(path, MAX_BYTES, "--balance-profile")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{where}: version {shown(content.get('version'))}, but this program reads version {VERSION}; measure the "
            "cluster again"
        )
    del content["version"]
    try:
        profile = parse(ClusterProfile, content, _number)
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


def _number(value: Any, where: str) -> Any:
    by_message = where.startswith(_BY_MESSAGE) and where.endswith(".beta")
    name = where.rpartition(".")[2].partition("[")[0]
    low, high, unit = _SECONDS if by_message else RANGES[name]
    return number_in(value, low, high, where, unit=unit, whole=not unit)
