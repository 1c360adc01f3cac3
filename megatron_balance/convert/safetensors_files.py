"""Read and write the files of a Hugging Face model: config.json, safetensors with their index, tokenizer files.

Weights are read only from safetensors, never from pickles, and code that comes with a model is never run.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_balance.checkpoint.manifest import is_plain_name
from megatron_balance.files.reading import MIB, check_regular, inside, read_bounded, read_object
from megatron_balance.files.writing import writing
from megatron_balance.messages import cleaned

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

CONFIG = "config.json"

CARRIED = (
    *(CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template*", "spiece.model"),
)
"""Names of files that are copied along with a model's weights."""

MAX_INDEX_BYTES = 24 * MIB
"""Limit for the index. A tensor takes about 100 bytes, so there is room for 250,000."""

MAX_PARTS = 1_000_000
"""Limit of the tensors that a model has after those of several experts are divided. The largest have 100,000."""

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


class Weights:
    """The tensors of a model's safetensors files, read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Read the headers of all files.

        Raises:
            ValueError: a file is missing or invalid; the message names it.
        """
        self.directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        listed = self._listed()
        files = sorted({*listed.values()} or {SINGLE})
        if missing := [file for file in files if not inside(directory, file).exists()]:
            raise ValueError(_without_files(directory, missing, len(files)))
        for file in files:
            self._read_header(file)
        for name, file in listed.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise ValueError(f"{directory / INDEX}: {cleaned(name)} is not in {file}")
        if unlisted := sorted(self.tensors.keys() - listed.keys()) if listed else []:
            raise ValueError(f"{directory / INDEX}: does not list {cleaned(', '.join(unlisted[:20]), 1000)}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors, by name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def _listed(self) -> dict[str, str]:
        path = self.directory / INDEX
        if not os.path.lexists(path):
            return {}
        listed = read_object(inside(self.directory, INDEX), MAX_INDEX_BYTES).get("weight_map")
        plain = isinstance(listed, dict) and all(is_plain_name(file) for file in listed.values())
        if not listed or not plain:
            raise ValueError(f"{path}: has no weight_map from tensors to files in the same directory")
        return listed

    def _read_header(self, file: str) -> None:
        path = inside(self.directory, file)
        # The library would wait for a FIFO
        check_regular(path)
        try:
            with safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it cannot be iterated
                    part = opened.get_slice(name)
                    if part.get_dtype() not in DTYPES:
                        raise ValueError(
                            f"{path}: {cleaned(name)} is {part.get_dtype()}; only {', '.join(DTYPES)} are supported; "
                            "convert quantized weights to bfloat16 first"
                        )
                    if name in self.tensors:
                        raise ValueError(f"{path}: {cleaned(name)} is also in {self.tensors[name].file}")
                    dtype = DTYPES[part.get_dtype()]
                    self.tensors[name] = StoredTensor(file, name, tuple(part.get_shape()), dtype)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged: {cleaned(error)}") from error

    def divide(self, name: str, parts: Mapping[str, tuple[int | slice, ...]]) -> None:
        """Replace a tensor by parts of it.

        Args:
            parts: index of each part in the tensor, by the part's name.

        Raises:
            ValueError: there is already a tensor of such a name, or there are too many parts.
        """
        tensor = self.tensors.pop(name)
        path = self.directory / tensor.file
        if twice := self.tensors.keys() & parts.keys():
            raise ValueError(f"{path}: {cleaned(name)} also contains {cleaned(min(twice))}")
        if len(self.tensors) + len(parts) > MAX_PARTS:
            raise ValueError(f"{path}: more than {MAX_PARTS} tensors")
        whole = torch.empty(tensor.shape, device="meta")
        for part, index in parts.items():
            self.tensors[part] = tensor._replace(shape=tuple(whole[index].shape), part=index)

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor.

        Raises:
            ValueError: the tensor can no longer be read, or contains NaN or infinity.
        """
        stored = self.tensors[name]
        path = inside(self.directory, stored.file)
        try:
            with safe_open(path, "pt") as opened:
                if stored.part is None:
                    tensor = opened.get_tensor(stored.name)
                else:
                    tensor = opened.get_slice(stored.name)[stored.part]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged: {cleaned(error)}") from error
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{path}: {name} is not finite everywhere")
        return tensor


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
        index: Mapping[str, Any] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        with writing(directory / INDEX):
            (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def carry(source: Path, target: Path) -> None:
    """Copy the files of a model other than its weights.

    Raises:
        ValueError: a file is a link out of the model's directory, not a regular file, or too large; the message names
            it.
        OSError: `target` cannot be written, or already contains such a file or a link in its place.
    """
    target.mkdir(parents=True, exist_ok=True)
    for pattern in CARRIED:
        for path in source.glob(pattern):
            if not path.is_dir():
                content = read_bounded(inside(source, path.name), MAX_CARRIED_BYTES)
                with writing(target / path.name), open(target / path.name, "xb") as file:
                    file.write(content)


ADAPTER = "adapter_config.json"
"""File that makes a directory an adapter (LoRA) for transformers, also next to a whole model."""

REMEDIES = {
    "*.bin *.pt *.pth *.ckpt": "only safetensors are read; save the model with transformers' save_pretrained",
    "*.gguf *.ggml *.npz *.msgpack *.h5": "only safetensors are read; take the model that this file was made from",
    "*.safetensors": f"name the file {SINGLE}, or put {INDEX} next to the files",
}
"""What to do if a directory has only such files."""


def check_adapter(directory: Path) -> None:
    """Raise ValueError if a directory holds an adapter (LoRA) instead of a model."""
    if os.path.lexists(directory / ADAPTER):
        raise ValueError(
            f"{directory / ADAPTER}: an adapter (LoRA), not a whole model; merge it into its base model (peft: "
            "merge_and_unload, then save_pretrained) and give the result"
        )


def _without_files(directory: Path, missing: Sequence[str], number: int) -> str:
    """Return the error for a directory that lacks some of its `number` files."""
    if missing != [SINGLE]:
        names = f"{', '.join(missing[:20])}{', ...' if len(missing) > 20 else ''}"
        return f"{directory / INDEX}: {len(missing)} of its {number} files are missing; download them: {names}"
    for patterns, remedy in REMEDIES.items():
        if found := sorted(path.name for pattern in patterns.split() for path in directory.glob(pattern)):
            return f"{directory / SINGLE}: missing; {cleaned(found[0])} is there: {remedy}"
    return f"{directory / SINGLE}: missing"
