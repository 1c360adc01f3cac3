"""Checks of data files and their flags, before megatron.core maps the files into memory and trusts them."""

import contextlib
import math
import os
import re
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import DType

from megatron_balance.config.flags import flag_of
from megatron_balance.config.run_config import DataConfig, RunConfig

Blend = tuple[list[str], list[float] | None]
"""Prefixes of data files, and their weights, if any."""

Bounds = tuple[float, float] | None
"""Start and end of a set, as fractions of a data set's documents; None: the set is not built."""

SETS = ("training", "validation", "test")

_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the token type, number of sequences, number of document boundaries."""

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_TOKEN_TYPES = {code.value: np.dtype(code.name) for code in DType if np.dtype(code.name).kind in "iu"}

_CHUNK = 1 << 18
"""Numbers checked together: few enough for a cache."""

_SAMPLES, _SAMPLE_TOKENS = 8, 4096
"""Places checked in a .bin file before a run, and tokens at each place."""


def parse_blend(paths: list[str], flag: str = "--data-path") -> Blend:
    """Parse `[prefix, ...]` or `[weight, prefix, ...]`; ValueError, naming `flag`, unless all weights are above 0."""
    try:
        weights = [float(weight) for weight in paths[0::2]]
    except ValueError:
        return list(paths), None
    if len(paths) == 1:
        return list(paths), None
    if len(paths) % 2:
        raise ValueError(f"{flag} {' '.join(paths)}: give `weight prefix` pairs, or prefixes only")
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"{flag} {' '.join(paths)}: give weights above 0; leave out data that the run should not read")
    return list(paths[1::2]), weights


def prefixes_by_flag(data: DataConfig) -> dict[str, list[str]]:
    """Return the prefixes of data files by the flag that names them; see `parse_blend` for errors."""
    names = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    given = {flag_of(name): getattr(data, name) for name in names}
    return {flag: parse_blend(paths, flag)[0] for flag, paths in given.items() if paths and not data.mock_data}


def paths(data: DataConfig) -> list[str]:
    """Return all files of conversations, or prefixes of other data files, that the flags name."""
    return list(dict.fromkeys(path for given in prefixes_by_flag(data).values() for path in given))


def check_split(prefix: str, documents: int, split: str | None) -> None:
    """Raise ValueError if `--split` leaves one of its sets without documents."""
    _check_documents(prefix, documents, None if split is None else _bounds(split), split)


def check_data(config: RunConfig, vocabulary: int, *, reads: bool) -> list[str]:
    """Check the data of a run on one rank alone, by headers and samples; return notices for the log.

    `vocabulary` is the number of token ids; `reads`: whether this rank reads samples. ValueError names flag or file.
    """
    data = config.data
    length = config.model.seq_length
    bounds = None if data.split is None else _bounds(data.split)
    for flag, prefixes in prefixes_by_flag(data).items() if reads and not data.sft else ():
        try:
            indices = check_samples(prefixes, vocabulary)
            for prefix, index in indices.items():
                _check_documents(prefix, index.boundaries - 1, bounds if flag == "--data-path" else None, data.split)
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from error
        tokens = sum(indices[prefix].tokens for prefix in prefixes)
        if flag in ("--data-path", "--train-data-path") and tokens <= length:
            problem = f"is longer than all of {flag}, which has {tokens} tokens"
            raise ValueError(f"--seq-length {length}: {problem}; give more data, or a smaller --seq-length")
    interval = config.train.eval_interval
    absent = bounds[1] is None if bounds is not None else not (data.valid_data_path or data.mock_data)
    if interval is None or not absent:
        return []
    where = f"--split {data.split}" if bounds is not None else "no --valid-data-path"
    return [f"--eval-interval {interval} has no effect: there are no validation data ({where})"]


def _bounds(split: str) -> list[Bounds]:
    """Return each set's start and end, computed as by megatron.core."""
    bounds: list[Bounds] = [None]
    if "-" not in split and re.search("[1-9]", split):
        with contextlib.suppress(AssertionError, ValueError, ZeroDivisionError):
            bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    if bounds[0] is None:
        sizes = "the relative sizes of the training, validation and test sets, such as 969,30,1"
        raise ValueError(f"--split {split}: give {sizes}; the first must be above 0")
    return bounds


