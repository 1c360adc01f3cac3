"""How a checkpoint stores experts: one piece per expert and shard, whichever rank owns the expert.

A checkpoint holds `experts.linear_fc1.weight` [..., E, O, I]. It records neither the owner of an expert nor the number
of its shards.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensorFactory


class ShardCut(NamedTuple):
    """How one expert's tensor is cut into shards."""

    axis: int
    shard: int
    shards: int
    parts: int
    """Equal parts along the axis, each of which is cut into shards."""


def by_expert(
    key: str,
    parameter: torch.nn.Parameter,
    *,
    experts: Sequence[int],
    num_experts: int,
    cut: ShardCut,
    offsets: tuple,
    replica: int,
) -> ShardedTensorFactory:
    """Split a parameter [S, ...] into the pieces of its slots, each at its logical expert's place.

    Args:
        key: name in the checkpoint.
        experts: [S] the logical expert in each slot, of `num_experts`.
        offsets: megatron-core's `sharded_offsets` of the axes before the experts.
        replica: number of this copy among the replicas of the same shard.
    """
    # The annotations of megatron-core leave out the lists of pieces that it accepts
    return ShardedTensorFactory(
        key,
        parameter,
        functools.partial(_pieces_by_expert, experts, num_experts, cut, offsets),  # pyright: ignore[reportArgumentType]
        functools.partial(_slots, len(experts)),  # pyright: ignore[reportArgumentType]
        (0, 0, replica),
    )


def _pieces_by_expert(
    experts: Sequence[int],
    num_experts: int,
    cut: ShardCut,
    sharded_offsets: tuple,
    key: str,
    tensor_S: torch.Tensor,
    replica_id: ReplicaId,
    flattened_range: slice | None,
) -> list[ShardedTensor]:
    """Return the pieces of each slot of a parameter, or of its optimizer state, [S, ...]."""
    assert flattened_range is None, "optimizer state is saved in the parameters' shapes"
    axis = len(sharded_offsets)
    pieces: list[tuple[torch.Tensor, tuple[Any, ...]]]
    if cut.shards == 1:
        pieces = [(tensor, ()) for tensor in tensor_S.unbind()]
    else:
        place = [(cut.shard + part * cut.shards, cut.shards * cut.parts) for part in range(cut.parts)]
        pieces = [
            (piece, ((axis + 1 + cut.axis, *at),))
            for tensor in tensor_S.unbind()
            for piece, at in zip(tensor.chunk(cut.parts, cut.axis), place, strict=True)
        ]
    return [
        ShardedTensor.from_rank_offsets(
            key,
            piece,
            *sharded_offsets,
            (axis, experts[number * len(experts) // len(pieces)], num_experts),
            *offsets,
            replica_id=replica_id,
            prepend_axis_num=axis + 1,
        )
        for number, (piece, offsets) in enumerate(pieces)
    ]


def _slots(slots: int, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join the pieces of `_pieces_by_expert`, slot after slot, each along its first axis: [S, ...]."""
    each = len(pieces) // slots
    return torch.stack([torch.cat([*pieces[first : first + each]]) for first in range(0, len(pieces), each)])
