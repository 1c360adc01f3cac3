"""The router's choice of experts -> the choice of physical experts.

After it, dispatch, experts and combine are an ordinary mixture of P experts.
Shape suffixes: T tokens of this rank, E logical experts, P physical experts, K hosts of the expert with the most.
"""

import torch

from megatron_balance.flow.plan import DispatchPlan, pad_rows


def reroute(
    probs_TE: torch.Tensor, map_TE: torch.Tensor, plan: DispatchPlan, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace each chosen expert by one of its hosts, as many times as `plan` says.

    Of the tokens that chose an expert, the first go to the host of lowest rank, the next to the second, and so on.

    Args:
        probs_TE: [T, E] combine weights; gradients flow through.
        map_TE: [T, E] bool, the experts that each token chose.
        plan: this layer's dispatch plan.
        rank: the source rank, whose tokens these are.

    Returns:
        probs_TP [T, P] and map_TP [T, P], with each token's weights unchanged; the arguments themselves if physical
        and logical experts coincide.
    """
    if plan.placement.expert_of_physical == tuple(range(plan.placement.num_experts)):
        return probs_TE, map_TE
    # No two experts share a target, so that scattering whole rows loses nothing, chosen or not
    target_TE = _targets(map_TE, plan, rank)
    shape = len(map_TE), plan.placement.num_physical
    return (
        probs_TE.new_zeros(shape).scatter(1, target_TE, probs_TE),
        map_TE.new_zeros(shape).scatter(1, target_TE, map_TE),
    )


@torch.no_grad()
def _targets(map_TE: torch.Tensor, plan: DispatchPlan, rank: int) -> torch.Tensor:
    """[T, E]: the physical expert in place of each expert; where a token did not choose it, some host of it."""
    physicals_EK = pad_rows(plan.placement.physicals)
    ends_EK = plan.tokens_DP[rank][physicals_EK].cumsum(1)
    physicals_EK, ends_EK = (table.to(map_TE.device, non_blocking=True) for table in (physicals_EK, ends_EK))
    # The how-manieth token of its expert each one is; below the last end, so that the search never runs over
    ordinal_ET = map_TE.T.cumsum(1) - 1
    return physicals_EK.gather(1, torch.searchsorted(ends_EK, ordinal_ET, right=True)).T