def _check_documents(prefix: str, documents: int, bounds: list[Bounds] | None, split: str | None) -> None:
    """Check that every set has a document: to fill a sample, megatron.core would repeat an empty set forever."""
    if not documents:
        raise ValueError(f"{prefix}: has no documents; build it again with tools/preprocess_data.py")
    ends = [one and tuple(round(end * float(documents)) for end in one) for one in bounds or ()]
    empty = [name for name, one in zip(SETS, ends, strict=False) if one and one[0] == one[1]]
    if empty:
        left = f"leaves none of its {documents} documents for the {' and the '.join(empty)} set"
        raise ValueError(f"{prefix}: --split {split} {left}; give more documents, or 0 for a set that is not needed")


class Index(NamedTuple):
    """Header of an .idx file, consistent with the file's size, and the size of the .bin file."""

    path: str
    token_type: np.dtype
    sequences: int
    boundaries: int
    """Number of document boundaries, which is one more than documents."""
    bin_bytes: int

    @property
    def tokens(self) -> int:
        return self.bin_bytes // self.token_type.itemsize

    def lengths(self, first: int) -> np.ndarray:
        """Return the tokens of at most _CHUNK sequences from number `first` on, int64."""
        return self._numbers("<i4", _HEADER.size, first, self.sequences)

    def starts(self, first: int) -> np.ndarray:
        """Return the first bytes of at most _CHUNK sequences in the .bin file from number `first` on, int64."""
        return self._numbers("<i8", _HEADER.size + 4 * self.sequences, first, self.sequences)

    def document_starts(self, first: int) -> np.ndarray:
        """Return the first sequences of at most _CHUNK documents from number `first` on, int64; the last is the end."""
        return self._numbers("<i8", _HEADER.size + 12 * self.sequences, first, self.boundaries)

    def _numbers(self, dtype: str, offset: int, first: int, end: int) -> np.ndarray:
        # A copy, not a memory map: if the file is truncated meanwhile, this raises an error instead of SIGBUS
        start = offset + first * np.dtype(dtype).itemsize
        return np.fromfile(self.path, dtype, min(_CHUNK, end - first), offset=start).astype(np.int64)


def check_indices(prefixes: Iterable[str], thorough: bool) -> dict[str, Index]:
    """Raise ValueError, naming the file, unless each PREFIX.idx describes its PREFIX.bin, which megatron.core assumes.

    A thorough check reads each .idx file once: 20 bytes per document, 0.1 s for 10 million documents in the page cache.
    Otherwise, only headers and ends are compared.
    """
    indices = {}
    for prefix in dict.fromkeys(prefixes):
        try:
            for path in (f"{prefix}.bin", f"{prefix}.idx"):
                # os.stat reports a missing file
                if not stat.S_ISREG(os.stat(path).st_mode):
                    raise ValueError(f"{path} is not a regular file")
            indices[prefix] = index = _read_header(f"{prefix}.idx", os.stat(f"{prefix}.bin").st_size)
            if thorough:
                _check_sequences(index)
                _check_boundaries(index)
        except FileNotFoundError as error:
            raise ValueError(f"{error.filename}: no such file; {_meant(prefix)}") from error
        except OSError as error:
            raise ValueError(f"{error.filename or prefix + '.idx'}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{prefix}.idx: {error}; build it again with tools/preprocess_data.py") from error
    return indices


def _meant(prefix: str) -> str:
    stem, suffix = os.path.splitext(prefix)
    if suffix in (".idx", ".bin"):
        return f"give the prefix without {suffix}: {stem}"
    if os.path.isfile(prefix):
        return f"{prefix} is not tokenized; run tools/preprocess_data.py on it, and give the prefix of its output"
    if os.path.isfile(f"{prefix}_text_document.idx"):
        return f"did you mean {prefix}_text_document?"
    return "give the PREFIX of files PREFIX.idx and PREFIX.bin, which tools/preprocess_data.py writes"


