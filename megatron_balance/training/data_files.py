"""Checks of data files before megatron.core maps them into memory and trusts their contents."""

import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.lib import format as npy

_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the tokens' type, number of sequences, number of document boundaries."""

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1

_TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Code of an integer type (megatron.core's DType) -> NumPy type. Codes 6 and 7 are floating-point types."""

_CHUNK = 1 << 18
"""Numbers that are checked together: few enough to stay in a cache."""

_SAMPLES, _SAMPLE_TOKENS = 8, 4096
"""Places in a .bin file that are checked before a run, and tokens at each of them."""


def check_indices(prefixes: Iterable[str], thorough: bool) -> None:
    """Check that each PREFIX.idx describes its PREFIX.bin; megatron.core would read past its end, or never return.

    A thorough check reads each .idx file once: 20 bytes per sequence if each sequence is a document, 0.1 s for 10
    million of them in the page cache. Otherwise only headers and file sizes are compared, with one small read per file.

    Raises:
        ValueError: a file is wrong; the error names the file, the problem and the remedy.
    """
    for prefix in dict.fromkeys(prefixes):
        try:
            _check_index(f"{prefix}.idx", f"{prefix}.bin", thorough)
        except FileNotFoundError as error:
            raise ValueError(f"{error.filename}: no such file; {_meant(prefix)}") from error
        except OSError as error:
            raise ValueError(f"{error.filename or prefix + '.idx'}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{prefix}.idx: {error}; build it again with tools/preprocess_data.py") from error


def _meant(prefix: str) -> str:
    """Return the remedy for a prefix without files."""
    stem, suffix = os.path.splitext(prefix)
    if suffix in (".idx", ".bin"):
        return f"give the prefix without {suffix}: {stem}"
    if os.path.isfile(prefix):
        return (
            f"{prefix} is a file itself; tokenize it with tools/preprocess_data.py, and give the prefix of its output"
        )
    if os.path.isfile(f"{prefix}_text_document.idx"):
        return f"did you mean {prefix}_text_document?"
    return "give the PREFIX of files PREFIX.idx and PREFIX.bin, which tools/preprocess_data.py writes"


class Contents(NamedTuple):
    """Size of a data set."""

    documents: int
    tokens: int


def contents(prefix: str) -> Contents:
    """Return the size of a data set that `check_samples` accepts, with one small read."""
    index = _read_header(f"{prefix}.idx", os.stat(f"{prefix}.bin").st_size)
    return Contents(index.boundaries - 1, index.tokens)


def check_samples(prefixes: Iterable[str], vocabulary: int) -> None:
    """Check samples of each .bin file for token ids outside the vocabulary, and that its .idx file fits its size.

    The samples are spread evenly over the .bin file, including its beginning and end: at most 8 reads of 32 KiB.

    Raises:
        ValueError: a file is wrong; the error names the file, the problem and the remedy.
    """
    prefixes = list(dict.fromkeys(prefixes))
    check_indices(prefixes, thorough=False)
    for path in (f"{prefix}.bin" for prefix in prefixes):
        index = _read_header(f"{path[:-4]}.idx", os.stat(path).st_size)
        _check_end(index, path)
        last = max(0, index.tokens - _SAMPLE_TOKENS)
        for first in dict.fromkeys(last * place // (_SAMPLES - 1) for place in range(_SAMPLES)):
            try:
                sample = np.fromfile(path, index.token_type, _SAMPLE_TOKENS, offset=first * index.token_bytes)
            except OSError as error:
                raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
            check_tokens(path, sample, vocabulary, first)


def check_tokens(path: str, tokens: np.ndarray, vocabulary: int, first: int | None = None) -> None:
    """Check that token ids are in the vocabulary.

    Args:
        path: .bin file that the tokens come from.
        first: index in the file of the first token, if the tokens are consecutive in the file.

    Raises:
        ValueError: a token is outside the vocabulary; the error names the file, the token and the remedy.
    """
    outside = (tokens < 0) | (tokens >= vocabulary)
    if outside.any():
        place = int(outside.argmax())
        where = "" if first is None else f", number {first + place} of the file,"
        raise ValueError(
            f"{path}: token {tokens[place]}{where} is outside the vocabulary of {vocabulary}; give the tokenizer that "
            "the data were made with (--tokenizer-type, --tokenizer-model), or a --vocab-size above all of their tokens"
        )


def check_caches(prefixes: Iterable[str], cache_path: str | None) -> None:
    """Check that index caches are arrays of integers, with one small read of each.

    megatron.core reads them with `allow_pickle=True`, so a pickle under this name could run its code.

    Args:
        prefixes: prefixes of the data files.
        cache_path: `--data-cache-path`; if None, the caches are next to the data.

    Raises:
        ValueError: a file is not an index cache; the error names the file and the remedy.
    """
    for path in _caches(prefixes, cache_path):
        try:
            _check_cache(path)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"{path}: is not a cached index ({reason}); delete it, and the next run writes a new one"
            ) from error


def _caches(prefixes: Iterable[str], cache_path: str | None) -> Iterator[Path]:
    """Yield every .npy file that megatron.core may read."""
    next_to_data = [os.path.join(prefix, "cache", "GPTDataset_indices") for prefix in prefixes]
    for directory in [cache_path] if cache_path else dict.fromkeys(next_to_data):
        yield from sorted(Path(directory).glob("*.npy"))


def _check_cache(path: Path) -> None:
    """Raise ValueError, or any exception of NumPy's, unless `path` is exactly an array of integers."""
    if not path.is_file():
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        version = npy.read_magic(file)
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"format version {version}")
        shape, _, dtype = readers[version](file)
        start = file.tell()
        size = os.fstat(file.fileno()).st_size
    if dtype.kind not in "iu":
        raise ValueError(f"its elements are {dtype}")
    if min(shape, default=0) < 0 or start + math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{size} bytes, for a header of {start} and an array of shape {shape} of {dtype}")


