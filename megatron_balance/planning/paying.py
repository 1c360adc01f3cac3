"""Whether a policy's plans pay: what the last ones would have saved under the loads that came."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.interface import owners_host

REMEMBERED = 8
"""Number of plans that decide whether the next one is used: two periods of W7, one of the workload burst."""


class Tried(NamedTuple):
    """The last plan of a policy, used or not, and what earlier ones were worth."""

    placement: Placement | None = None
    """None: no plan was made yet."""
    gains: tuple[float, ...] = ()
    """Share of the layer's seconds that the plans before this one saved; negative if they cost more."""

    def under(self, counts: np.ndarray, cost: CostModel) -> tuple[float, ...]:
        """Return the gains of the last REMEMBERED plans, with the last one's under the loads that came.

        Args:
            counts: as in `Policy.plan`, of the iteration that the last plan was made for.
        """
        if self.placement is None:
            return self.gains
        gain = 0.0
        if not self.placement.is_identity:
            alone, planned = (
                cost.layer_seconds(counts, each) for each in (owners_host(self.placement), self.placement)
            )
            gain = 1 - planned / alone if alone else 0.0
        return (*self.gains, gain)[-REMEMBERED:]


def pays(gains: Sequence[float]) -> bool:
    """Return whether plans saved more than they cost: also True before there are two."""
    return len(gains) < 2 or sum(gains) >= 0
