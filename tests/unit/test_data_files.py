"""training/data_files.py: files with invalid content are named before megatron.core reads them."""

import contextlib
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from megatron_balance.training import data, data_files
from megatron_balance.training.data_files import check_caches, check_indices, check_samples
from tests.unit.hostile import CALLS

HEADER = 34
DOCUMENTS = [[3, 1], [4], [1, 5, 0], [9]]
"""Sequence lengths of each document."""
SEQUENCES = sum(map(len, DOCUMENTS))


def build(folder: Path, dtype: Any = np.uint16) -> Path:
    """Write an indexed dataset as tools/preprocess_data.py does, and return its prefix."""
    prefix = folder / "data"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for lengths in DOCUMENTS:
        builder.add_document(np.arange(sum(lengths)), lengths)
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return build(tmp_path)


def change(prefix: Path, at: int, layout: str, value: Any) -> None:
    """Overwrite one field of the .idx file."""
    path = Path(f"{prefix}.idx")
    content = bytearray(path.read_bytes())
    struct.pack_into(layout, content, at, value)
    path.write_bytes(content)


def read_all(prefix: Path) -> int:
    """Read a dataset as training may, and return the number of tokens."""
    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == sorted(dataset.document_indices.tolist())
    return sum(len(dataset.get(index)) for index in range(len(dataset)))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 18])
def test_a_built_dataset_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any, chunk: int) -> None:
    monkeypatch.setattr(data_files, "_CHUNK", chunk)
    prefix = build(tmp_path, dtype)
    check_indices([str(prefix)], thorough=True)
    assert read_all(prefix) == sum(map(sum, DOCUMENTS))


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.int64])
def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, dtype: Any) -> None:
    prefix = str(build(tmp_path, dtype))
    check_samples([prefix, prefix], vocabulary=9)
    message = rf"{prefix}.bin: token 8, number 22 of the file, is outside the vocabulary of 8; .*--vocab-size above"
    with pytest.raises(ValueError, match=message):
        check_samples([prefix], vocabulary=8)


