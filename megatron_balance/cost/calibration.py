"""Calibration of a layer's cost model by measured seconds.

The factor of a component is the median ratio of measured over predicted seconds, over the latest iterations in which
the component occurred; a few slow iterations have no effect. Each iteration has one ratio for all layers and ranks.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from megatron_balance.cost.model import CostModel
from megatron_balance.profile.cluster_profile import Fit, Throughput

WINDOW = 15
"""Number of iterations in the median."""

LEAST, MOST = 1e-6, 1e6
"""Limits of a factor."""

Line = TypeVar("Line", Fit, Throughput)


class Factors(NamedTuple):
    """Ratio of measured over predicted seconds, by component."""

    exchange: float = 1.0
    """All-to-alls and their codecs."""
    experts: float = 1.0
    """Computation of the experts; also applied to the non-MoE computation that hides Trans and Agg."""
    trans: float = 1.0
    agg: float = 1.0


UNCALIBRATED = Factors()


@dataclass(frozen=True)
class Calibration:
    """Running estimate of the factors."""

    ratios: tuple[tuple[float, ...], ...] = ((),) * len(Factors._fields)
    """The latest ratios of each component, at most WINDOW, oldest first."""

    @property
    def factors(self) -> Factors:
        """The estimate; 1 for components that have never occurred."""
        return Factors(*(statistics.median(ratios) if ratios else 1.0 for ratios in self.ratios))

    def observe(self, measured: Sequence[float], predicted: Sequence[float], used: Factors) -> "Calibration":
        """Return the estimate after one more iteration; components without predicted seconds did not occur in it. The
        factors `used` are part of the predicted seconds."""
        found = []
        for ratios, seconds, expected, factor in zip(self.ratios, measured, predicted, used, strict=True):
            if expected > 0:
                ratios = (*ratios, min(max(factor * seconds / expected, LEAST), MOST))[-WINDOW:]
            found.append(ratios)
        return Calibration(tuple(found))

    def to_plain(self) -> list[list[float]]:
        """Return the state for a checkpoint: lists and numbers."""
        return [list(ratios) for ratios in self.ratios]

    @classmethod
    def from_plain(cls, plain: Sequence[Sequence[float]]) -> "Calibration":
        """Return the inverse of `to_plain`."""
        return cls(tuple(map(tuple, plain)))


def calibrated(cost: CostModel, factors: Factors) -> CostModel:
    """Return the cost model with the factors applied; a Transfer has the factor of an exchange."""
    if factors == UNCALIBRATED:
        return cost
    overlap = cost.overlap
    if overlap is not None:
        forward = factors.experts * overlap.forward
        backward = factors.experts * overlap.backward
        overlap = overlap._replace(forward=forward, backward=backward)
    by_kind = {"trans": factors.trans, "agg": factors.agg}
    profile = replace(
        cost.profile,
        links={
            kind: {group: _slower(line, by_kind.get(kind, factors.exchange)) for group, line in groups.items()}
            for kind, groups in cost.profile.links.items()
        },
        messages={level: _slower(line, factors.exchange) for level, line in cost.profile.messages.items()},
        launches={
            kind: {level: _slower(line, by_kind[kind]) for level, line in lines.items()}
            for kind, lines in cost.profile.launches.items()
        },
        all_to_alls={name: _slower(line, factors.exchange) for name, line in cost.profile.all_to_alls.items()},
        forward=_slower(cost.profile.forward, factors.experts),
        backward=_slower(cost.profile.backward, factors.experts),
    )
    return replace(cost, profile=profile, coding=factors.exchange * cost.coding, overlap=overlap)


def _slower(line: Line, factor: float) -> Line:
    """Return the line with its seconds, the first two fields, multiplied."""
    return line._replace(**{name: factor * getattr(line, name) for name in line._fields[:2]})
