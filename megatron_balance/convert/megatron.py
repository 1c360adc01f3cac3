"""Read checkpoints of Megatron-LM (torch_dist) in order to convert them.

Both formats store megatron-core's tensors under its names. In Megatron-LM's, experts may be separate tensors, the flags
are an object in the checkpoint, and there is no manifest.
"""

import argparse
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatron_balance.checkpoint import saved_flags
from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.checkpoint.safe_pickle import read_common
from megatron_balance.convert import torch_dist
from megatron_balance.convert.pieces import HALVES, SAME, Piece, Size
from megatron_balance.files.reading import shown
from megatron_balance.messages import cleaned

MODEL = ("embedding.", "decoder.", "mtp.", "output_layer.")
"""Prefixes of the keys of weights."""

OWN_EXPERT = re.compile(r"(.*\.experts\.experts\.)(\d+)\.(.*?)(_[wv])?$")
"""Key of one expert's tensor, as megatron-core's `singleton_local_shards` writes it; gate and up projection are
separate."""

OWN_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.*)")
"""Key of one layer's tensor, which megatron-core writes if layers differ or experts are separate tensors."""

STACKED = re.compile(r"decoder\.layers\.(?!\d)")
"""Key of a tensor that holds all layers."""

UPSTREAM_NAMES = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
"""Fields whose names differ in Megatron-LM's args."""


_Own = tuple[int | None, int | None]
"""Layer and expert of a tensor; None where it holds all of them."""


class MegatronCheckpoint:
    """A checkpoint of Megatron-LM, read piece by piece. `source` is the directory with
    latest_checkpointed_iteration.txt; `step` is the checkpoint's iteration, by default the latest. Raises ValueError,
    which names it, if the checkpoint or a part is missing, or if it holds something else; Damaged if a file is damaged
    or would run code."""

    def __init__(self, source: Path, step: int | None) -> None:
        self.path = CheckpointDirectory(source).chosen(step)
        self._reader = torch_dist.Reader(self.path)
        self.tensors = {name: entry for name, entry in self._reader.weights.items() if name.startswith(MODEL)}
        if not self.tensors:
            raise ValueError(f"{self.path}: has no weights of a GPT model ({', '.join(MODEL)}...)")
        args = read_common(self.path).get("args")
        if not isinstance(args, argparse.Namespace):
            raise ValueError(f"{self.path}: has no args, which define the model")
        names = {name: UPSTREAM_NAMES.get(name, name) for name in saved_flags.CHECKPOINT_FIELDS}
        self._args = {name: vars(args)[theirs] for name, theirs in names.items() if theirs in vars(args)}
        for name, value in self._args.items():
            if not saved_flags.is_plain(value):
                raise ValueError(f"{self.path}: args.{names[name]} is {shown(value)} instead of a number or text")
        sizes = {name: tuple(entry.size) for name, entry in self.tensors.items()}
        self.files = pieces_of(sizes, stack=self._args.get("moe_layer_freq", 1) == 1)

    def dtype(self, piece: Piece) -> torch.dtype:
        return self.tensors[piece.sources[0]].properties.dtype

    def make(self, piece: Piece) -> torch.Tensor:
        """Read a piece; raise ValueError if it contains NaN or infinity."""
        parts = []
        for name, size in piece.source_sizes.items():
            whole = tuple(self.tensors[name].size)
            parts.append(self._reader.read(Piece(name, whole, piece.at[: len(whole) - len(size)], ())))
            if not bool(parts[-1].isfinite().all()):
                raise ValueError(f"{self.path}: {name} is not finite everywhere")
        return piece.join.join(parts)

    def flags(self) -> str:
        """Return Megatron-LM's args in the form that `saved_flags` writes."""
        return json.dumps({"upstream": self._args})


def pieces_of(sizes: Mapping[str, Size], stack: bool) -> list[list[Piece]]:
    """Return the pieces of a checkpoint with all experts in one tensor, given the tensor shapes of any checkpoint: one
    list for each tensor outside the layers, and one for each layer. `stack`: whether to join all layers into one
    tensor, instead of keeping separate layers separate. Raise ValueError if a layer or an expert is missing."""
    sources: dict[str, dict[_Own, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(sizes, key=lambda name: (name.endswith("_v"), name)):
        key = name
        layer = None
        expert = None
        if match := OWN_EXPERT.match(key):
            key = match[1] + match[3]
            expert = int(match[2])
        if stack and (match := OWN_LAYER.match(key)):
            key = match[1] + match[3]
            layer = int(match[2])
        sources[key][layer, expert].append(name)
    files: dict[str, list[Piece]] = defaultdict(list)
    for key, names in sources.items():
        for piece in _pieces(key, names, sizes):
            in_layer = piece.at[0] if STACKED.match(key) else key.split(".")[2]
            files[f"layer {in_layer}" if key.startswith("decoder.layers.") else key].append(piece)
    return list(files.values())


def _pieces(key: str, names: Mapping[_Own, list[str]], sizes: Mapping[str, Size]) -> Iterator[Piece]:
    """Generate the pieces of one tensor from the corresponding tensors of Megatron-LM."""
    own, first = next(iter(names.items()))
    inner = sizes[first[0]]
    axes = []
    if len(inner) < 1 or any(sizes[name] != inner for parts in names.values() for name in parts):
        raise ValueError(f"{cleaned(key)}: its layers or experts have different shapes")
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
        layer = at[0] if STACKED.match(key) else None
        expert = at[-1] if ".experts.experts." in key else None
        wanted = (layer if own[0] is not None else None, expert if own[1] is not None else None)
        if wanted not in names:
            raise ValueError(f"{key}: layer {layer}, expert {expert} is missing")
        parts = tuple(names[wanted])
        yield Piece(key, (*axes, *inner), at, parts, join=HALVES if len(parts) == 2 else SAME)
