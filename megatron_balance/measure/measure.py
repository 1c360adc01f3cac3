"""Measures a cluster: alpha and beta of every collective, all-reduce bandwidths, the experts' throughput."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.job.groups import on_first_rank
from megatron_balance.measure.stopwatch import Bench, GroupBench, Members, Passes, Run, Stopwatch, sub_groups
from megatron_balance.profile.cluster_profile import (
    COLLECTIVES,
    GROUPS,
    Bandwidth,
    ClusterProfile,
    CodecTimes,
    Fit,
    ParallelLines,
    Throughput,
    fit,
    load,
)

SIZES = tuple(4**power << 14 for power in range(6))
"""Bytes: 16 KiB to 16 MiB."""

LARGE_SIZES = (*SIZES, 64 << 20, 256 << 20)
"""For links that move 16 MiB in hardly more time than nothing."""

PARALLEL_SIZES = 5
"""Of each line of `measure_parallel`."""

REPEATS = 9

Say = Callable[[str], None]


def measure(
    ep_group: dist.ProcessGroup,
    job: dist.ProcessGroup,
    node_size: int,
    passes: Callable[[int], Passes],
    tokens: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    *,
    sizes_bytes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    codecs: Mapping[str, Callable[[int], Passes]] | None = None,
    say: Say | None = None,
) -> ClusterProfile:
    """Measure this job's cluster; every rank of the job calls it and gets the same profile.

    All expert-parallel groups measure at the same time, as they communicate in training; the profile is that of the
    job's first rank. What each group kind consists of, and what stands in for a kind that is not there, says
    `group_kinds`; how each collective is called, and what its bytes are, `bench.OPERATIONS` and `ClusterProfile.links`.

    Args:
        job: the default process group, whose ranks have to create all sub-groups together.
        node_size: expert-parallel ranks on one node.
        passes: forward and backward of this rank's experts, given its number of tokens.
        tokens: numbers of tokens per rank to time them with, at least four.
        device, dtype: where messages lie, and what they consist of.
        sizes_bytes: sizes of messages, at least four.
        repeats: measurements, of which the median counts.
        codecs: compression and decompression of so many rows, by the codec's name.
        say: called with a line of progress per collective, on the ranks that give it.

    Raises:
        ValueError: nothing to measure, or too few sizes; on every rank.
    """
    num_ranks = ep_group.size()
    if num_ranks < 2:
        raise ValueError(
            f"--expert-model-parallel-size {num_ranks}: there is nobody to communicate with; "
            "use --balance-profile builtin"
        )
    wanted = [*group_kinds(num_ranks, node_size).values(), *device_groups(num_ranks, node_size)]
    with sub_groups(ep_group, job, wanted) as groups:
        bench = GroupBench(Stopwatch(ep_group, device, repeats), groups, passes, dtype, codecs or {})
        # The first rank's numbers count, but all ranks have to be there for them; its errors are those of all
        outcome: ClusterProfile | ValueError
        try:
            outcome = profile_of(bench, num_ranks, node_size, sizes_bytes, tokens, say, tuple(codecs or ()))
        except ValueError as error:
            outcome = error
        outcomes = [outcome]
        dist.broadcast_object_list(outcomes, group=job, group_src=0)
        if isinstance(outcomes[0], ValueError):
            raise outcomes[0]
        return outcomes[0]


def group_kinds(num_ranks: int, node_size: int) -> dict[str, Members]:
    """The members that each kind of group is measured with.

    `intra` is the first node, `inter` the first rank of every node, `ep` everyone. Where nodes hold one rank each there
    is no `intra`, and on a single node no `inter`: everyone stands in for it, so that its line is that of `ep`.
    """
    everyone = tuple(range(num_ranks))
    found = {"intra": everyone[:node_size], "inter": everyone[::node_size], "ep": everyone}
    return {kind: found[kind] if len(found[kind]) > 1 else everyone for kind in GROUPS}


def device_groups(num_ranks: int, node_size: int) -> list[Members]:
    """Device groups whose all-reduce bandwidth is measured: 2, half and all ranks, of a node and of the whole group.

    Those of the whole group take one rank of every node before they take a second one of any.
    """
    everyone = range(num_ranks)
    across = sorted(everyone, key=lambda rank: (rank % node_size, rank // node_size))
    pools = [everyone[:node_size], across]
    chosen = {tuple(sorted(pool[:count])) for pool in pools for count in (2, len(pool) // 2, len(pool))}
    return sorted(members for members in chosen if len(members) > 1)


def profile_of(
    bench: Bench,
    num_ranks: int,
    node_size: int,
    sizes_bytes: Sequence[int],
    tokens: Sequence[int],
    say: Say | None = None,
    codecs: Sequence[str] = (),
) -> ClusterProfile:
    """The profile of the cluster that `bench` times; lines are fitted by `fit`, those of experts over tokens.

    Raises:
        ValueError: too few sizes or numbers of tokens for a line.
    """
    report = say or (lambda line: None)
    kinds = group_kinds(num_ranks, node_size)
    links = {}
    for collective in COLLECTIVES:
        lines = {
            members: fit(sizes_bytes, bench.communicate(collective, members, sizes_bytes))
            for members in sorted(set(kinds.values()))
        }
        links[collective] = {kind: lines[members] for kind, members in kinds.items()}
        report(f"{collective}: {'; '.join(f'{kind} {_text(line)}' for kind, line in links[collective].items())}")

    bandwidths, largest = [], max(sizes_bytes)
    for members in device_groups(num_ranks, node_size):
        nodes = len({member // node_size for member in members})
        (seconds,) = bench.communicate("all_reduce", members, [largest])
        bandwidths.append(Bandwidth(len(members), nodes, largest / seconds))
    shapes = (f"{group.ranks} on {group.nodes}: {group.bytes_per_second / 1e9:.3g} GB/s" for group in bandwidths)
    report(f"all_reduce by ranks and nodes: {'; '.join(shapes)}")

    forward, backward = (throughput(tokens, seconds) for seconds in bench.compute(tokens))
    report(
        f"experts: {forward.seconds_per_token * 1e6:.3g} us per token forward, "
        f"{backward.seconds_per_token * 1e6:.3g} us backward"
    )
    coded = {}
    for name in codecs:
        encode, decode = (throughput(tokens, seconds) for seconds in bench.code(name, tokens))
        coded[name] = CodecTimes(encode, decode)
        report(
            f"{name}: {encode.seconds_per_token * 1e6:.3g} us per token to compress, "
            f"{decode.seconds_per_token * 1e6:.3g} us back"
        )
    return ClusterProfile(
        num_ranks=num_ranks,
        node_size=node_size,
        links=links,
        forward=forward,
        backward=backward,
        all_reduce=tuple(bandwidths),
        codecs=coded,
    )


def measure_parallel(
    stopwatch: Stopwatch,
    job: dist.ProcessGroup,
    mp: int,
    esp: int,
    runs: Callable[[str, int], Run],
    ranges: Mapping[str, tuple[float, float]],
    say: Say | None = None,
) -> ParallelLines:
    """Measure what Parm's Algorithm 1 is given; every rank of the job calls it and gets what its first rank has.

    Args:
        stopwatch: of all shards of all hosts.
        job: as of `measure`; and `say`.
        mp, esp: tensor-parallel ranks, and shards of an expert.
        runs: a line's name in ParallelLines and its bytes, to the exchange.
        ranges: by line, the fewest and the most bytes that it is asked about. Sizes around them are measured, because a
            line through sizes of all magnitudes is too coarse to compare what hardly differs.
    """
    lines = {}
    for name, (low, high) in ranges.items():
        sizes = [int(size) for size in np.geomspace(low / 2, 2 * high, PARALLEL_SIZES)]
        lines[name] = fit(sizes, stopwatch.medians([runs(name, size) for size in sizes]))
        if say is not None:
            say(f"tensor-parallel {name}: {_text(lines[name])}")
    outcomes = [ParallelLines(mp, esp, **lines)]
    dist.broadcast_object_list(outcomes, group=job, group_src=0)
    return outcomes[0]


def _text(line: Fit) -> str:
    bandwidth = f"{1e-9 / line.beta:.3g} GB/s" if line.beta else "no end of GB/s"
    return f"{line.alpha * 1e6:.3g} us + {bandwidth} (held out {line.held_out:.0%})"


def throughput(tokens: Sequence[int], seconds: Sequence[float]) -> Throughput:
    """The line through seconds by numbers of tokens, of which there are at least four."""
    line = fit(tokens, seconds)
    return Throughput(line.beta, line.alpha, line.residual, line.held_out)


def measured_once(
    paths: Sequence[Path], num_ranks: int, node_size: int, measure_cluster: Callable[[], ClusterProfile]
) -> ClusterProfile:
    """The profile at the first of `paths` that is there; else what `measure_cluster` returns, kept at the first path.

    Every rank of the job calls it; only rank 0 reads and writes, and what it has is what all of them get.

    Raises:
        ValueError: the file is damaged, for another cluster, or cannot be written; on every rank.
    """

    def read() -> ClusterProfile | None:
        there = [path for path in paths if path.exists()]
        return load(there[0], num_ranks, node_size) if there else None

    def write() -> ClusterProfile:
        if paths:
            paths[0].parent.mkdir(parents=True, exist_ok=True)
            measured.save(paths[0])
        return measured

    found = on_first_rank(read)
    if found is not None:
        return found
    measured = measure_cluster()
    try:
        return on_first_rank(write)
    except OSError as error:
        raise ValueError(f"--balance-profile auto: {paths[0]} cannot be written: {error.strerror}") from error
