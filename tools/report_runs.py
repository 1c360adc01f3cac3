"""What a run wrote about itself, read for tools/report.py.

Shape suffixes: N iterations, R expert-parallel groups that have the same layers, D ranks of such a group, E experts.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.errors import DataLossError, OutOfRangeError
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

from megatron_balance.flow.plan import Split, make_dispatch_plan
from megatron_balance.messages import cleaned
from megatron_balance.observe.load_log import Loads, read_loads
from megatron_balance.observe.trace import Record, load_timeline
from megatron_balance.placement.placement import Placement

RANKS_SHOWN = 4
"""Of a timeline: more would not be readable."""


@dataclass(frozen=True, eq=False)
class Series:
    """One number over the iterations; these ascend."""

    iterations_N: np.ndarray
    values_N: np.ndarray


def aligned(all_series: Sequence[Series]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The iterations that all of them have, and each one's values there."""
    common = functools.reduce(np.intersect1d, [series.iterations_N for series in all_series])
    return common, [series.values_N[np.isin(series.iterations_N, common)] for series in all_series]


@dataclass(frozen=True, eq=False)
class LayerLoads:
    """What the routers of one MoE layer chose, and where it was computed."""

    iterations_N: np.ndarray
    counts_RNDE: np.ndarray
    """Tokens of each source rank for each expert."""
    placements_RN: list[list[Placement]]
    split: Split

    @property
    def tokens_NE(self) -> np.ndarray:
        """Tokens for each expert, of all ranks."""
        return self.counts_RNDE.sum((0, 2))

    @property
    def hosts_NE(self) -> np.ndarray:
        """Ranks that compute each expert, mean over the groups."""
        hosts = [[[len(set(ranks)) for ranks in p.hosts] for p in group] for group in self.placements_RN]
        return np.mean(hosts, axis=0)

    @property
    def num_ranks(self) -> int:
        """Expert-parallel ranks of all groups."""
        return self.computed_NR.shape[1]

    @cached_property
    def computed_by_owners_NR(self) -> np.ndarray:
        """Tokens that each rank would have computed, had experts lain in order and owners computed them."""
        return self._traffic_owners.sum(-2).swapaxes(0, 1).reshape(len(self.iterations_N), -1)

    @cached_property
    def computed_NR(self) -> np.ndarray:
        """Tokens that each rank computed; the ranks of all groups in a row."""
        return self._traffic.sum(-2).swapaxes(0, 1).reshape(len(self.iterations_N), -1)

    @property
    def crossing_before_N(self) -> np.ndarray:
        """Tokens that would have been sent to another rank, had owners computed all."""
        return _off_diagonal(self._traffic_owners)

    @property
    def crossing_N(self) -> np.ndarray:
        """Tokens that were sent to another rank."""
        return _off_diagonal(self._traffic)

    @cached_property
    def _traffic(self) -> np.ndarray:
        """[R, N, D, D]: tokens from each rank to each."""
        return self._under(self.placements_RN)

    @cached_property
    def _traffic_owners(self) -> np.ndarray:
        some = self.placements_RN[0][0]
        owners = Placement.identity(some.num_experts, some.num_ranks)
        return self._under([[owners] * len(self.iterations_N)] * len(self.placements_RN))

    def _under(self, placements_RN: Sequence[Sequence[Placement]]) -> np.ndarray:
        return np.array(
            [
                [
                    _hosts_only(
                        make_dispatch_plan(torch.from_numpy(counts_DE), placement, self.split).splits_DH.numpy()
                    )
                    for counts_DE, placement in zip(counts_NDE, placements_N, strict=True)
                ]
                for counts_NDE, placements_N in zip(self.counts_RNDE, placements_RN, strict=True)
            ]
        )


