"""Measures a cluster: alpha and beta of every collective, and the speed of every rank's experts."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.comm.registry import members_of
from megatron_balance.cost.exchange import DEFAULT
from megatron_balance.job.groups import NodeGroups, on_first_rank
from megatron_balance.measure.operations import BothPasses, Call, Load
from megatron_balance.measure.stopwatch import GroupBench, Members, Stopwatch, middle, node_groups
from megatron_balance.profile.cluster_profile import (
    COLLECTIVES,
    GROUPS,
    LEVELS,
    ROUNDS,
    ClusterProfile,
    CodecTimes,
    Fit,
    ParallelLines,
    Throughput,
    fit,
    fit_terms,
    load,
)

SIZES = tuple(4**power << 13 for power in range(6))
"""Bytes of the timed messages: 8 KiB to 8 MiB. From 32 MiB, glibc allocates anew each time, slower than the copy."""

LARGE_SIZES = (*SIZES, 64 << 20, 256 << 20)
"""Sizes for fast links, on which 8 MiB hardly take longer than an empty message."""

COUNTS = (1, 2, 4, 8, 16)
"""Numbers of small messages in a timed batch."""

SAME_RATE = 0.1
"""Ranks count as equally fast if their rates differ by less than this from the mean: the difference may be noise."""

PARALLEL_SIZES = 5
"""Number of sizes for each line of `measure_parallel`."""

REPEATS = 9
"""Number of measurements where few operations are timed; their `middle` counts."""

PASSES = 9
"""Number of passes over all communication; the `middle` counts. The machine may be slower for seconds."""

TURNS = 3
"""Number of measurements in each pass, and number of passes over computation."""

LOAD_SHAPES = ((1, 1), (1, 4), (2, 2), (4, 4), (8, 1))
"""Shapes of the timed Trans and Agg: batches, and experts that a rank sends and receives."""

MOST_SENT = 64 << 20
"""Maximum bytes that a rank sends, because the loads of all sizes are in memory at the same time."""


def measure(
    ep_group: dist.ProcessGroup,
    node_size: int,
    *,
    passes: Callable[[int], BothPasses],
    tokens: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    sizes_bytes: Sequence[int] = SIZES,
    repeats: int = TURNS,
    shares: Sequence[float] = (1.0,),
    codecs: Mapping[str, Callable[[int], BothPasses]] | None = None,
) -> ClusterProfile:
    """Measure this job's cluster; every rank of the job calls it and gets the same profile.

    All expert-parallel groups measure at the same time, because they communicate at the same time in training.

    Args:
        node_size, passes, dtype, shares, codecs: as in GroupBench.
        tokens: at least four numbers of tokens per rank to time the passes with.
        device: device of the messages.
        sizes_bytes: at least four sizes of messages.
        repeats: number of measurements in each pass; their `middle` counts.

    Raises:
        ValueError: there is nothing to measure, or there are too few sizes; raised on every rank.
    """
    num_ranks = ep_group.size()
    if num_ranks < 2:
        raise ValueError(
            f"--expert-model-parallel-size {num_ranks}: there is no other rank; use --balance-profile builtin"
        )
    with node_groups(ep_group, node_size) as nodes:
        bench = GroupBench(
            stopwatch=Stopwatch(ep_group, device, repeats),
            groups=kinds_of(nodes),
            passes=passes,
            dtype=dtype,
            node_size=node_size,
            shares=shares,
            all_to_alls={name: member for name, member in members_of(nodes).items() if name != DEFAULT},
            codecs=codecs or {},
        )
        profile = fit_profile(bench, num_ranks, node_size, sizes_bytes=sizes_bytes, tokens=tokens)
    return on_first_rank(lambda: profile)


def group_kinds(num_ranks: int, node_size: int) -> dict[str, Members]:
    """Return the members with which each kind of group is measured.

    `intra` is the first node, `inter` the first rank of every node, `ep` all ranks. If nodes have one rank, there is no
    `intra`, and for a single node no `inter`. All ranks then take its place, so its line equals that of `ep`.
    """
    everyone = tuple(range(num_ranks))
    found = {"intra": everyone[:node_size], "inter": everyone[::node_size], "ep": everyone}
    return {kind: found[kind] if len(found[kind]) > 1 else everyone for kind in GROUPS}


def kinds_of(nodes: NodeGroups) -> dict[Members, dist.ProcessGroup]:
    """Return the groups of `group_kinds` that this rank is in; it idles while other groups measure."""
    kinds = group_kinds(nodes.ep.size(), nodes.node_size)
    found = {kinds["ep"]: nodes.ep}
    if nodes.node == 0 and nodes.intra is not None:
        found[kinds["intra"]] = nodes.intra
    if nodes.local == 0 and nodes.inter is not None:
        found[kinds["inter"]] = nodes.inter
    return found


def fit_profile(
    bench: GroupBench,
    num_ranks: int,
    node_size: int,
    *,
    sizes_bytes: Sequence[int],
    tokens: Sequence[int],
) -> ClusterProfile:
    """Return the profile of the cluster that `bench` times: `fit` lines over bytes, and over tokens for experts.

    Raises:
        ValueError: there are too few sizes or numbers of tokens for a line.
    """
    coding = [functools.partial(bench.code, name, tokens) for name in bench.codecs]
    communication = _communication(bench, group_kinds(num_ranks, node_size), sizes_bytes)
    experts, *codecs = _middles([functools.partial(bench.compute, tokens), *coding], TURNS)
    rates, forward, backward = experts_speed(tokens, *experts)
    return ClusterProfile(
        num_ranks=num_ranks,
        node_size=node_size,
        tensors=len(bench.shares),
        forward=forward,
        backward=backward,
        rates=rates,
        codecs={
            name: CodecTimes(*(throughput(tokens, seconds_T.tolist()) for seconds_T in both_directions))
            for name, both_directions in zip(bench.codecs, codecs, strict=True)
        },
        **communication,
    )


def loads(sizes_bytes: Sequence[int]) -> list[Load]:
    """Return the loads to time, ordered by size; no rank sends more than the largest size or MOST_SENT."""
    limit = min(max(sizes_bytes), MOST_SENT)
    found = [Load(*shape, size) for size in sorted(sizes_bytes) for shape in LOAD_SHAPES]
    return [load for load in found if load.experts * load.num_bytes <= limit]


def fit_batches(given: Sequence[Load], seconds: Sequence[float], tensors: int) -> tuple[Fit, Fit, float]:
    """Fit the seconds of a Trans or an Agg: of a start, a batch, a message and a byte, none of them negative.

    Loads with different numbers of batches and messages make the four separable.

    Returns:
        A batch in which a rank sends and receives one message, by bytes; a batch of empty messages, by their number;
        and the start's seconds.

    Raises:
        ValueError: there are less than four sizes.
    """
    sizes = sorted({load.num_bytes for load in given})
    if len(sizes) < 4:
        raise ValueError(f"fit: give at least four different sizes, not {sizes}")
    numbers = [
        (1, one.batches, 2 * one.experts * (tensors + one.batches - 1), one.experts * one.num_bytes) for one in given
    ]
    terms = np.array(numbers) / np.array(seconds)[:, None]
    is_held = np.array([sizes.index(load.num_bytes) % 2 == 1 for load in given])
    (start, launch, message, byte), *errors = fit_terms(terms, is_held)
    return Fit(launch + 2 * message, byte, *errors), Fit(launch, message, *errors), start


def _communication(bench: GroupBench, kinds: Mapping[str, Members], sizes_bytes: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a ClusterProfile that are measured among each kind of group."""
    given = loads(sizes_bytes)
    amounts = dict.fromkeys(COLLECTIVES, sizes_bytes) | dict.fromkeys(ROUNDS, given) | {"messages": COUNTS}
    keys = [(name, members) for name in amounts for members in sorted(set(kinds.values()))]
    keys += [(name, kinds["ep"]) for name in bench.all_to_alls]
    calls = [functools.partial(bench.seconds, *key, amounts.get(key[0], sizes_bytes)) for key in keys]
    seconds = {key: found.tolist() for key, found in zip(keys, _middles(calls, PASSES), strict=True)}
    batches = {key: fit_batches(given, found, len(bench.shares)) for key, found in seconds.items() if key[0] in ROUNDS}
    lines = {key: fit(sizes_bytes, found) for key, found in seconds.items() if key[0] not in (*ROUNDS, "messages")}
    lines |= {key: line for key, (line, _, _) in batches.items()}
    return {
        "links": {name: {kind: lines[name, members] for kind, members in kinds.items()} for name in COLLECTIVES},
        "messages": {level: fit(COUNTS, seconds["messages", kinds[level]]) for level in LEVELS},
        "launches": {name: {level: batches[name, kinds[level]][1] for level in LEVELS} for name in ROUNDS},
        "starts": {name: batches[name, kinds["ep"]][2] for name in ROUNDS},
        "all_to_alls": {name: lines[name, kinds["ep"]] for name in bench.all_to_alls},
    }


