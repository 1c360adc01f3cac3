"""Gradients and printed numbers of one iteration, as a task for ranks: equal weights and samples in every layout.

Whole weights are drawn by their names in a checkpoint, and each rank takes its part of them. Gradients are put together
in the same way.
"""

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model

from megatron_balance.checkpoint.run_state import CONTENT
from megatron_balance.training.loop import train_step
from megatron_balance.training.run import Run
from tests.distributed.runs import BASE, build


class Piece(NamedTuple):
    """A rank's part of the gradient of a tensor in a checkpoint, and where it lies in the whole tensor."""

    name: str
    shape: tuple[int, ...]
    place: tuple[int | slice, ...]
    gradient: torch.Tensor


class Measured(NamedTuple):
    """One rank's part of the gradients, and the numbers that it would print."""

    pieces: list[Piece]
    numbers: dict[str, float]


def measure(flags: str, base: str = BASE) -> Measured:
    """Train one iteration with weights that depend on their names only; `base` as in `runs.build`."""
    run = build(flags, base)
    for piece in _pieces(run, lambda parameter: parameter.data):
        piece.gradient.copy_(_drawn(piece)[piece.place])
    run.optimizer.reload_model_params()
    report = train_step(run)
    for chunk in run.model:
        _gather_reduced(chunk)
    pieces = list(_pieces(run, lambda parameter: parameter.main_grad))
    losses = [report.losses]
    # Only the last pipeline stage has them; the last rank belongs to it
    dist.broadcast_object_list(losses, src=dist.get_world_size() - 1)
    assert report.grad_norm is not None and report.num_zeros is not None and report.params_norm is not None
    numbers = {"grad norm": report.grad_norm, "zeros": report.num_zeros, "params norm": report.params_norm}
    return Measured(pieces, losses[0] | numbers)


def _pieces(run: Run, tensor_of: Callable[[Any], torch.Tensor]) -> Iterator[Piece]:
    """Yield the parts of a tensor of each parameter's shape, named and placed as in a checkpoint."""
    metadata = CONTENT | {"dp_cp_group": run.groups.dp_cp}
    for chunk in unwrap_model(run.model):
        state = chunk.sharded_state_dict(metadata=metadata)
        for name, parameter in chunk.named_parameters():
            entry = state[name]
            entry.data = tensor_of(parameter)
            for part in nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]:
                assert isinstance(part, ShardedTensor) and part.data is not None
                yield Piece(part.key, part.global_shape, part.global_slice(), part.data)


def _drawn(piece: Piece) -> torch.Tensor:
    """Return the whole tensor of which `piece` is a part."""
    generator = torch.Generator().manual_seed(zlib.crc32(piece.name.encode()))
    drawn = 0.1 * torch.randn(piece.shape, generator=generator)
    is_norm = piece.gradient.dim() == 1 and piece.name.endswith("weight")
    return drawn + 1 if is_norm else drawn


def _gather_reduced(chunk: DistributedDataParallel) -> None:
    """Give every rank the gradients of which the distributed optimizer has reduced only its own part."""
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        ranks = group.intra_distributed_optimizer_instance_group
        for bucket in group.buckets:
            own = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=ranks)


def differences(measured: Sequence[Measured], alone: Measured) -> dict[str, float]:
    """Return how far each rank's gradients and numbers are from those of a single rank: relative, by name.

    Each copy of a gradient's part is compared with its place in the single rank's gradient. Gradients that are zero but
    for rounding, such as those of the keys' biases, are compared with a thousandth of the norm of all.
    """
    least = 1e-3 * alone.numbers["grad norm"]
    whole: dict[str, torch.Tensor] = {}
    for piece in alone.pieces:
        whole.setdefault(piece.name, torch.zeros(piece.shape))[piece.place] = piece.gradient
    seen = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    found = dict.fromkeys(whole, 0.0)
    for piece in itertools.chain.from_iterable(one.pieces for one in measured):
        wanted = whole[piece.name]
        error = (piece.gradient - wanted[piece.place]).norm() / max(wanted.norm().item(), least)
        found[piece.name] = max(found[piece.name], error.item())
        seen[piece.name][piece.place] = 1
    assert all(tensor.all() for tensor in seen.values())
    elements = sum(tensor.numel() for tensor in whole.values())
    for name, value in alone.numbers.items():
        size = elements if name == "zeros" else abs(value) or 1.0
        found[name] = max(abs(one.numbers[name] - value) for one in measured) / size
    return found