@dataclass(frozen=True, kw_only=True)
class _Index:
    """Header of an .idx file, which agrees with the file's size, and the size of its .bin file."""

    path: str
    token_type: str
    sequences: int
    boundaries: int
    bin_bytes: int

    @property
    def token_bytes(self) -> int:
        return np.dtype(self.token_type).itemsize

    @property
    def tokens(self) -> int:
        return self.bin_bytes // self.token_bytes

    @property
    def pointers_at(self) -> int:
        return _HEADER.size + 4 * self.sequences

    @property
    def boundaries_at(self) -> int:
        return self.pointers_at + 8 * self.sequences


def _check_index(idx_path: str, bin_path: str, thorough: bool) -> None:
    for path in (bin_path, idx_path):
        # os.stat reports a missing file
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{path} is not a regular file")
    index = _read_header(idx_path, os.stat(bin_path).st_size)
    if thorough:
        _check_sequences(index)
        _check_boundaries(index)


def _read_header(idx_path: str, bin_bytes: int) -> _Index:
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
    index = _Index(
        path=idx_path,
        token_type=_TOKEN_TYPES[code],
        sequences=sequences,
        boundaries=boundaries,
        bin_bytes=bin_bytes,
    )
    expected = index.boundaries_at + 8 * boundaries
    # Multimodal data have one more byte for every sequence
    if size not in (expected, expected + sequences):
        counts = f"{sequences} sequences and {boundaries} document boundaries"
        raise ValueError(f"has {size} bytes, {counts} take {expected}")
    return index


def _check_sequences(index: _Index) -> None:
    """Check that sequences follow each other in the .bin file, aligned to tokens, with at least one token in total."""
    previous = tokens = 0
    for first in range(0, index.sequences, _CHUNK):
        count = min(_CHUNK, index.sequences - first)
        lengths = _numbers(index.path, "<i4", count, _HEADER.size + 4 * first)
        starts = _numbers(index.path, "<i8", count, index.pointers_at + 8 * first)
        _check_order(starts, previous, first, limit=index.bin_bytes, text="sequence {} starts at byte {}")
        _refuse(lengths < 0, first, lengths, "sequence {} has {} tokens")
        _refuse(starts & (index.token_bytes - 1) != 0, first, starts, "sequence {} starts at byte {}, inside a token")
        ends = lengths.astype(np.int64)
        ends *= index.token_bytes
        ends += starts
        text = f"sequence {{}} ends at byte {{}} of the {index.bin_bytes} of the .bin file"
        _refuse(ends > index.bin_bytes, first, ends, text)
        previous = int(starts[-1])
        tokens = tokens + int(lengths.sum(dtype=np.int64))
    if not tokens:
        raise ValueError("has no tokens")


def _check_end(index: _Index, path: str) -> None:
    """Raise ValueError if the last sequence ends beyond the .bin file, which may be an incomplete copy."""
    last = index.sequences - 1
    (start,) = _numbers(index.path, "<i8", 1, index.pointers_at + 8 * last)
    (length,) = _numbers(index.path, "<i4", 1, _HEADER.size + 4 * last)
    end = int(start) + int(length) * index.token_bytes
    if end > index.bin_bytes:
        raise ValueError(
            f"{path}: has {index.bin_bytes} bytes, but the last sequence in its .idx file ends at byte {end}; copy it "
            "again, or build both again with tools/preprocess_data.py"
        )


def _check_boundaries(index: _Index) -> None:
    """Check that documents consist of consecutive sequences, from the first to the last."""
    previous = 0
    for first in range(0, index.boundaries, _CHUNK):
        count = min(_CHUNK, index.boundaries - first)
        boundaries = _numbers(index.path, "<i8", count, index.boundaries_at + 8 * first)
        if first == 0 and boundaries[0] != 0:
            raise ValueError(f"document 0 starts at sequence {boundaries[0]}")
        _check_order(boundaries, previous, first, limit=index.sequences, text="document {} starts at sequence {}")
        previous = int(boundaries[-1])
    if previous != index.sequences:
        raise ValueError(f"the last document ends at sequence {previous} of {index.sequences}")


def _check_order(numbers: np.ndarray, previous: int, first: int, *, limit: int, text: str) -> None:
    """Raise ValueError unless the chunk continues from `previous` in ascending order, up to `limit` at most."""
    if numbers[0] < previous:
        raise ValueError(text.format(first, numbers[0]) + f", after one that starts at {previous}")
    _refuse(numbers[1:] < numbers[:-1], first + 1, numbers[1:], text + ", before the previous one")
    _refuse(numbers > limit, first, numbers, text + f" of {limit}")


def _numbers(path: str, dtype: str, count: int, offset: int) -> np.ndarray:
    # A copy, not a memory map: a file that is truncated meanwhile raises an error instead of SIGBUS
    numbers = np.fromfile(path, dtype, count, offset=offset)
    if len(numbers) != count:
        raise ValueError("became shorter while it was read")
    return numbers


def _refuse(bad: np.ndarray, first: int, numbers: np.ndarray, text: str) -> None:
    """Raise ValueError for the first bad number, if any, of a chunk whose first number has the index `first`."""
    if bad.any():
        place = int(bad.argmax())
        raise ValueError(text.format(first + place, numbers[place]))