def _middles(calls: Sequence[Callable[[], Sequence]], passes: int) -> list[np.ndarray]:
    """Call all functions in each pass; return the `middle` of each function's results over the passes."""
    found = [[call() for call in calls] for _ in range(passes)]
    return [middle(np.array(results)) for results in zip(*found, strict=True)]


def experts_speed(
    tokens: Sequence[int], forward_TD: np.ndarray, backward_TD: np.ndarray
) -> tuple[tuple[float, ...], Throughput, Throughput]:
    """Return the ranks' rates, and the forward and backward pass of a rank with the rate 1.

    If all rates are equal up to noise, return none, and the slowest rank's passes. T counts numbers of tokens per rank.
    """
    speed_TD = 1 / (forward_TD + backward_TD)
    speed_D = np.median(speed_TD / speed_TD.mean(1, keepdims=True), axis=0)
    rate_D = np.where(np.abs(speed_D - 1) < SAME_RATE, 1.0, speed_D)
    if (rate_D == 1).all():
        return (), throughput(tokens, forward_TD.max(1).tolist()), throughput(tokens, backward_TD.max(1).tolist())
    forward, backward = (throughput(tokens, (seconds_TD * rate_D).mean(1)) for seconds_TD in (forward_TD, backward_TD))
    return tuple(rate_D.tolist()), forward, backward


