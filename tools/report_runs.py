"""Read the output of a run for tools/report.py.

Shape suffixes: N iterations, R expert-parallel groups with the same layers, D ranks of such a group, E experts.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

from megatron_balance.messages import cleaned
from megatron_balance.observe.load_log import LoggedLoads, read_loads
from megatron_balance.observe.trace import TraceEvent
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SplitName, traffic_of
from timeline_picture import load_timeline

RANKS_SHOWN = 4
"""Ranks that a timeline shows; more would not be readable."""


class Series(NamedTuple):
    """One number by iteration, in ascending order of iterations."""

    iterations_N: np.ndarray
    values_N: np.ndarray


def aligned(all_series: Sequence[Series]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the iterations that all series have in common, and each series' values there."""
    common = functools.reduce(np.intersect1d, [series.iterations_N for series in all_series])
    return common, [series.values_N[np.isin(series.iterations_N, common)] for series in all_series]


class Traffic(NamedTuple):
    """Tokens of one MoE layer under some placements; the ranks of all groups are concatenated."""

    computed_NR: np.ndarray
    """Tokens that each rank computes."""
    crossing_N: np.ndarray
    """Tokens that are sent to another rank."""

    @classmethod
    def of(cls, counts_RNDE: np.ndarray, placements_RN: list[list[Placement]], split: SplitName) -> "Traffic":
        groups = zip(counts_RNDE, placements_RN, strict=True)
        traffic_RNDD = np.array([[_traffic(*one, split) for one in zip(*group, strict=True)] for group in groups])
        crossing_N = (traffic_RNDD.sum((2, 3)) - np.trace(traffic_RNDD, axis1=2, axis2=3)).sum(0)
        return cls(np.concatenate(traffic_RNDD.sum(2), axis=1), crossing_N)


class LayerLoads(NamedTuple):
    """The routers' choices in one MoE layer, and where they were computed."""

    iterations_N: np.ndarray
    tokens_NE: np.ndarray
    """Tokens of all ranks for each expert."""
    hosts_NE: np.ndarray
    """Number of ranks that compute each expert, as a mean over the groups."""
    by_owners: Traffic
    """The traffic if every expert had been on its initial owner only."""
    as_computed: Traffic


@dataclass(frozen=True, eq=False)
class LoggedRun:
    """All data of a run; missing kinds are empty."""

    scalars: Mapping[str, Series] = field(default_factory=dict)
    """Values by TensorBoard tag."""
    loads: Mapping[int, LayerLoads] = field(default_factory=dict)
    """Loads by MoE layer, from 1."""
    timeline: Sequence[TraceEvent] = ()

    def layers(self, name: str) -> dict[int, Series]:
        """Return one of `LayerReport`'s figures by layer, from 1."""
        prefix = f"moe/{name}_layer_"
        tags = [tag for tag in self.scalars if tag.startswith(prefix) and tag[len(prefix) :].isdecimal()]
        return {
            layer: self.scalars[f"{prefix}{layer - 1}"] for layer in sorted(int(t[len(prefix) :]) + 1 for t in tags)
        }

    def over_layers(self, *names: str, mean: bool = False, factor: float = 1.0) -> Series | None:
        """Return the sum or mean over layers and figures, times a factor; None if nothing was recorded."""
        series = [series for name in names for series in self.layers(name).values()]
        if not series:
            return None
        iterations_N, values = aligned(series)
        return Series(iterations_N, factor * (np.mean(values, axis=0) if mean else np.sum(values, axis=0)))


def read_run(events: Path | None, loads: Path | None, timeline: Path | None, split: SplitName) -> LoggedRun:
    """Read a run from the given directories of --tensorboard-dir, --balance-log-dir and --balance-timeline.

    Args:
        split: how hosts shared tokens: the run's --balance-token-split.

    Raises:
        ValueError: a directory has no such files, or a file is damaged; the message names it.
    """
    return LoggedRun(
        read_scalars(events) if events else {},
        layer_loads(read_loads(loads), loads, split) if loads else {},
        read_timeline(timeline) if timeline else (),
    )


