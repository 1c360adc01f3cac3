"""Checkpoints of upstream's Megatron-LM (torch_dist) -> checkpoints that training starts from.

Both have megatron-core's tensors under its names. What differs: experts may be tensors of their own there, the flags
are an object in the checkpoint, and no manifest says what belongs to it.
"""

import argparse
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from megatron.core import dist_checkpointing

from megatron_balance.checkpoint import saved_flags
from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.convert import torch_dist
from megatron_balance.convert.pieces import Piece, Rows, Same, Size
from megatron_balance.files.reading import shown
from megatron_balance.messages import cleaned

MODEL = ("embedding.", "decoder.", "output_layer.")
"""What keys of weights begin with."""

OWN_EXPERT = re.compile(r"(.*\.experts\.experts\.)(\d+)\.(.*?)(_[wv])?$")
"""The key of one expert's tensor: megatron-core's `singleton_local_shards`, where gate and linear part are two."""

OWN_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.*)")
"""The key of one layer's tensor: megatron-core's form where layers differ, and wherever experts are by themselves."""

STACKED = re.compile(r"decoder\.layers\.(?!\d)")
"""Keys whose tensors hold all layers."""

UPSTREAM_NAMES = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
"""Fields of ours whose flag has another name in upstream's args."""


_Own = tuple[int | None, int | None]
"""The layer and the expert that a tensor is of, where it is not of all."""


class Checkpoint:
    """A checkpoint of Megatron-LM's, to be read piece by piece."""

    def __init__(self, source: Path, step: int | None) -> None:
        """
        Args:
            source: the directory with latest_checkpointed_iteration.txt.
            step: iteration of the checkpoint; default: the latest.

        Raises:
            ValueError: there is no such checkpoint, or it holds something else, or parts are missing; names them.
            Damaged: reading it would run code, or a file is damaged.
        """
        directory = CheckpointDirectory(source)
        iteration = directory.tracked() if step is None else step
        if iteration is None or not directory.path(iteration).is_dir():
            raise ValueError(f"--load-dir {source}: holds no checkpoint of iteration {iteration}")
        self.path = directory.path(iteration)
        self._reader = torch_dist.Reader(self.path)
        self.tensors = {name: entry for name, entry in self._reader.weights.items() if name.startswith(MODEL)}
        if not self.tensors:
            raise ValueError(f"{self.path}: has no GPT's weights ({', '.join(MODEL)}...)")
        args = dist_checkpointing.load_common_state_dict(str(self.path)).get("args")
        if not isinstance(args, argparse.Namespace):
            raise ValueError(f"{self.path}: has no args, which say what the model is")
        names = {name: UPSTREAM_NAMES.get(name, name) for name in saved_flags.CHECKPOINT_FIELDS}
        self._args = {name: vars(args)[theirs] for name, theirs in names.items() if theirs in vars(args)}
        for name, value in self._args.items():
            if not saved_flags.is_plain(value):
                raise ValueError(f"{self.path}: args.{names[name]} is {shown(value)} instead of a number or text")
        alike = self._args.get("moe_layer_freq", 1) == 1
        self.files = pieces_of({name: tuple(entry.size) for name, entry in self.tensors.items()}, alike)

    def dtype(self, piece: Piece) -> torch.dtype:
        return self.tensors[piece.sources[0]].properties.dtype

    def make(self, piece: Piece) -> torch.Tensor:
        """Read a piece.

        Raises:
            ValueError: it has NaN or infinity in it.
        """
        parts = []
        for name, size in piece.source_sizes.items():
            whole = tuple(self.tensors[name].size)
            parts.append(self._reader.read(Piece(name, whole, piece.at[: len(whole) - len(size)], ())))
            if not bool(parts[-1].isfinite().all()):
                raise ValueError(f"{self.path}: {name} is not finite everywhere")
        return piece.join.join(parts)

    def flags(self) -> str:
        """Upstream's args as `saved_flags` writes them."""
        return json.dumps({"upstream": self._args})


def pieces_of(sizes: Mapping[str, Size], stack: bool) -> list[list[Piece]]:
    """Pieces of a checkpoint with all experts in one tensor, from the keys and shapes of one with either layout.

    Args:
        stack: layers, too, become one tensor; else those that are tensors of their own stay so.

    Returns:
        A list for each tensor outside of layers, and for each layer.

    Raises:
        ValueError: a layer or an expert is missing.
    """
    sources: dict[str, dict[_Own, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(sizes, key=lambda name: (name.endswith("_v"), name)):
        key, layer, expert = name, None, None
        if match := OWN_EXPERT.match(key):
            key, expert = match[1] + match[3], int(match[2])
        if stack and (match := OWN_LAYER.match(key)):
            key, layer = match[1] + match[3], int(match[2])
        sources[key][layer, expert].append(name)
    files: dict[str, list[Piece]] = defaultdict(list)
    for key, names in sources.items():
        for piece in _pieces(key, names, sizes):
            in_layer = piece.at[0] if STACKED.match(key) else key.split(".")[2]
            files[f"layer {in_layer}" if key.startswith("decoder.layers.") else key].append(piece)
    return list(files.values())


def _pieces(key: str, names: Mapping[_Own, list[str]], sizes: Mapping[str, Size]) -> Iterator[Piece]:
    """Of one tensor, from the tensors that it is upstream."""
    own, first = next(iter(names.items()))
    inner, axes = sizes[first[0]], []
    if len(inner) < 1 or any(sizes[name] != inner for parts in names.values() for name in parts):
        raise ValueError(f"{cleaned(key)}: its layers or experts are of different shapes")
    for number, there in enumerate((STACKED.match(key), ".experts.experts." in key)):
        if there and own[number] is None:
            if len(inner) < 2:
                raise ValueError(f"{cleaned(key)}: is {list(sizes[first[0]])}, without an axis for layers or experts")
            axes.append(inner[0])
            inner = inner[1:]
        elif there:
            axes.append(len({numbers[number] for numbers in names}))
    if len(first) == 2:
        inner = (2 * inner[0], *inner[1:])
    for at in itertools.product(*map(range, axes)):
        layer, expert = at[0] if STACKED.match(key) else None, at[-1] if ".experts.experts." in key else None
        wanted = (layer if own[0] is not None else None, expert if own[1] is not None else None)
        if wanted not in names:
            raise ValueError(f"{key}: layer {layer}, expert {expert} is missing")
        parts = tuple(names[wanted])
        yield Piece(key, (*axes, *inner), at, parts, Rows(2) if len(parts) == 2 else Same())
