"""No balancing: owners compute their experts."""

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.interface import Policy, owners_host


class NoPolicy(Policy):
    """Keeps every expert on its owner only, regardless of the load."""

    name = "none"

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        return current if current.is_identity else owners_host(current)
