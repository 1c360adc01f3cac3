"""Trace v1 of Megatron-LM's imbalance benchmark: the routing of one step as a directory.

manifest.json                    sizes, seed, workload, and the sha256, shape and type of every tensor
tensors/expert_ids.pt            [T, K] int64
tensors/gates.pt                 [T, K] float32, each row adds up to 1
tensors/source_rank.pt           [T] int32, the rank that has the token
tensors/token_ids.pt             [T, K] int64, the same as expert_ids
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

VERSION = 1
DTYPES = {"expert_ids": "int64", "gates": "float32", "source_rank": "int32", "token_ids": "int64"}
GATE_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False)
class Routing:
    """The routing of one layer in one step, for the tokens of all ranks."""

    workload: str
    seed: int
    step: int
    num_experts: int
    num_ranks: int
    hidden_size: int
    experts_TK: np.ndarray
    gates_TK: np.ndarray
    source_T: np.ndarray
    """The rank of each token."""

    def problem(self) -> str | None:
        """Return what is wrong with the routing, if anything."""
        experts_TK = self.experts_TK
        gates_TK = self.gates_TK
        source_T = self.source_T
        if experts_TK.ndim != 2 or not experts_TK.size:
            return "it has no tokens"
        if gates_TK.shape != experts_TK.shape or source_T.shape != experts_TK.shape[:1]:
            return "its tensors have different numbers of tokens or choices"
        if experts_TK.min() < 0 or experts_TK.max() >= self.num_experts:
            return f"it has an expert outside of 0 to {self.num_experts - 1}"
        if source_T.min() < 0 or source_T.max() >= self.num_ranks:
            return f"it has a source rank outside of 0 to {self.num_ranks - 1}"
        if (np.diff(np.sort(experts_TK, axis=1), axis=1) == 0).any():
            return "a token chooses an expert twice"
        if not np.isfinite(gates_TK).all() or (gates_TK < 0).any():
            return "a gate is negative or not finite"
        if np.abs(gates_TK.sum(1) - 1).max() > GATE_TOLERANCE:
            return "the gates of a token do not add up to 1"
        return None


def save(routing: Routing, directory: Path) -> None:
    """Write a trace; the directory must be new or empty.

    Raises:
        ValueError: it is not.
    """
    import torch

    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory}: already has files; choose a new directory")
    (directory / "tensors").mkdir(parents=True, exist_ok=True)
    arrays = {
        "expert_ids": routing.experts_TK,
        "gates": routing.gates_TK,
        "source_rank": routing.source_T,
        "token_ids": routing.experts_TK,
    }
    entries = {}
    for name, array in arrays.items():
        file = f"tensors/{name}.pt"
        torch.save(torch.from_numpy(array.astype(DTYPES[name])), directory / file)
        entries[name] = {"file": file, "sha256": _digest(directory / file)} | _form(array.shape, DTYPES[name])
    tokens, topk = routing.experts_TK.shape
    manifest = {
        "schema_version": VERSION,
        "producer_commit": "megatron_balance",
        "seed": routing.seed,
        "logical_layer_id": 0,
        "step_id": routing.step,
        "microbatch_id": 0,
        "logical_num_tokens": tokens,
        "num_experts": routing.num_experts,
        "topk": topk,
        "hidden_size": routing.hidden_size,
        "world_size": routing.num_ranks,
        "original_partition": "rank-major, contiguous per source rank",
        "workload_id": routing.workload,
        "workload_checksum": hashlib.sha256(routing.experts_TK.tobytes() + routing.gates_TK.tobytes()).hexdigest()[:16],
        "tensors": entries,
        "extra": {},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2))


def load(directory: Path) -> Routing:
    """Read a trace.

    Raises:
        ValueError: a file is missing, is not what the manifest says, or does not describe a routing.
    """
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        if manifest["schema_version"] != VERSION:
            raise ValueError(f"schema_version is {manifest['schema_version']}, and {VERSION} is supported")
        tensors = {name: _tensor(name, directory, manifest["tensors"][name]).numpy() for name in DTYPES}
        routing = Routing(
            workload=str(manifest["workload_id"]),
            seed=int(manifest["seed"]),
            step=int(manifest["step_id"]),
            num_experts=int(manifest["num_experts"]),
            num_ranks=int(manifest["world_size"]),
            hidden_size=int(manifest["hidden_size"]),
            experts_TK=tensors["expert_ids"],
            gates_TK=tensors["gates"],
            source_T=tensors["source_rank"],
        )
    except KeyError as error:
        raise ValueError(f"{directory}: the manifest lacks {error}; record the trace again") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory}: {error}; record the trace again") from error
    problem = routing.problem()
    if (manifest["logical_num_tokens"], manifest["topk"]) != routing.experts_TK.shape:
        problem = "the manifest has another number of tokens or choices"
    elif not np.array_equal(tensors["token_ids"], routing.experts_TK):
        problem = "token_ids and expert_ids differ"
    if problem is not None:
        raise ValueError(f"{directory}: {problem}; record the trace again")
    return routing


def _tensor(name: str, directory: Path, entry: dict[str, Any]) -> "torch.Tensor":
    import pickle

    import torch

    path = directory / entry["file"]
    if _digest(path) != entry["sha256"]:
        raise ValueError(f"the sha256 of {entry['file']} is not that in the manifest")
    try:
        tensor = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{entry['file']} is not a tensor") from error
    form = _form(tensor.shape, str(tensor.dtype).removeprefix("torch."))
    if form != {key: entry[key] for key in form} or form["dtype"] != DTYPES[name]:
        raise ValueError(f"{entry['file']} has shape and type {form}")
    return tensor


def _form(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