def read_scalars(directory: Path) -> dict[str, Series]:
    """Return the values of all event files of a directory by tag. A repeated iteration's last values count.

    Values by consumed samples (`... vs samples`) are left out, because they repeat the values by iteration.

    Raises:
        ValueError: there are no event files or no iterations, or a file is damaged.
    """
    paths = sorted(directory.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise ValueError(f"{directory}: has no events.out.tfevents.*; train with --tensorboard-dir {directory}")
    found: dict[str, dict[int, float]] = {}
    for path in paths:
        for event in _events(path):
            for value in event.summary.value:
                if value.tag.endswith(" vs samples"):
                    continue
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    if "iteration-time" not in found:
        raise ValueError(f"{directory}: has no iterations; did the run end before its first one?")
    return {tag: _series(values) for tag, values in found.items()}


def _events(path: Path) -> Iterator[Event]:
    """Generate the events of a file, up to an unfinished one of a killed run. TensorBoard's own loaders hide damage."""
    reader = PyRecordReader_New(str(path))
    while True:
        try:
            reader.GetNext()
            yield Event.FromString(reader.record())
        except OutOfRangeError:
            return
        except DataLossError as error:
            if "truncated" in error.message:
                return
            raise ValueError(f"{path}: is damaged ({error.message.removeprefix(f'{path} ')}); remove it") from error


def layer_loads(by_rank: Mapping[int, LoggedLoads], directory: Path, split: SplitName) -> dict[int, LayerLoads]:
    """Return, by layer, the loads of all groups that have it, in the iterations that all of them logged. ValueError if
    groups have no iteration in common or differ in size, or if a placement is invalid."""
    layers: dict[int, LayerLoads] = {}
    for layer in sorted({layer for loads in by_rank.values() for layer in loads.counts}):
        groups = {rank: loads for rank, loads in by_rank.items() if layer in loads.counts}
        common = functools.reduce(np.intersect1d, [loads.iterations for loads in groups.values()])
        if not len(common) or len({loads.counts[layer].shape[1:] for loads in groups.values()}) > 1:
            raise ValueError(f"{directory}: ranks {', '.join(map(str, groups))} logged layer {layer} of different runs")
        kept = [np.isin(loads.iterations, common) for loads in groups.values()]
        counts = [loads.counts[layer][keep] for loads, keep in zip(groups.values(), kept, strict=True)]
        texts = [loads.placements[layer][keep] for loads, keep in zip(groups.values(), kept, strict=True)]
        try:
            placements = [[Placement.parse(text) for text in texts_N] for texts_N in texts]
        except ValueError as error:
            raise ValueError(f"{directory}: layer {layer} has an invalid placement ({cleaned(error)})") from error
        some = placements[0][0]
        owners = Placement.identity(some.num_experts, some.num_ranks)
        counts_RNDE = np.stack(counts)
        hosts = [[[len(set(ranks)) for ranks in one.hosts] for one in placements_N] for placements_N in placements]
        layers[layer] = LayerLoads(
            iterations_N=common,
            tokens_NE=counts_RNDE.sum((0, 2)),
            hosts_NE=np.mean(hosts, axis=0),
            by_owners=Traffic.of(counts_RNDE, [[owners] * len(common)] * len(placements), split),
            as_computed=Traffic.of(counts_RNDE, placements, split),
        )
    return layers


def read_timeline(directory: Path) -> list[TraceEvent]:
    """Return the records of the latest iteration that all of the first ranks recorded; ValueError if there is none."""
    paths = sorted(directory.glob("rank*.json"))[:RANKS_SHOWN]
    if not paths:
        raise ValueError(f"{directory}: has no rank*.json; train with --balance-timeline {directory}")
    by_rank = [load_timeline(path) for path in paths]
    common = set.intersection(*({record.iteration for record in records} for records in by_rank))
    if not common:
        raise ValueError(f"{directory}: {', '.join(path.name for path in paths)}: no iteration that all recorded")
    return [record for records in by_rank for record in records if record.iteration == max(common)]


def _series(values: Mapping[int, float]) -> Series:
    steps = sorted(values)
    return Series(np.array(steps), np.array([values[step] for step in steps]))


def _traffic(counts_DE: np.ndarray, placement: Placement, split: SplitName) -> np.ndarray:
    """Return the tokens from each host to each host; sources that share a host reach others over its links."""
    hosts = placement.num_ranks
    return traffic_of(split, counts_DE, placement, hosts).reshape(hosts, -1, hosts).sum(1)
