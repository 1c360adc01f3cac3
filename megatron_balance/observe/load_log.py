"""Files with the load matrices and placements of every iteration (`--balance-log-dir`).

One rank of each expert-parallel group writes `loads_rank00000_iter0000000.npz`, named after the rank and the first
iteration. It contains the arrays `iterations` [N] int64 and, for every MoE layer n, `layer_<n>` [N, D, E] int64 and
`placement_<n>` [N] str, where N counts the iterations.
"""

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from megatron_balance.files.reading import MIB, check_regular
from megatron_balance.messages import cleaned
from megatron_balance.observe.optional import MOST_BYTES, Attempts, write_whole
from megatron_balance.placement.placement import Placement

MAX_BYTES = 4 * 1024 * MIB
"""Maximum size of a file's arrays; 100 iterations of 60 layers with 64 ranks and 256 experts take 800 MB."""

MOST_TOKENS = 2**40
"""Maximum number of tokens of one rank for one expert in an iteration: sums of many still fit into 64 bits."""

_FILE = re.compile(r"loads_rank(\d{5,})_iter(\d{7,})\.npz")
_LAYER = re.compile(r"layer_(\d+)")


class LoadLog:
    """Collects load matrices and writes them, one file at every `flush`.

    Args:
        directory: created if it does not exist.
        rank: rank of this process in the whole job.
        first_iteration: iteration where the run starts or resumes; this rank's files that begin there or later are
            removed, because their iterations will be repeated.

    Raises:
        ValueError: the directory cannot be written to.
    """

    def __init__(self, directory: Path, rank: int, first_iteration: int = 0) -> None:
        self.directory = directory
        self.rank = rank
        self._attempts = Attempts(f"--balance-log-dir {directory}")
        self._iterations: list[int] = []
        self._loads: dict[int, list[np.ndarray]] = {}
        self._placements: dict[int, list[str]] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path, _, first in _files(directory, rank):
                if first >= first_iteration:
                    path.unlink()
        except OSError as error:
            raise ValueError(f"--balance-log-dir {directory}: {error}; choose a writable directory") from error

    def add(self, iteration: int, layers: Mapping[int, tuple[ArrayLike, Placement]]) -> None:
        """Add one iteration; iterations ascend.

        Args:
            layers: load matrix [D, E] (on the host) of every MoE layer of this rank, and the placement with which its
                tokens were routed; the same layers in every call.
        """
        assert not self._iterations or (iteration > self._iterations[-1] and layers.keys() == self._loads.keys())
        self._iterations.append(iteration)
        for layer, (counts_DE, placement) in layers.items():
            self._loads.setdefault(layer, []).append(np.asarray(counts_DE).astype(np.int64))
            self._placements.setdefault(layer, []).append(str(placement))

    def flush(self, last: bool = False) -> None:
        """Write the iterations added since the last flush, if any; a file appears only when complete.

        If writing fails, they are kept for the next flush, up to MOST_BYTES.
        """
        if not self._iterations:
            return
        if self._attempts.run(self._write, last):
            self._iterations = []
            self._loads = {}
            self._placements = {}
            return
        each = sum(loads[0].nbytes for loads in self._loads.values())
        excess = len(self._iterations) - max(1, MOST_BYTES // each)
        if excess > 0:
            self._attempts.dropped += excess
            for values in (self._iterations, *self._loads.values(), *self._placements.values()):
                del values[:excess]

    def _write(self) -> None:
        arrays = {"iterations": np.array(self._iterations, dtype=np.int64)}
        arrays |= {f"layer_{layer}": np.stack(loads) for layer, loads in self._loads.items()}
        arrays |= {f"placement_{layer}": np.array(texts) for layer, texts in self._placements.items()}
        path = self.directory / f"loads_rank{self.rank:05d}_iter{self._iterations[0]:07d}.npz"

        def save(unfinished: Path) -> None:
            with unfinished.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays)

        write_whole(path, save)


@dataclass(frozen=True, eq=False)
class Loads:
    """The loads that one rank logged, from all its files; iterations ascend."""

    iterations: np.ndarray
    """Iteration numbers, [N] int64."""

    counts: dict[int, np.ndarray]
    """Tokens of each source rank for each expert: MoE layer -> [N, D, E] int64."""

    placements: dict[int, np.ndarray]
    """Placements in the format of `Placement.parse`: MoE layer -> [N] str."""


