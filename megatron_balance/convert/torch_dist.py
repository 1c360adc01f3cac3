"""Read and write torch_dist checkpoints piece by piece, with only one piece in memory.

The format is that of torch.distributed.checkpoint, whose own reader and writer do the work.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_balance.checkpoint.manifest import Damaged
from megatron_balance.checkpoint.safe_pickle import CONFIG, METADATA, read_metadata
from megatron_balance.convert.pieces import Piece, PieceSource
from megatron_balance.files.writing import writing
from megatron_balance.messages import cleaned


class Reader:
    """Reader of a checkpoint's tensors. Raises Damaged if a file is invalid or would run code."""

    def __init__(self, directory: Path) -> None:
        metadata = read_metadata(directory)
        weights = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not name.startswith("optimizer.")
        }
        _check_extents(directory / METADATA, weights, metadata.storage_data)
        self._storage = FileSystemReader(directory)
        self._storage.set_up_storage_reader(metadata, is_coordinator=True)
        self.weights = weights
        """All tensors except the optimizer's state."""

    def read(self, piece: Piece) -> torch.Tensor:
        """Return a piece of one tensor; of a tensor with more rows (a padded vocabulary), the first ones. Raise
        ValueError if the tensor has another shape."""
        found = self.weights[piece.key]
        if len(found.size) != len(piece.shape) or found.size[0] < piece.shape[0] or found.size[1:] != piece.shape[1:]:
            raise ValueError(f"{piece.key}: is {tuple(found.size)} in the checkpoint instead of {piece.shape}")
        chunk = chunk_of(piece)
        target = torch.empty(chunk.sizes, dtype=found.properties.dtype)
        plan = LoadPlan(create_read_items_for_chunk_list(piece.key, found, [chunk]))
        self._storage.read_data(plan, cast(LoadPlanner, _Into(target))).wait()
        return target.reshape(piece.size)


def _check_extents(
    path: Path, weights: Mapping[str, TensorStorageMetadata], storage: Mapping[MetadataIndex, _StorageInfo]
) -> None:
    """Raise Damaged unless the parts of every weight cover it exactly and the files have enough bytes for them. The
    sizes come from a file but determine the allocated memory; uncovered elements would stay uninitialized."""
    for name, entry in weights.items():
        there = 0
        for chunk in entry.chunks:
            extents = zip(chunk.offsets, chunk.sizes, entry.size, strict=False)
            same_axes = len(chunk.offsets) == len(chunk.sizes) == len(entry.size)
            if not same_axes or any(not 0 <= start < start + length <= size for start, length, size in extents):
                raise Damaged(path, f"{cleaned(name)}: has a part that is outside of it")
            numbers = math.prod(chunk.sizes)
            info = storage.get(MetadataIndex(name, chunk.offsets))
            if info is None or info.length < numbers * entry.properties.dtype.itemsize:
                raise Damaged(path, f"{cleaned(name)}: its part at {list(chunk.offsets)} is not in the files")
            there += numbers
        if there != math.prod(entry.size):
            raise Damaged(path, f"{cleaned(name)}: its parts have {there} numbers of {math.prod(entry.size)}")


class _Into:
    """Stand-in for a LoadPlanner that reads everything into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target

    def resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        where = zip(item.dest_offsets, item.lengths, strict=True)
        return self.target[tuple(slice(start, start + length) for start, length in where)]

    def commit_tensor(self, item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class _From:
    """Stand-in for a SavePlanner that makes each piece only when it is written."""

    def __init__(self, pieces: Sequence[Piece], source: PieceSource) -> None:
        self.pieces = {_index(piece): piece for piece in pieces}
        self.source = source

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        piece = self.pieces[item.index]
        return self.source.make(piece).reshape(chunk_of(piece).sizes).contiguous()


def chunk_of(piece: Piece) -> ChunkStorageMetadata:
    """Return the position and size of a piece in its tensor."""
    offsets = torch.Size([*piece.at, *[0] * len(piece.size)])
    return ChunkStorageMetadata(offsets, torch.Size([*[1] * len(piece.at), *piece.size]))


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.key, chunk_of(piece).offsets)


def write(directory: Path, files: Iterable[Sequence[Piece]], source: PieceSource) -> None:
    """Write tensors piece by piece into an empty directory, as one rank's part of a torch_dist checkpoint; `files` are
    the pieces of each file."""
    writer = FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, thread_count=1)
    writer.set_up_storage_writer(is_coordinator=True)
    results: list[Any] = []
    described: dict[str, TensorStorageMetadata] = {}
    for number, pieces in enumerate(files):
        items = []
        for piece in pieces:
            chunk = chunk_of(piece)
            tensor = TensorWriteData(chunk, TensorProperties(dtype=source.dtype(piece)), torch.Size(piece.shape))
            entry = TensorStorageMetadata(tensor.properties, tensor.size, [])
            described.setdefault(piece.key, entry).chunks.append(chunk)
            items.append(WriteItem(_index(piece), WriteItemType.SHARD, tensor_data=tensor))
        plan = SavePlan(items, storage_data=_StoragePrefix(f"__{number}_"))
        with writing(directory / f"__{number}_0.distcp"):
            results.append(writer.write_data(plan, cast(SavePlanner, _From(pieces, source))).wait())
    with writing(directory / METADATA):
        writer.finish(Metadata(state_dict_metadata=cast(Any, described)), results)
    with writing(directory / CONFIG):
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))
