"""Read and write the files of a Hugging Face model: config.json, safetensors with their index, tokenizer files.

Weights are read only from safetensors, never from pickles, and code that comes with a model is never run.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_balance.checkpoint.manifest import is_plain_name
from megatron_balance.convert import mxfp4
from megatron_balance.convert.pieces import Piece
from megatron_balance.files.reading import MIB, check_regular, inside, read_bounded, read_object
from megatron_balance.files.writing import write_file, writing
from megatron_balance.messages import cleaned

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

CONFIG = "config.json"

CARRIED = (
    *(CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template*", "spiece.model"),
)
"""Names of files that are copied along with a model's weights."""

ADAPTER = "adapter_config.json"
"""File that makes a directory an adapter (LoRA) for transformers, also next to a whole model."""

MAX_INDEX_BYTES = 24 * MIB
"""Limit for the index. A tensor takes about 100 bytes, so there is room for 250,000."""

MAX_CARRIED_BYTES = 256 * MIB
"""Limit for a tokenizer's file; large ones have 40 MiB."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, or a part of one."""

    file: str
    name: str
    """Name in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: tuple[int | slice, ...] | None = None
    """Index of the part; None for the whole tensor."""
    scales: "StoredTensor | None" = None
    """Scales of a tensor in MXFP4, which has the shape and the type that it has when it is read."""


class Weights:
    """The tensors of a model's safetensors files, read one at a time. Raises ValueError, which names the file, if one
    is missing or its header is invalid."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise ValueError(f"--load-dir {directory}: is no directory; give the one that has the model's {CONFIG}")
        if os.path.lexists(directory / ADAPTER):
            raise ValueError(
                f"{directory / ADAPTER}: an adapter (LoRA), not a whole model; merge it into its base model (peft: "
                "merge_and_unload, then save_pretrained) and give the result"
            )
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        listed = self._listed()
        files = sorted({*listed.values()} or {SINGLE})
        if missing := [file for file in files if not inside(directory, file).exists()]:
            raise ValueError(
                f"{directory}: {len(missing)} of its {len(files)} files of weights are missing: "
                f"{', '.join(missing[:20])}; only safetensors are read, named {SINGLE} or listed in {INDEX} (as "
                "transformers' save_pretrained writes them)"
            )
        for file in files:
            self._read_header(file)
        for name, file in listed.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise ValueError(f"{directory / INDEX}: {cleaned(name)} is not in {file}")
        if unlisted := sorted(self.tensors.keys() - listed.keys()) if listed else []:
            raise ValueError(f"{directory / INDEX}: does not list {cleaned(', '.join(unlisted[:20]), 1000)}")
        self._join_blocks()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def _listed(self) -> dict[str, str]:
        path = self.directory / INDEX
        if not os.path.lexists(path):
            return {}
        listed = read_object(inside(self.directory, INDEX), MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(x, str) and is_plain_name(x) for x in listed.values()):
            raise ValueError(f"{path}: has no weight_map from tensors to files in the same directory")
        return listed

    def _read_header(self, file: str) -> None:
        with self._opened(file) as (path, opened):
            for name in opened.keys():  # noqa: SIM118 - it cannot be iterated
                part = opened.get_slice(name)
                dtypes = DTYPES | ({"U8": torch.uint8} if name.endswith((mxfp4.BLOCKS, mxfp4.SCALES)) else {})
                if part.get_dtype() not in dtypes:
                    raise ValueError(
                        f"{path}: {cleaned(name)} is {part.get_dtype()}; only {', '.join(DTYPES)} and MXFP4 are "
                        "supported; convert other quantized weights to bfloat16 first"
                    )
                if name in self.tensors:
                    raise ValueError(f"{path}: {cleaned(name)} is also in {self.tensors[name].file}")
                self.tensors[name] = StoredTensor(file, name, tuple(part.get_shape()), dtypes[part.get_dtype()])

    def _join_blocks(self) -> None:
        """Replace the blocks and scales of each tensor in MXFP4 by that tensor; raise ValueError if they do not fit."""
        small = {name: tensor for name, tensor in self.tensors.items() if tensor.dtype is torch.uint8}
        for name in sorted({name.removesuffix(mxfp4.BLOCKS).removesuffix(mxfp4.SCALES) for name in small}):
            there = [small[name + ending] for ending in (mxfp4.BLOCKS, mxfp4.SCALES) if name + ending in small]
            size = mxfp4.shape(*(tensor.shape for tensor in there)) if len(there) == 2 else None
            if size is None or name in self.tensors:
                shapes = ", ".join(f"{cleaned(tensor.name)} {tensor.shape}" for tensor in there)
                raise ValueError(
                    f"{self.directory}: {shapes}: MXFP4 needs {mxfp4.BLOCKS} [..., O, I / 32, 16] and {mxfp4.SCALES} "
                    "[..., O, I / 32] of each tensor, without the tensor itself"
                )
            blocks, scales = there
            del self.tensors[blocks.name], self.tensors[scales.name]
            self.tensors[name] = blocks._replace(shape=size, dtype=torch.bfloat16, scales=scales)

    @contextlib.contextmanager
    def _opened(self, file: str) -> Iterator[tuple[Path, Any]]:
        """Yield the path and the open file; raise ValueError if it is damaged."""
        path = inside(self.directory, file)
        # The library would wait for a FIFO
        check_regular(path)
        try:
            with safe_open(path, "pt") as opened:
                yield path, opened
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged: {cleaned(error)}") from error

    def divide(self, name: str, parts: Mapping[str, tuple[int | slice, ...]]) -> None:
        """Replace a tensor by its `parts`, indices in the tensor by name; raise ValueError if a part is also there as a
        tensor."""
        tensor = self.tensors.pop(name)
        if twice := self.tensors.keys() & parts.keys():
            raise ValueError(f"{self.directory / tensor.file}: {cleaned(name)} also contains {cleaned(min(twice))}")
        whole = torch.empty(tensor.shape, device="meta")
        for part, index in parts.items():
            self.tensors[part] = tensor._replace(shape=tuple(whole[index].shape), part=index)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor; raise ValueError if it can no longer be read, or contains NaN or infinity."""
        stored = self.tensors[name]
        tensor = self._stored(stored)
        if stored.scales is not None:
            tensor = mxfp4.decoded(tensor, self._stored(stored.scales))
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{self.directory / stored.file}: {name} is not finite everywhere")
        return tensor

    def _stored(self, stored: StoredTensor) -> torch.Tensor:
        """Return a tensor, or a part of one, as it is in its file."""
        with self._opened(stored.file) as (_, opened):
            whole = stored.part is None
            return opened.get_tensor(stored.name) if whole else opened.get_slice(stored.name)[stored.part]

    def dtype(self, piece: Piece) -> torch.dtype:
        """Return the dtype of a piece of a checkpoint, before it is made."""
        return self.tensors[piece.sources[0]].dtype

    def make(self, piece: Piece) -> torch.Tensor:
        """Return a piece of a checkpoint; raise like `read`."""
        return piece.join.join([self.read(name) for name in piece.sources])


def write(directory: Path, files: Sequence[Iterable[tuple[str, torch.Tensor]]]) -> None:
    """Write tensors into safetensors files, with one file at a time in memory, and write their index."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(files):
        file = SINGLE if len(files) == 1 else f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        content = {name: tensor.contiguous() for name, tensor in tensors}
        with writing(directory / file):
            save_file(content, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(content, file)
        total += sum(tensor.nbytes for tensor in content.values())
    if len(files) > 1:
        write_json(
            directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        )


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers does."""
    write_file(path, f"{json.dumps(content, indent=2)}\n".encode())


def carry(source: Path, target: Path) -> None:
    """Copy the files of a model other than its weights into an empty directory. Raise ValueError, which names the file,
    if one is a link out of the model's directory, not regular or too large, and OSError if `target` cannot be
    written."""
    for pattern in CARRIED:
        for path in source.glob(pattern):
            if not path.is_dir():
                write_file(target / path.name, read_bounded(inside(source, path.name), MAX_CARRIED_BYTES))
