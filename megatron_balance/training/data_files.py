"""Files of samples, looked at before megatron.core maps them into memory and believes what they say."""

import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the tokens' type, count of sequences, count of document boundaries."""

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1

_TOKEN_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Code of an integer type (megatron.core's DType) -> tokens. Codes 6 and 7 are floating-point types."""

_CHUNK = 1 << 18
"""Numbers looked at together: few enough to stay in a cache."""

_SAMPLES, _SAMPLE_TOKENS = 8, 4096
"""Places in a .bin file that are looked at before a run, and tokens at each."""


def check_indices(prefixes: Iterable[str], thorough: bool) -> None:
    """Refuse PREFIX.idx files that do not describe PREFIX.bin; megatron.core would read past its end, or never return.

    A thorough check reads each .idx once and keeps nothing: 20 bytes for each sequence that is a document, 0.1 s for 10
    million of them in the page cache. Otherwise headers and file sizes are compared, which is one small read each.

    Raises:
        ValueError: which file, what is wrong, and what to do.
    """
    for prefix in dict.fromkeys(prefixes):
        try:
            _check_index(f"{prefix}.idx", f"{prefix}.bin", thorough)
        except FileNotFoundError as error:
            raise ValueError(
                f"{error.filename}: no such file; give the PREFIX of files PREFIX.idx and PREFIX.bin, which "
                "tools/preprocess_data.py writes"
            ) from error
        except OSError as error:
            raise ValueError(f"{error.filename or prefix + '.idx'}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"{prefix}.idx: {error}; build it again with tools/preprocess_data.py") from error


def check_samples(prefixes: Iterable[str], vocabulary: int) -> None:
    """Refuse .bin files with token ids outside the vocabulary, as far as a few reads show, and indices of others.

    The places are spread evenly over each .bin file, its beginning and end included: at most 8 reads of 32 KiB. What
    lies between them is not looked at. Files that are not here are left out.

    Raises:
        ValueError: which file, what is wrong, and what to do.
    """
    here = [prefix for prefix in dict.fromkeys(prefixes) if os.path.isfile(f"{prefix}.idx")]
    here = [prefix for prefix in here if os.path.isfile(f"{prefix}.bin")]
    check_indices(here, thorough=False)
    for path in (f"{prefix}.bin" for prefix in here):
        index = _read_header(f"{path[:-4]}.idx", os.stat(path).st_size)
        tokens = index.bin_bytes // index.token_bytes
        last = max(0, tokens - _SAMPLE_TOKENS)
        for first in dict.fromkeys(last * place // (_SAMPLES - 1) for place in range(_SAMPLES)):
            try:
                sample = np.fromfile(path, index.token_type, _SAMPLE_TOKENS, offset=first * index.token_bytes)
            except OSError as error:
                raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
            check_tokens(path, sample, vocabulary, first)


def check_tokens(path: str, tokens: np.ndarray, vocabulary: int, first: int | None = None) -> None:
    """Refuse token ids outside the vocabulary.

    Args:
        path: the .bin file that they come from.
        first: number in the file of the first of them, if they lie there as they are here.

    Raises:
        ValueError: the file, the token and the remedy.
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
    """Refuse index caches that are not arrays of integers; costs one small read of each, nothing where there are none.

    megatron.core reads them with `allow_pickle=True`, which runs the code of a file that is a pickle under this name.

    Args:
        prefixes: of the data, without `.bin` and `.idx`.
        cache_path: `--data-cache-path`; without it, the caches lie beside the data.

    Raises:
        ValueError: which file, and what to do.
    """
    for path in _caches(prefixes, cache_path):
        try:
            _check_cache(path)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{path}: no cached index ({reason}); delete it, the next run writes a new one") from error


def _caches(prefixes: Iterable[str], cache_path: str | None) -> Iterator[Path]:
    """Every .npy file that megatron.core may read."""
    beside = [os.path.join(prefix, "cache", "GPTDataset_indices") for prefix in prefixes]
    for directory in [cache_path] if cache_path else dict.fromkeys(beside):
        yield from sorted(Path(directory).glob("*.npy"))


def _check_cache(path: Path) -> None:
    """ValueError, or whatever numpy raises, unless `path` is exactly an array of integers."""
    if not path.is_file():
        raise ValueError("not a regular file")
    with open(path, "rb") as file:
        version = npy.read_magic(file)
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"format version {version}")
        shape, _, dtype = readers[version](file)
        start, size = file.tell(), os.fstat(file.fileno()).st_size
    if dtype.kind not in "iu":
        raise ValueError(f"its elements are {dtype}")
    if min(shape, default=0) < 0 or start + math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{size} bytes, for a header of {start} and an array of shape {shape} of {dtype}")


@dataclass(frozen=True)
class _Index:
    """Header of an .idx file, which agrees with the file's size, and what it refers to."""

    path: str
    token_type: str
    sequences: int
    boundaries: int
    bin_bytes: int

    @property
    def token_bytes(self) -> int:
        return np.dtype(self.token_type).itemsize

    @property
    def pointers_at(self) -> int:
        return _HEADER.size + 4 * self.sequences

    @property
    def boundaries_at(self) -> int:
        return self.pointers_at + 8 * self.sequences


def _check_index(idx_path: str, bin_path: str, thorough: bool) -> None:
    for path in (bin_path, idx_path):
        # What is absent is told by its own exception
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ValueError(f"{path} is no regular file")
    index = _read_header(idx_path, os.stat(bin_path).st_size)
    if thorough:
        _check_sequences(index)
        _check_boundaries(index)


def _read_header(idx_path: str, bin_bytes: int) -> _Index:
    with open(idx_path, "rb") as file:
        raw, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
    if len(raw) < _HEADER.size:
        raise ValueError(f"has {size} bytes, its header alone takes {_HEADER.size}")
    magic, version, code, sequences, boundaries = _HEADER.unpack(raw)
    if (magic, version) != (_MAGIC, _VERSION):
        raise ValueError(f"is not an index of version {_VERSION}: starts with {magic!r}, version {version}")
    if code not in _TOKEN_TYPES:
        raise ValueError(f"has tokens of type {code}, which is no type of integers")
    if not sequences or not boundaries or not bin_bytes:
        raise ValueError(f"has {sequences} sequences, {boundaries} document boundaries and {bin_bytes} bytes of tokens")
    index = _Index(idx_path, _TOKEN_TYPES[code], sequences, boundaries, bin_bytes)
    expected = index.boundaries_at + 8 * boundaries
    # Multimodal data have a byte more for every sequence
    if size not in (expected, expected + sequences):
        counts = f"{sequences} sequences and {boundaries} document boundaries"
        raise ValueError(f"has {size} bytes, {counts} take {expected}")
    return index


def _check_sequences(index: _Index) -> None:
    """Sequences follow one another inside the .bin file, aligned to tokens, and hold at least one token."""
    previous = tokens = 0
    for first in range(0, index.sequences, _CHUNK):
        count = min(_CHUNK, index.sequences - first)
        lengths = _numbers(index.path, "<i4", count, _HEADER.size + 4 * first)
        starts = _numbers(index.path, "<i8", count, index.pointers_at + 8 * first)
        _check_order(starts, previous, first, index.bin_bytes, "sequence {} starts at byte {}")
        _refuse(lengths < 0, first, lengths, "sequence {} has {} tokens")
        _refuse(starts & (index.token_bytes - 1) != 0, first, starts, "sequence {} starts at byte {}, inside a token")
        ends = lengths.astype(np.int64)
        ends *= index.token_bytes
        ends += starts
        text = f"sequence {{}} ends at byte {{}} of the {index.bin_bytes} of the .bin file"
        _refuse(ends > index.bin_bytes, first, ends, text)
        previous, tokens = int(starts[-1]), tokens + int(lengths.sum(dtype=np.int64))
    if not tokens:
        raise ValueError("has no tokens")


def _check_boundaries(index: _Index) -> None:
    """Documents consist of consecutive sequences, from the first to the last."""
    previous = 0
    for first in range(0, index.boundaries, _CHUNK):
        count = min(_CHUNK, index.boundaries - first)
        boundaries = _numbers(index.path, "<i8", count, index.boundaries_at + 8 * first)
        if first == 0 and boundaries[0] != 0:
            raise ValueError(f"document 0 starts at sequence {boundaries[0]}")
        _check_order(boundaries, previous, first, index.sequences, "document {} starts at sequence {}")
        previous = int(boundaries[-1])
    if previous != index.sequences:
        raise ValueError(f"the last document ends at sequence {previous} of {index.sequences}")


def _check_order(numbers: np.ndarray, previous: int, first: int, limit: int, text: str) -> None:
    """ValueError unless the chunk goes on from `previous` without a step back, up to `limit` at most."""
    if numbers[0] < previous:
        raise ValueError(text.format(first, numbers[0]) + f", after one that starts at {previous}")
    _refuse(numbers[1:] < numbers[:-1], first + 1, numbers[1:], text + ", before the previous one")
    _refuse(numbers > limit, first, numbers, text + f" of {limit}")


def _numbers(path: str, dtype: str, count: int, offset: int) -> np.ndarray:
    # A copy, not a memory map: a file that becomes shorter is an error, not a SIGBUS
    numbers = np.fromfile(path, dtype, count, offset=offset)
    if len(numbers) != count:
        raise ValueError("became shorter while it was read")
    return numbers


def _refuse(bad: np.ndarray, first: int, numbers: np.ndarray, text: str) -> None:
    """ValueError about the first bad number of a chunk that begins with number `first`, if there is one."""
    if bad.any():
        place = int(bad.argmax())
        raise ValueError(text.format(first + place, numbers[place]))
