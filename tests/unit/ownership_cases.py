"""Random Transfers, and a slow reference for their results that permutes all ranks' tensors in one place."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_balance.comm.ownership_transfer import Extent, Field, Interval, Place
from megatron_balance.planning.ownership import OwnerChange

Choose = Callable[[int, int], int]
"""Chooses a number between two bounds, inclusive: drawn by hypothesis or by a seeded generator."""

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Tensors:
    """One field on all ranks."""

    dtype: torch.dtype
    slot_size: int
    kept: tuple[Interval, ...]
    """The interval that each rank of the group keeps."""


@dataclass(frozen=True)
class Case:
    places: tuple[Place, ...]
    slots: int
    moves: tuple[OwnerChange, ...]
    fields: tuple[Tensors, ...]
    staging_bytes: int

    @property
    def extents(self) -> list[list[Extent]]:
        return [[Extent.of(field) for field in self.kept_by(rank)] for rank in range(len(self.places))]

    def kept_by(self, rank: int, moved: bool = False) -> list[Field]:
        """Return a rank's fields before or after the moves; every expert's bytes are random."""
        fields = []
        for number, (dtype, slot_size, kept) in enumerate(
            (field.dtype, field.slot_size, field.kept[rank]) for field in self.fields
        ):
            shape = 1 + max(place.rank for place in self.places), self.slots, slot_size * dtype.itemsize
            before = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
            after = before.clone()
            for move in self.moves if moved else ():
                after[move.target, move.target_slot] = before[move.source, move.source_slot]
            whole = after[self.places[rank].rank].reshape(-1).view(dtype)
            fields.append(Field(slot_size, kept, whole[slice(*kept)].clone()))
        return fields


def equal(some: list[Field], others: list[Field]) -> bool:
    """Return whether all fields are equal, bit for bit."""
    return all(
        one.kept == other.kept and torch.equal(one.values.view(torch.uint8), other.values.view(torch.uint8))
        for one, other in zip(some, others, strict=True)
    )


def draw_case(choose: Choose, num_ranks: int, replicas: int) -> Case:
    """Draw fields of any width, whole or in shards of any size, and moves of between none and all experts."""
    slots = choose(1, 3)
    order = [(rank, slot) for rank in range(num_ranks) for slot in range(slots)]
    swapped = list(order)
    for _ in range(choose(0, 5)):
        one = choose(0, len(order) - 1)
        other = choose(0, len(order) - 1)
        swapped[one], swapped[other] = swapped[other], swapped[one]
    moves = [
        OwnerChange(expert, *source, *target)
        for expert, (source, target) in enumerate(zip(order, swapped, strict=True))
        if source != target
    ]
    replica_first = choose(0, 1)
    places = [Place(rank, replica) for rank in range(num_ranks) for replica in range(replicas)]
    places.sort(key=lambda place: (place.replica, place.rank) if replica_first else place)
    fields = [_tensors(choose, slots, places, replicas) for _ in range(choose(1, 3))]
    return Case(tuple(places), slots, tuple(moves), tuple(fields), choose(1, 60))


def _tensors(choose: Choose, slots: int, places: list[Place], replicas: int) -> Tensors:
    slot_size = choose(1, 9)
    dtype = DTYPES[choose(0, len(DTYPES) - 1)]
    total = slots * slot_size
    if not choose(0, 1):
        return Tensors(dtype, slot_size, ((0, total),) * len(places))
    cuts = [0, *sorted(choose(0, total) for _ in range(replicas - 1)), total]
    return Tensors(dtype, slot_size, tuple((cuts[place.replica], cuts[place.replica + 1]) for place in places))