@dataclass(frozen=True, eq=False)
class LoggedRun:
    """All that is known of a run; what was not given is empty."""

    scalars: Mapping[str, Series] = field(default_factory=dict)
    """TensorBoard's tag -> its values."""
    loads: Mapping[int, LayerLoads] = field(default_factory=dict)
    """MoE layer, from 1 -> what happened there."""
    timeline: Sequence[Record] = ()

    def layers(self, name: str) -> dict[int, Series]:
        """Layer number, from 1 -> one of `LayerReport`'s figures."""
        prefix = f"moe/{name}_layer_"
        tags = [tag for tag in self.scalars if tag.startswith(prefix) and tag[len(prefix) :].isdecimal()]
        return {
            layer: self.scalars[f"{prefix}{layer - 1}"] for layer in sorted(int(t[len(prefix) :]) + 1 for t in tags)
        }

    def over_layers(self, *names: str, mean: bool = False, factor: float = 1.0) -> Series | None:
        """The sum, or the mean, over layers (and over figures), times a factor; None where nothing was recorded."""
        series = [series for name in names for series in self.layers(name).values()]
        if not series:
            return None
        iterations_N, values = aligned(series)
        return Series(iterations_N, factor * (np.mean(values, axis=0) if mean else np.sum(values, axis=0)))


def read_run(events: Path | None, loads: Path | None, timeline: Path | None, split: Split) -> LoggedRun:
    """A run from the directories of --tensorboard-dir, --balance-log-dir and --balance-timeline, as far as given.

    Args:
        split: how hosts shared tokens, --balance-token-split.

    Raises:
        ValueError: a directory without such files, or a damaged file; names it.
    """
    return LoggedRun(
        read_scalars(events) if events else {},
        layer_loads(read_loads(loads), loads, split) if loads else {},
        read_timeline(timeline) if timeline else (),
    )


def read_scalars(directory: Path) -> dict[str, Series]:
    """Tag -> values of all event files of a directory; an iteration that happened again counts once, the last time.

    Raises:
        ValueError: no event files, one that is damaged, or no iterations.
    """
    paths = sorted(directory.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise ValueError(f"{directory}: has no events.out.tfevents.*; train with --tensorboard-dir {directory}")
    found: dict[str, dict[int, float]] = {}
    for path in paths:
        for event in _events(path):
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    if "iteration-time" not in found:
        raise ValueError(f"{directory}: has no iterations; did the run end before its first one?")
    return {tag: _series(values) for tag, values in found.items()}


def _events(path: Path) -> Iterator[Event]:
    """The events of a file; one that a killed run did not finish is the end. TensorBoard's loaders hide damage."""
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


def layer_loads(by_rank: Mapping[int, Loads], directory: Path, split: Split) -> dict[int, LayerLoads]:
    """Layer -> loads of all groups that have it, in the iterations that all of them logged.

    Raises:
        ValueError: groups that have no iteration in common, or other sizes than each other; a placement that is none.
    """
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
            raise ValueError(f"{directory}: layer {layer} has a placement that is none ({cleaned(error)})") from error
        sources, experts = counts[0].shape[1:]
        sizes = {(placement.num_experts, placement.num_ranks) for group in placements for placement in group}
        ranks = max(ranks for _, ranks in sizes)
        if sizes != {(experts, ranks)} or not sources or sources % ranks:
            raise ValueError(
                f"{directory}: layer {layer} has loads {sources} x {experts} and placements of other sizes"
            )
        layers[layer] = LayerLoads(common, np.stack(counts), placements, split)
    return layers


def read_timeline(directory: Path) -> list[Record]:
    """The latest iteration that all of the first ranks recorded.

    Raises:
        ValueError: no timelines, one that is damaged, or no iteration.
    """
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


def _hosts_only(splits_DH: np.ndarray) -> np.ndarray:
    """[H, H]: sources that share a host are one, because they send to it over its own links."""
    hosts = splits_DH.shape[1]
    return splits_DH.reshape(hosts, -1, hosts).sum(1)


def _off_diagonal(traffic_RNDD: np.ndarray) -> np.ndarray:
    return (traffic_RNDD.sum((2, 3)) - np.trace(traffic_RNDD, axis1=2, axis2=3)).sum(0)
