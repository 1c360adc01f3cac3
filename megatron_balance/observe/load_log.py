"""Files with the load matrices and placements of every iteration (`--balance-log-dir`).

One rank of each expert-parallel group writes `loads_rank00000_iter0000000.npz`, named by the rank and the first
iteration. It contains the arrays `iterations` [B] int64 and, for every MoE layer n, `layer_<n>` [B, D, E] int64 and
`placement_<n>` [B] str, where B counts the file's iterations.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from megatron_balance.files.reading import check_regular
from megatron_balance.files.writing import whole_file
from megatron_balance.messages import cleaned
from megatron_balance.observe.optional import MOST_BYTES, Attempts, writable
from megatron_balance.placement.placement import Placement

_FILE = re.compile(r"loads_rank(\d{5,})_iter(\d{7,})\.npz")


class LoadLog:
    """Collects load matrices and writes them, one file at every `flush`.

    Args:
        directory: created if it does not exist.
        rank: rank of this process in the whole job.
        first_iteration: iteration where the run starts or resumes. This rank's files from
            there on are removed, because their iterations will be repeated.

    Raises:
        ValueError: the directory cannot be written to.
    """

    def __init__(self, directory: Path, rank: int, first_iteration: int = 0) -> None:
        self.directory = directory
        self.rank = rank
        flag = f"--balance-log-dir {directory}"
        self._attempts = Attempts(flag)
        self._iterations: list[int] = []
        self._layers: dict[int, list[tuple[np.ndarray, str]]] = {}
        """Loads and placement of each iteration, by layer."""
        with writable(flag):
            directory.mkdir(parents=True, exist_ok=True)
            for first, writer, path in _files(directory):
                if writer == rank and first >= first_iteration:
                    path.unlink()

    def add(self, iteration: int, layers: Mapping[int, tuple[ArrayLike, Placement]]) -> None:
        """Add one iteration; iterations ascend.

        `layers` has, for every MoE layer of this rank, the load matrix [D, E] on the host and the placement with which
        its tokens were routed. All calls have the same layers.
        """
        self._iterations.append(iteration)
        for layer, (counts_DE, placement) in layers.items():
            self._layers.setdefault(layer, []).append((np.asarray(counts_DE).astype(np.int64), str(placement)))

    def flush(self, last: bool = False) -> None:
        """Write the iterations added since the last flush, if any; a file appears only when complete.

        If writing fails, they are kept for the next flush, up to MOST_BYTES.
        """
        if not self._iterations:
            return
        excess = len(self._iterations)
        if not self._attempts.run(self._write, last):
            bytes_of_one = sum(entries[0][0].nbytes for entries in self._layers.values())
            excess = max(0, excess - max(1, MOST_BYTES // bytes_of_one))
        for values in (self._iterations, *self._layers.values()):
            del values[:excess]

    def _write(self) -> None:
        arrays = {"iterations": np.array(self._iterations, dtype=np.int64)}
        for layer, entries in self._layers.items():
            arrays[f"layer_{layer}"] = np.stack([counts_DE for counts_DE, _ in entries])
            arrays[f"placement_{layer}"] = np.array([placement for _, placement in entries])
        path = self.directory / f"loads_rank{self.rank:05d}_iter{self._iterations[0]:07d}.npz"
        with whole_file(path) as unfinished, unfinished.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)


@dataclass(frozen=True, eq=False)
class LoggedLoads:
    """All loads that one rank logged; iterations ascend."""

    iterations: np.ndarray
    """Iteration numbers, [B] int64."""
    counts: dict[int, np.ndarray]
    """MoE layer -> tokens of each source rank for each expert, [B, D, E] int64."""
    placements: dict[int, np.ndarray]
    """MoE layer -> placements in the format of `Placement.parse`, [B] str."""


def read_loads(directory: Path) -> dict[int, LoggedLoads]:
    """Read all files of a directory; return rank -> loads, in ascending order of ranks.

    Iterations that a resumed run repeated are those of the resumed run.

    Raises:
        ValueError: there are no files, or one of them is not from `LoadLog`; the error names the path.
    """
    files = sorted(_files(directory)) if directory.is_dir() else []
    if not files:
        raise ValueError(f"{directory}: has no loads_rank*_iter*.npz; train with --balance-log-dir {directory}")
    ranks = sorted({rank for _, rank, _ in files})
    return {rank: _join([(first, path) for first, writer, path in files if writer == rank]) for rank in ranks}


def _files(directory: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield the first iteration, the rank and the path of each file."""
    for path in directory.iterdir():
        if match := _FILE.fullmatch(path.name):
            yield int(match[2]), int(match[1]), path


def _join(files: list[tuple[int, Path]]) -> LoggedLoads:
    """Join the files of one rank, each up to the first iteration of the next file."""
    parts: list[dict[str, np.ndarray]] = []
    ends = [*(first for first, _ in files[1:]), np.inf]
    for (_, path), end in zip(files, ends, strict=True):
        arrays = _read(path)
        count = np.searchsorted(arrays["iterations"], end)
        parts.append({name: array[:count] for name, array in arrays.items()})
        shapes = [{name: array.shape[1:] for name, array in part.items()} for part in (parts[0], arrays)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{path}: has other layers, ranks or experts than {files[0][1].name}")
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    layers = sorted(int(name.removeprefix("layer_")) for name in joined if name.startswith("layer_"))
    return LoggedLoads(
        joined["iterations"],
        {layer: joined[f"layer_{layer}"] for layer in layers},
        {layer: joined[f"placement_{layer}"] for layer in layers},
    )


def _read(path: Path) -> dict[str, np.ndarray]:
    check_regular(path)
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = dict(archive)
        layers = [name.removeprefix("layer_") for name in arrays if name.startswith("layer_")]
        expected = {"iterations", *(f"{kind}_{int(layer)}" for layer in layers for kind in ("layer", "placement"))}
        if arrays.keys() != expected:
            raise ValueError(f"has the arrays {', '.join(arrays)}")
        return arrays
    except Exception as error:  # a damaged archive makes zipfile, zlib and numpy raise almost anything
        raise ValueError(f"{path}: is not a log of --balance-log-dir ({cleaned(error)}); remove it") from error
