"""The slow reference of `cost.messages.fastest_sending`: it lays out all messages of every route."""

import functools
from collections.abc import Iterator

import numpy as np

from megatron_balance.cost.messages import MOST_STAGED, PIECES
from megatron_balance.cost.sending import BatchLoads, BatchModel, BatchTimes, Sending, SendingModel
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import ROUTES, Hops, hops


def routes(model: SendingModel, placement: Placement) -> Iterator[Sending]:
    """Yield the best number of pieces for each route; skip a route without more stages than earlier ones."""
    stages = 0
    for route in ROUTES:
        found = hops(placement, model.profile.node_size, route)
        if int(found.stage_M.max()) + 1 > stages:
            stages = int(found.stage_M.max()) + 1
            yield Sending(route, *fewest_pieces(model.batches, found, model.least_rounds))


def fewest_pieces(models: tuple[BatchModel, BatchModel], found: Hops, least_rounds: int) -> tuple[int, float, float]:
    """Return the number of pieces with the fastest Trans, and the seconds of Trans and of Agg. `models`: (Trans, Agg).
    `found` must not be empty."""
    stages = int(found.stage_M.max()) + 1
    first_X, after_X, number_AX = _windows(stages)
    by_stage = BatchLoads.of(models[0].network, found.source_M, found.target_M, 1 / found.parts_M, found.stage_M)
    sums = [np.insert(array_FWXD.cumsum(2), 0, 0, axis=2) for array_FWXD in by_stage]
    loads = BatchLoads(*(sum_FWXD[:, :, after_X] - sum_FWXD[:, :, first_X] for sum_FWXD in sums))
    pieces_A = np.array(PIECES)
    staged_X = loads.amount_FWXD[:, 0].sum(0).max(-1) * models[1].size
    staged_A = (staged_X * (number_AX > 0)).max(1) / pieces_A
    fits_A = (pieces_A + stages - 1 >= least_rounds) & (staged_A <= max(MOST_STAGED, staged_A.min()))
    trans_A, agg_A = (
        model.start + number_AX @ latency_X + number_AX @ bytes_X / pieces_A
        for model, (latency_X, bytes_X) in ((model, totals(model.times(loads))) for model in models)
    )
    best = int(np.where(fits_A, trans_A, np.inf).argmin())
    return PIECES[best], float(trans_A[best]), float(agg_A[best])


def totals(times: BatchTimes) -> np.ndarray:
    """Return [2, X]: latency, and time in proportion to experts' sizes, if all ranks begin and end batches together."""
    bytes_X = np.maximum(times.byte_FXD.max((0, -1)), times.node_WXN.max((0, -1)))
    return np.stack([times.latency_XD.max(-1), times.tensor_XD.max(-1) + bytes_X])


@functools.cache
def _windows(stages: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the possible ranges of stages in a batch of `plan_hops`, and [A, X] their numbers for PIECES."""
    windows = [(first, after) for first in range(stages) for after in range(first + 1, stages + 1)]
    number_AX = np.zeros((len(PIECES), len(windows)))
    for row, pieces in zip(number_AX, PIECES, strict=True):
        for batch in range(pieces + stages - 1):
            row[windows.index((max(0, batch - pieces + 1), min(batch, stages - 1) + 1))] += 1
    first_X, after_X = np.array(windows).T
    return first_X, after_X, number_AX
