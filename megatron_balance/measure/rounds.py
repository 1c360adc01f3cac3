"""Trans and Agg in batches in which every rank sends and receives the same, for stopwatch.py to time."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy  # imports its parts at their first use, so that a process which does not use them starts sooner
import torch
import torch.distributed as dist

from megatron_balance.comm.trans_agg import ExpertTransfer
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import ExpertPiece, TransPlan
from megatron_balance.profile.cluster_profile import Fit

SHAPES = ((1, 1), (1, 4), (2, 2), (4, 4), (8, 1))
"""Batches, and the experts that a rank sends and receives: from few large batches to many small ones."""

MOST_SENT = 64 << 20
"""Maximum bytes that a rank sends: the loads of all sizes have their memory at the same time."""


class Load(NamedTuple):
    """What every rank sends and receives in a Trans or an Agg."""

    batches: int
    """Each has a piece of every expert."""
    experts: int
    num_bytes: int
    """Bytes of an expert."""


def loads(sizes_bytes: Sequence[int]) -> list[Load]:
    """Return the loads to time with experts of these sizes, ordered by size.

    No rank sends more than the largest size, nor more than MOST_SENT.
    """
    limit = min(max(sizes_bytes), MOST_SENT)
    found = [Load(*shape, size) for size in sorted(sizes_bytes) for shape in SHAPES]
    return [load for load in found if load.experts * load.num_bytes <= limit]


class BatchLines(NamedTuple):
    """Seconds of a Trans or an Agg; the lines have the same errors."""

    line: Fit
    """A batch in which a rank sends and receives one message, over bytes."""
    launch: Fit
    """A batch of empty messages, over the number that a rank sends and receives."""
    start: float
    """Seconds beyond those of batches."""


def fit_batches(given: Sequence[Load], seconds: Sequence[float], tensors: int) -> BatchLines:
    """Fit the seconds to start, of a batch, of a message and of a byte by least squares of relative errors.

    None is negative. Several numbers of batches and messages tell them apart.

    Args:
        tensors: number of tensors of an expert.

    Raises:
        ValueError: there are less than four sizes.
    """
    sizes = sorted({load.num_bytes for load in given})
    if len(sizes) < 4:
        raise ValueError(f"fit: give at least four different sizes, not {sizes}")
    counts_M4 = np.array(
        [
            (1, batches, 2 * experts * (tensors + batches - 1), experts * num_bytes)
            for batches, experts, num_bytes in given
        ]
    )
    share_M4 = counts_M4 / np.array(seconds)[:, None]
    held_M = np.array([sizes.index(load.num_bytes) % 2 == 1 for load in given])
    start, launch, message, byte = _positive(share_M4)
    errors = _error(share_M4, _positive(share_M4)), _error(share_M4[held_M], _positive(share_M4[~held_M]))
    return BatchLines(Fit(launch + 2 * message, byte, *errors), Fit(launch, message, *errors), start)


def _positive(share_M4: np.ndarray) -> list[float]:
    # In one unit, because a byte takes a millionth of a message's seconds
    scale_4 = share_M4.max(0)
    return (scipy.optimize.nnls(share_M4 / scale_4, np.ones(len(share_M4)))[0] / scale_4).tolist()


def _error(share_M4: np.ndarray, seconds_4: list[float]) -> float:
    return float(np.sqrt(np.mean((share_M4 @ seconds_4 - 1) ** 2)))


@dataclass(frozen=True, eq=False)
class _Experts:
    """A rank's slots, as many guests as experts. Their tensors are weights and gradients at once."""

    slots: Sequence[Sequence[torch.Tensor]]

    def ready(self) -> None:
        """There is nothing to wait for."""

    def own(self, home_experts: Sequence[int]) -> None:
        """The experts stay."""

    def weights_of(self, slot: int) -> Sequence[torch.Tensor]:
        return self.slots[slot]

    def gradients_of(self, slot: int) -> Sequence[torch.Tensor]:
        return self.slots[slot]


def plan(num_ranks: int, step: int, load: Load) -> tuple[TransPlan, Placement]:
    """Return a plan in which every rank sends its experts to other ranks in turn, a piece of each in every batch.

    Args:
        step: distances between ranks that exchange messages are multiples of it.
    """
    peers = max(1, num_ranks // step - 1)
    routes = [
        (rank * load.experts + index, rank, (rank + step * (1 + index % peers)) % num_ranks)
        for rank in range(num_ranks)
        for index in range(load.experts)
    ]
    rounds = tuple(tuple(ExpertPiece(*route, piece, load.batches) for route in routes) for piece in range(load.batches))
    owners = Placement.identity(num_ranks * load.experts, num_ranks, load.experts)
    return TransPlan.of(rounds), owners.with_hosts((expert, target) for expert, _, target in routes)


def trans_call(
    group: dist.ProcessGroup, step: int, load: Load, slots: Sequence[Sequence[torch.Tensor]]
) -> Callable[[], None]:
    """Return a Trans of such a plan.

    Args:
        slots: the tensors of as many experts as guests.
    """
    return functools.partial(ExpertTransfer(group).trans, *plan(group.size(), step, load), _Experts(slots))


def agg_call(
    group: dist.ProcessGroup, step: int, load: Load, slots: Sequence[Sequence[torch.Tensor]]
) -> Callable[[], None]:
    """Return the Agg of such a plan; every piece is added up and set to zero."""
    return functools.partial(ExpertTransfer(group).agg, *plan(group.size(), step, load), _Experts(slots))
