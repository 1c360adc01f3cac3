"""The files of a Hugging Face model: config.json, safetensors and their index, and what else belongs to it.

Only safetensors are read, never pickles, and no code that comes with a model is run.
"""

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_balance.files import writing

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

CARRIED = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json")
CARRIED_TOO = ("vocab.json", "vocab.txt", "merges.txt", "chat_template*", "spiece.model")
"""Names of files that go along with a model's weights."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Weights:
    """The tensors of a model's safetensors files, read one at a time."""

    def __init__(self, directory: Path) -> None:
        """Looks into all files' headers.

        Raises:
            ValueError: a file is missing, or not what it should be; names it.
        """
        self.directory, self.file_of = directory, dict[str, str]()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        listed = self._listed()
        for file in sorted({*listed.values()} or {SINGLE}):
            self._look_into(file)
        for name, file in listed.items():
            if self.file_of.get(name) != file:
                raise ValueError(f"{directory / INDEX}: {name} is not in {file}")
        if unlisted := sorted(self.file_of.keys() - listed.keys()) if listed else []:
            raise ValueError(f"{directory / INDEX}: does not list {', '.join(unlisted[:20])}")

    def _listed(self) -> dict[str, str]:
        path = self.directory / INDEX
        if not path.exists():
            return {}
        listed = read_json(path).get("weight_map")
        plain = isinstance(listed, dict) and all(
            isinstance(file, str) and Path(file).name == file for file in listed.values()
        )
        if not listed or not plain:
            raise ValueError(f"{path}: has no weight_map of names and files beside it")
        return listed

    def _look_into(self, file: str) -> None:
        path = self.directory / file
        if not path.is_file():
            raise ValueError(f"{path}: missing")
        try:
            with safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it cannot be iterated
                    part = opened.get_slice(name)
                    if part.get_dtype() not in DTYPES:
                        raise ValueError(
                            f"{path}: {name} is {part.get_dtype()}; only {', '.join(DTYPES)} are supported"
                        )
                    if name in self.file_of:
                        raise ValueError(f"{path}: {name} is also in {self.file_of[name]}")
                    self.file_of[name], self.shapes[name] = file, tuple(part.get_shape())
                    self.dtypes[name] = DTYPES[part.get_dtype()]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged: {error}") from error

    def read(self, name: str) -> torch.Tensor:
        """One tensor.

        Raises:
            ValueError: it cannot be read any more, or has NaN or infinity in it.
        """
        path = self.directory / self.file_of[name]
        try:
            with safe_open(path, "pt") as opened:
                tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged: {error}") from error
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{path}: {name} is not finite everywhere")
        return tensor


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file.

    Raises:
        ValueError: the file is missing or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__} instead of an object")
    return content


def write(directory: Path, files: Sequence[Iterable[tuple[str, torch.Tensor]]]) -> None:
    """Write tensors into safetensors files, of which one is in memory at a time, and their index."""
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
    """Copy what belongs to a model beside its weights."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in (*CARRIED, *CARRIED_TOO):
        for path in source.glob(pattern):
            if path.is_file():
                with writing(target / path.name):
                    shutil.copyfile(path, target / path.name)