def check_samples(prefixes: Iterable[str], vocabulary: int) -> dict[str, Index]:
    """Raise ValueError if a .bin file is too short, or evenly spread samples of it have ids outside the vocabulary."""
    indices = check_indices(prefixes, thorough=False)
    for prefix, index in indices.items():
        path = f"{prefix}.bin"
        last = max(0, index.tokens - _SAMPLE_TOKENS)
        for first in dict.fromkeys(last * place // (_SAMPLES - 1) for place in range(_SAMPLES)):
            try:
                sample = np.fromfile(path, index.token_type, _SAMPLE_TOKENS, offset=first * index.token_type.itemsize)
            except OSError as error:
                raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
            check_tokens(path, sample, vocabulary, first)
    return indices


def check_tokens(path: str, tokens: np.ndarray, vocabulary: int, first: int | None = None) -> None:
    """Raise ValueError for a token outside the vocabulary; `first` is the first token's index in the file `path`."""
    outside = (tokens < 0) | (tokens >= vocabulary)
    if outside.any():
        place = int(outside.argmax())
        where = "" if first is None else f", number {first + place} of the file,"
        remedy = "give the tokenizer that the data were made with, or a --vocab-size above all of their tokens"
        raise ValueError(f"{path}: token {tokens[place]}{where} is outside the vocabulary of {vocabulary}; {remedy}")


def check_caches(prefixes: Iterable[str], cache_path: str | None) -> None:
    """Raise ValueError unless all index caches are arrays of integers.

    They are in `--data-cache-path`, or by default next to the data. megatron.core reads them with `allow_pickle=True`,
    so a pickle with such a name could run its code.
    """
    next_to_data = [os.path.join(prefix, "cache", "GPTDataset_indices") for prefix in prefixes]
    directories = [cache_path] if cache_path else dict.fromkeys(next_to_data)
    for path in (path for directory in directories for path in sorted(Path(directory).glob("*.npy"))):
        try:
            if not path.is_file():
                raise ValueError("not a regular file")
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
                raise ValueError("its elements are no integers")
        except Exception as error:  # NumPy raises many types
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{path}: is not a cached index ({reason}); delete it, and the next run writes it"
            ) from error


def _read_header(idx_path: str, bin_bytes: int) -> Index:
    with open(idx_path, "rb") as file:
        raw = file.read(_HEADER.size)
        size = os.fstat(file.fileno()).st_size
    if len(raw) < _HEADER.size:
        raise ValueError(f"has {size} bytes, its header alone takes {_HEADER.size}")
    magic, version, code, sequences, boundaries = _HEADER.unpack(raw)
    if (magic, version) != (_MAGIC, _VERSION):
        raise ValueError(f"is not an index of version {_VERSION}: starts with {magic!r}, version {version}")
    if code not in _TOKEN_TYPES:
        raise ValueError(f"has tokens of type {code}, which is not an integer type")
    if not sequences or not boundaries or not bin_bytes:
        raise ValueError(f"has {sequences} sequences, {boundaries} document boundaries and {bin_bytes} bytes of tokens")
    expected = _HEADER.size + 12 * sequences + 8 * boundaries
    # Multimodal data have one more byte per sequence
    if size not in (expected, expected + sequences):
        counts = f"{sequences} sequences and {boundaries} document boundaries"
        raise ValueError(f"has {size} bytes, {counts} take {expected}")
    index = Index(idx_path, _TOKEN_TYPES[code], sequences, boundaries, bin_bytes)
    last = sequences - 1
    end = int(index.starts(last)[0]) + int(index.lengths(last)[0]) * index.token_type.itemsize
    if end > bin_bytes:
        raise ValueError(f"its last sequence ends at byte {end} of the {bin_bytes} of the .bin file")
    return index


def _check_sequences(index: Index) -> None:
    """Check that sequences follow each other in the .bin file without gaps, and that there is at least one token."""
    end = 0
    for first in range(0, index.sequences, _CHUNK):
        lengths = index.lengths(first)
        starts = index.starts(first)
        ends = end + np.cumsum(lengths * index.token_type.itemsize)
        expected = np.concatenate(([end], ends[:-1]))
        bad = (lengths < 0) | (starts != expected)
        if bad.any():
            place = int(bad.argmax())
            problem = f"has {lengths[place]} tokens from byte {starts[place]}, not from byte {expected[place]}"
            raise ValueError(f"sequence {first + place} {problem}")
        end = int(ends[-1])
    if not end:
        raise ValueError("has no tokens")


def _check_boundaries(index: Index) -> None:
    """Check that documents consist of consecutive sequences, from the first to the last."""
    previous = 0
    for first in range(0, index.boundaries, _CHUNK):
        starts = index.document_starts(first)
        bad = np.diff(starts, prepend=previous) < 0
        if bad.any() or (first == 0 and starts[0]):
            place = int(bad.argmax())
            raise ValueError(f"document {first + place} starts at sequence {starts[place]}, out of order")
        previous = int(starts[-1])
    if previous != index.sequences:
        raise ValueError(f"the last document ends at sequence {previous} of {index.sequences}")