def measure_parallel(
    stopwatch: Stopwatch,
    *,
    mp: int,
    esp: int,
    calls: Callable[[str, int], Call],
    ranges: Mapping[str, tuple[float, float]],
) -> ParallelLines:
    """Measure the inputs of Parm's Algorithm 1; every rank of the job calls it and gets the first rank's result.

    Args:
        stopwatch: the stopwatch of all shards of all hosts.
        mp, esp: see ParallelLines.
        calls: returns the exchange to time for a line's name in ParallelLines and a number of bytes.
        ranges: line -> fewest and most bytes to predict. A line through sizes of all magnitudes would be too coarse to
            compare schedules that hardly differ.
    """
    lines = {}
    for name, (low, high) in ranges.items():
        sizes = [int(size) for size in np.geomspace(low / 2, 2 * high, PARALLEL_SIZES)]
        lines[name] = fit(sizes, stopwatch.typical([calls(name, size) for size in sizes]))
    return on_first_rank(lambda: ParallelLines(mp, esp, **lines))


def throughput(tokens: Sequence[int], seconds: Sequence[float]) -> Throughput:
    """Fit a line through the seconds of at least four numbers of tokens."""
    line = fit(tokens, seconds)
    return Throughput(line.beta, line.alpha, line.residual, line.held_out)


def measured_once(
    paths: Sequence[Path], num_ranks: int, node_size: int, measure_cluster: Callable[[], ClusterProfile]
) -> ClusterProfile:
    """Return the profile at the first of `paths` that exists; otherwise measure it and keep it at the first path.

    Every rank of the job calls it, and `measure_cluster` returns the same profile to all. Only rank 0 reads and writes.

    Raises:
        ValueError: the file is damaged, belongs to another cluster, or cannot be written; raised on every rank.
    """

    def read() -> ClusterProfile | None:
        existing = [path for path in paths if path.exists()]
        return load(existing[0], num_ranks, node_size) if existing else None

    if (found := on_first_rank(read)) is not None:
        return found
    measured = measure_cluster()
    if paths:
        try:
            on_first_rank(lambda: measured.save(paths[0]))
        except OSError as error:
            raise ValueError(f"--balance-profile auto: {paths[0]} cannot be written: {error.strerror}") from error
    return measured
