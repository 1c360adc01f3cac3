"""The router's choice of experts -> the choice of physical experts.

After it, dispatch, experts and combine are an ordinary mixture of P experts.
Shape suffixes: T tokens of this rank, E logical experts, P physical experts.
"""

import torch

from megatron_balance.flow.plan import DispatchPlan


def reroute(probs_TE: torch.Tensor, map_TE: torch.Tensor, plan: DispatchPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace each chosen expert by one of its hosts, as many times as `plan` says.

    Args:
        probs_TE: [T, E] combine weights; gradients flow through.
        map_TE: [T, E] bool, the experts that each token chose.
        plan: this layer's dispatch plan.

    Returns:
        probs_TP [T, P] and map_TP [T, P], with each token's weights unchanged.
    """
    assert plan.placement.is_identity, "physical and logical experts coincide"
    return probs_TE, map_TE
