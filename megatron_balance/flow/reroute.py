"""Maps chosen logical experts to physical experts, for megatron-core's dispatchers.

The rest of the layer is then an ordinary mixture of P experts. In shapes, K is the maximum number of hosts of an
expert.
"""

import numpy as np
import torch

from megatron_balance.device.host_memory import to_device
from megatron_balance.flow.plan import Choices, DispatchPlan
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SplitName


def reroute(probs_TE: torch.Tensor, map_TE: torch.Tensor, plan: DispatchPlan, source: int) -> Choices:
    """Replace each chosen expert [T, E] by one of its hosts [T, P]; weights keep their gradients. Of the tokens of
    `source` for an expert, the first go to the host with the lowest rank, and so on, in the numbers of `plan`."""
    if plan.placement.tables.in_place:
        return Choices(probs_TE, map_TE)
    physicals_EK = torch.from_numpy(plan.placement.tables.physicals_EK)
    until_EK = plan.tokens_DP[source][physicals_EK].cumsum(1)
    physicals_EK, until_EK = (to_device(table, map_TE.device) for table in (physicals_EK, until_EK))
    return reroute_in_order(probs_TE, map_TE, physicals_EK, until_EK, plan.placement.num_physical)


def reroute_in_order(
    probs_TE: torch.Tensor,
    map_TE: torch.Tensor,
    physicals_EK: torch.Tensor,
    until_EK: torch.Tensor,
    num_physical: int,
) -> Choices:
    """Do the same as `reroute`, given int64 numbers `until_EK` of tokens that go to the first k + 1 hosts of each
    expert; the last column is at least the number of tokens."""
    with torch.no_grad():
        # Index of each token among its expert's tokens. It is below the last end, so the search stays inside the table
        ordinal_ET = map_TE.T.cumsum(1) - 1
        target_TE = physicals_EK.gather(1, torch.searchsorted(until_EK, ordinal_ET, right=True)).T
    return _scattered(probs_TE, map_TE, target_TE, num_physical)


def fixed_targets(placement: Placement, split: SplitName, host: int) -> torch.Tensor | None:
    """Return [E] int64: each expert's only physical target for a host's tokens; None if targets depend on the load."""
    if split != "local_first" and (np.diff(placement.tables.first_E) > 1).any():
        return None
    one_HE = torch.ones(placement.num_ranks, placement.num_experts, dtype=torch.int64)
    physicals = DispatchPlan(one_HE, placement, split).tokens_DP[host].nonzero().squeeze(1)
    target_E = torch.empty(placement.num_experts, dtype=torch.int64)
    target_E[torch.from_numpy(placement.tables.expert_P)[physicals]] = physicals
    return target_E


def reroute_to(target_E: torch.Tensor, probs_TE: torch.Tensor, map_TE: torch.Tensor, placement: Placement) -> Choices:
    """Do the same as `reroute`, given `fixed_targets` on the tokens' device."""
    if placement.tables.in_place:
        return Choices(probs_TE, map_TE)
    return _scattered(probs_TE, map_TE, target_E.expand_as(map_TE), placement.num_physical)


def _scattered(probs_TE: torch.Tensor, map_TE: torch.Tensor, target_TE: torch.Tensor, num_physical: int) -> Choices:
    # No two experts share a target, so whole rows can be scattered, including entries that were not chosen
    shape = len(map_TE), num_physical
    return Choices(
        probs_TE.new_zeros(shape).scatter(1, target_TE, probs_TE),
        map_TE.new_zeros(shape).scatter(1, target_TE, map_TE),
    )