def read_loads(directory: Path) -> dict[int, Loads]:
    """Read all files of a directory; return rank -> loads, in ascending order of ranks.

    If a run was resumed, the iterations after that point are those of the resumed run.

    Raises:
        ValueError: there are no files, or `LoadLog` did not write one of them; the error names the path.
    """
    files = _files(directory) if directory.is_dir() else []
    if not files:
        raise ValueError(f"{directory}: has no loads_rank*_iter*.npz; train with --balance-log-dir {directory}")
    ranks = sorted({rank for _, rank, _ in files})
    return {rank: _join([entry for entry in files if entry[1] == rank]) for rank in ranks}


def _files(directory: Path, rank: int | None = None) -> list[tuple[Path, int, int]]:
    """Return (path, rank, first iteration) of the files of one rank or all, in ascending order of iterations."""
    names = [(path, _FILE.fullmatch(path.name)) for path in directory.iterdir()]
    found = [(path, int(match[1]), int(match[2])) for path, match in names if match]
    return sorted((entry for entry in found if rank in (None, entry[1])), key=lambda entry: entry[2])


def _join(files: list[tuple[Path, int, int]]) -> Loads:
    """Join the files of one rank, each up to the first iteration of the next one."""
    parts: list[Loads] = []
    ends = [first for _, _, first in files[1:]] + [None]
    for (path, _, first), end in zip(files, ends, strict=True):
        part = _read(path, first)
        if parts and _shapes(part) != _shapes(parts[0]):
            raise ValueError(f"{path}: has other layers, ranks or experts than {files[0][0].name}")
        keep = len(part.iterations) if end is None else int(np.searchsorted(part.iterations, end))
        parts.append(
            Loads(
                part.iterations[:keep],
                {layer: counts_NDE[:keep] for layer, counts_NDE in part.counts.items()},
                {layer: texts_N[:keep] for layer, texts_N in part.placements.items()},
            )
        )
    return Loads(
        np.concatenate([part.iterations for part in parts]),
        {layer: np.concatenate([part.counts[layer] for part in parts]) for layer in parts[0].counts},
        {layer: np.concatenate([part.placements[layer] for part in parts]) for layer in parts[0].counts},
    )


def _shapes(loads: Loads) -> dict[int, tuple[int, ...]]:
    """Return MoE layer -> (D, E)."""
    return {layer: counts_NDE.shape[1:] for layer, counts_NDE in loads.counts.items()}


def _read(path: Path, first: int) -> Loads:
    """Read and check one file."""
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
        if unpacked > MAX_BYTES:
            raise ValueError(f"would unpack to {unpacked} bytes; the maximum is {MAX_BYTES}")
        with np.load(path, allow_pickle=False) as arrays:
            layers = sorted(int(match[1]) for match in map(_LAYER.fullmatch, arrays) if match)
            if len(arrays) != 1 + 2 * len(layers):
                raise ValueError(f"has the arrays {', '.join(arrays)}")
            loads = Loads(
                arrays["iterations"],
                {layer: arrays[f"layer_{layer}"] for layer in layers},
                {layer: arrays[f"placement_{layer}"] for layer in layers},
            )
    except Exception as error:  # a damaged archive makes zipfile, zlib and numpy raise almost anything
        raise ValueError(f"{path}: is not a log of --balance-log-dir ({cleaned(error)}); remove it") from error
    problem = _problem(loads, first)
    if problem is not None:
        raise ValueError(f"{path}: {problem}; remove it")
    return loads


def _problem(loads: Loads, first: int) -> str | None:
    iterations = loads.iterations
    if iterations.dtype != np.int64 or iterations.ndim != 1 or not len(iterations) or (np.diff(iterations) <= 0).any():
        return "its iterations do not ascend"
    if iterations[0] != first:
        return f"begins with iteration {iterations[0]}"
    for layer, counts_NDE in loads.counts.items():
        texts_N = loads.placements[layer]
        if counts_NDE.dtype != np.int64 or counts_NDE.ndim != 3 or len(counts_NDE) != len(iterations):
            return f"layer {layer} has loads {counts_NDE.dtype} {counts_NDE.shape} for {len(iterations)} iterations"
        if counts_NDE.size and not 0 <= int(counts_NDE.min()) <= int(counts_NDE.max()) <= MOST_TOKENS:
            return f"layer {layer} has loads outside of 0 to {MOST_TOKENS}"
        if texts_N.dtype.kind != "U" or texts_N.shape != iterations.shape:
            return f"layer {layer} has placements {texts_N.dtype} {texts_N.shape} for {len(iterations)} iterations"
    return None