def test_both_ends_of_a_file_and_places_between_are_looked_at(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight samples of 2 tokens each cover 16 of 23 tokens."""
    monkeypatch.setattr(data_files, "_SAMPLE_TOKENS", 2)
    seen = {place for first in (0, 3, 6, 9, 12, 15, 18, 21) for place in (first, first + 1)}
    for place in range(23):
        tokens = np.zeros(23, np.uint16)
        tokens[place] = 7
        tokens.tofile(f"{prefix}.bin")
        refused = pytest.raises(ValueError, match=f"token 7, number {place} ")
        with refused if place in seen else contextlib.nullcontext():
            check_samples([str(prefix)], vocabulary=7)


def test_a_negative_token_and_a_wrong_size_are_refused(prefix: Path, tmp_path: Path) -> None:
    change(prefix, 17, "B", 3)
    np.array([-3] + [0] * 22, np.int16).tofile(f"{prefix}.bin")
    with pytest.raises(ValueError, match="token -3, number 0"):
        check_samples([str(prefix)], vocabulary=99)
    change(prefix, 0, "B", 0)
    with pytest.raises(ValueError, match=r"data\.idx: is not an index"):
        check_samples([str(prefix)], vocabulary=99)


POINTERS = HEADER + 4 * SEQUENCES
BOUNDARIES = POINTERS + 8 * SEQUENCES
HEADERS = {
    "magic": (0, "B", 0, "is not an index of version 1"),
    "version": (9, "<Q", 2, "is not an index of version 1: .* version 2"),
    "no type": (17, "B", 0, "type 0, which is not an integer type"),
    "floats": (17, "B", 7, "type 7, which is not an integer type"),
    "no sequences": (18, "<Q", 0, "has 0 sequences"),
    "a sequence less": (18, "<Q", SEQUENCES - 1, f"{SEQUENCES - 1} sequences"),
    "all sequences": (18, "<Q", 2**64 - 1, f"has {BOUNDARIES + 40} bytes, {2**64 - 1} sequences"),
    "no boundaries": (26, "<Q", 0, "0 document boundaries"),
    "a boundary more": (26, "<Q", 6, "6 document boundaries take"),
    "as many as wrap around": (26, "<Q", 2**61 + 5, f"and {2**61 + 5} document boundaries take"),
}
NUMBERS = {
    "negative length": (HEADER, "<i", -1, "sequence 0 has -1 tokens from byte 0, not"),
    "a length beyond the end": (
        POINTERS - 4,
        "<i",
        10,
        "its last sequence ends at byte 48 of the 46 of the .bin file",
    ),
    "the greatest length": (HEADER + 4, "<i", 2**31 - 1, "sequence (1|2) has "),
    "a negative start": (POINTERS, "<q", -2, "sequence 0 has 3 tokens from byte -2, not from byte 0"),
    "the smallest start": (POINTERS + 8, "<q", -(2**63), "sequence 1 has 1 tokens from byte -9223372036854775808, not"),
    "the greatest start": (
        BOUNDARIES - 8,
        "<q",
        2**63 - 2,
        "its last sequence ends at byte 9223372036854775824 of the 46",
    ),
    "a start inside a token": (POINTERS + 8, "<q", 7, "sequence 1 has 1 tokens from byte 7, not from byte 6"),
    "a start before another": (POINTERS + 16, "<q", 4, "sequence 2 has 4 tokens from byte 4, not from byte 8"),
    "not from the first": (BOUNDARIES, "<q", 1, "document 0 starts at sequence 1, out of order"),
    "a boundary before another": (BOUNDARIES + 16, "<q", 1, "document 2 starts at sequence 1, out of order"),
    "a boundary beyond the end": (BOUNDARIES + 32, "<q", 8, "the last document ends at sequence 8 of 7"),
    "sequences of no document": (BOUNDARIES + 32, "<q", 6, "the last document ends at sequence 6 of 7"),
}


@pytest.mark.parametrize("thorough", [False, True])
@pytest.mark.parametrize(("at", "layout", "value", "reason"), HEADERS.values(), ids=HEADERS)
def test_a_wrong_header(prefix: Path, at: int, layout: str, value: int, reason: str, thorough: bool) -> None:
    change(prefix, at, layout, value)
    with pytest.raises(ValueError, match=f"data.idx: .*{reason}.*; build it again with tools/preprocess_data.py"):
        check_indices([str(prefix)], thorough)


@pytest.mark.parametrize("chunk", [1, 2, 1 << 18])
@pytest.mark.parametrize(("at", "layout", "value", "reason"), NUMBERS.values(), ids=NUMBERS)
def test_a_wrong_number(prefix: Path, monkeypatch, at: int, layout: str, value: int, reason: str, chunk: int) -> None:
    monkeypatch.setattr(data_files, "_CHUNK", chunk)
    change(prefix, at, layout, value)
    with pytest.raises(ValueError, match=f"data.idx: {reason}.*; build it again with tools/preprocess_data.py"):
        check_indices([str(prefix)], thorough=True)


@pytest.mark.parametrize("missing", [".idx", ".bin"])
@pytest.mark.parametrize("thorough", [False, True])
def test_a_missing_file(prefix: Path, missing: str, thorough: bool) -> None:
    os.unlink(f"{prefix}{missing}")
    with pytest.raises(ValueError, match=rf"data{missing}: no such file; give the PREFIX of files PREFIX.idx"):
        check_indices([str(prefix)], thorough)


def test_a_directory_in_place_of_a_file(prefix: Path) -> None:
    os.unlink(f"{prefix}.idx")
    os.mkdir(f"{prefix}.idx")
    with pytest.raises(ValueError, match=r"data\.idx is not a regular file; build it again"):
        check_indices([str(prefix)], thorough=False)


def test_a_bin_file_cut_short(prefix: Path) -> None:
    os.truncate(f"{prefix}.bin", 44)
    with pytest.raises(ValueError, match=r"data\.idx: its last sequence ends at byte 46 of the 44 of the .bin file"):
        check_samples([str(prefix)], vocabulary=99)
    os.truncate(f"{prefix}.bin", 0)
    with pytest.raises(ValueError, match="0 bytes of tokens"):
        check_indices([str(prefix)], thorough=False)


def test_no_tokens(prefix: Path) -> None:
    """megatron-core would search for enough epochs forever."""
    for index in range(SEQUENCES):
        change(prefix, HEADER + 4 * index, "<i", 0)
        change(prefix, POINTERS + 8 * index, "<q", 0)
    with pytest.raises(ValueError, match="has no tokens"):
        check_indices([str(prefix)], thorough=True)


@settings(max_examples=150)
@given(st.data())
def test_what_passes_can_be_read(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "mutated"
    folder.mkdir(exist_ok=True)
    prefix = build(folder)
    path = Path(f"{prefix}.idx")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF)) | st.integers(0, 255))
    del content[data.draw(st.integers(1, len(content)) | st.just(len(content))) :]
    path.write_bytes(content)
    try:
        check_indices([str(prefix)], thorough=True)
    except ValueError as error:
        assert str(error).startswith(f"{path}: ")
        return
    read_all(prefix)


def zip_of_arrays(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, array=np.arange(3))


def header(path: Path, description: str, version: bytes = b"\x01\x00") -> None:
    length = struct.pack("<H" if version[0] == 1 else "<I", len(description))
    path.write_bytes(b"\x93NUMPY" + version + length + description.encode())


ARRAY = "{'descr': '<i4', 'fortran_order': False, 'shape': %s}"
WRONG_CACHES: dict[str, Callable[[Path], object]] = {
    "floats": lambda path: np.save(path, np.ones(3)),
    "fields": lambda path: np.save(path, np.zeros(3, [("a", "<i4")])),
    "objects": lambda path: np.save(path, np.array([{}], dtype=object)),
    "nothing": lambda path: path.write_bytes(b""),
    "a zip": zip_of_arrays,
    "cut short": lambda path: (np.save(path, np.arange(9)), os.truncate(path, path.stat().st_size - 1)),
    "shape that wraps around": lambda path: header(path, ARRAY % f"({2**62}, 4)"),
    "calls": lambda path: header(path, ARRAY % "__import__('os').system('true')"),
    "a header of gigabytes": lambda path: header(path, " " * 70_000, b"\x02\x00"),
    "a directory": lambda path: path.mkdir(),
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("write", WRONG_CACHES.values(), ids=WRONG_CACHES)
def test_a_wrong_cache(tmp_path: Path, write: Callable[[Path], object]) -> None:
    path = tmp_path / "0-GPTDataset-train-shuffle_index.npy"
    write(path)
    with pytest.raises(
        ValueError, match=r"shuffle_index\.npy: is not a cached index \(.*\); delete it, and the next run"
    ):
        check_caches([], str(tmp_path))


@pytest.mark.parametrize("in_default_directory", [False, True])
@pytest.mark.parametrize("payload", CALLS.values(), ids=CALLS)
def test_a_hostile_cache_is_named_and_does_not_run(
    tmp_path: Path, payload: Callable[[Path], bytes], in_default_directory: bool
) -> None:
    prefix = tmp_path / "data"
    canary = tmp_path / "canary"
    directory = prefix / "cache" / "GPTDataset_indices" if in_default_directory else tmp_path / "caches"
    directory.mkdir(parents=True)
    path = directory / "0-GPTDataset-train-document_index.npy"
    path.write_bytes(payload(canary))
    with pytest.raises(ValueError, match=r"document_index\.npy: is not a cached index"):
        check_caches([str(prefix)], None if in_default_directory else str(directory))
    assert not canary.exists()
    # As megatron-core does; the result, if any, is not an array
    with contextlib.suppress(pickle.UnpicklingError):
        np.load(path, allow_pickle=True, mmap_mode="r")
    assert canary.exists()


@pytest.mark.parametrize("array", [np.zeros((0, 2), np.int32), np.arange(6).reshape(3, 2), np.arange(6, dtype="u4")])
def test_a_cache_passes(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "index.npy", array)
    np.save(tmp_path / "fortran.npy", np.asfortranarray(array))
    (tmp_path / "description.txt").write_text("{}")
    check_caches(["nowhere"], str(tmp_path))
    check_caches(["nowhere"], None)


def check_on_ranks(paths: list[str], cache: str | None, lacking: int | None, directories: Sequence[Path] = ()) -> str:
    """Return the error of `_check_files` if one rank lacks the files that others have; a task for ranks.

    Args:
        directories: the ranks' working directories, if they differ.
    """
    before = Path.cwd()
    if directories:
        os.chdir(directories[torch.distributed.get_rank()])
    given = [f"{path}.absent" for path in paths] if torch.distributed.get_rank() == lacking else paths
    files = SimpleNamespace(
        data_path=given, train_data_path=None, valid_data_path=None, test_data_path=None, data_cache_path=cache
    )
    try:
        data._check_files(SimpleNamespace(**vars(files), mock_data=False, sft=False), reads=True)
    except ValueError as error:
        return str(error)
    finally:
        os.chdir(before)
    return ""


@pytest.mark.parametrize(
    ("ending", "tokens"),
    [("bin", 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("bin", 10**6), ("idx", 8)))],
)
def test_nodes_with_different_data(ranks, tmp_path: Path, ending: str, tokens: int) -> None:
    """Two nodes have consistent files with the same name but different content."""
    nodes = [tmp_path / name for name in ("one", "two")]
    lengths = [tokens, 2]

    def write(node: Path, lengths: list[int], last: int) -> None:
        builder = IndexedDatasetBuilder(str(node / "data.bin"), dtype=np.uint16)
        builder.add_document(np.append(np.zeros(sum(lengths) - 1), last), lengths)
        builder.finalize(str(node / "data.idx"))

    for node in nodes:
        node.mkdir()
        write(node, lengths, 0)
    run = ranks(2).run
    assert run(check_on_ranks, ["data"], None, None, nodes) == ["", ""]
    if ending == "bin":
        write(nodes[1], lengths, 1)
    else:
        write(nodes[1], lengths[::-1], 0)
    (message,) = set(run(check_on_ranks, ["data"], None, None, nodes))
    assert message == f"data.{ending}: another file on rank 1 than on rank 0; give all nodes the same data"


def test_every_rank_raises_what_one_rank_finds(ranks, prefix: Path) -> None:
    run = ranks(2).run
    assert run(check_on_ranks, [str(prefix)], None, None) == ["", ""]
    (message,) = set(run(check_on_ranks, [str(prefix)], None, 1))
    assert message.startswith(f"rank 1: {prefix}.absent.bin: no such file")
    change(prefix, HEADER, "<i", -1)
    (message,) = set(run(check_on_ranks, [str(prefix)], None, None))
    assert message.startswith(f"{prefix}.idx: sequence 0 has -1 tokens")
