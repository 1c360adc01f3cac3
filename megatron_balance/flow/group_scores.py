"""Group-limited routing with another score of a group than megatron-core's (`--moe-router-group-score-topk`).

With `--moe-router-num-groups`, a token's experts come from the groups with the highest scores. DeepSeek-V2 scores a
group by its best expert (its section 2.2.2) and DeepSeek-V3 by the sum of its two best (its section 2.1.2), however
many experts a token chooses. megatron-core always adds up the best `topk // group_topk`. As forced workloads do, we use
its hook for given choices, the router replay, so probabilities and losses remain megatron-core's.
"""

from collections.abc import Iterable

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay


class GroupScores(RouterReplay):
    """Choose the experts of the groups whose `experts` highest scores have the largest sums."""

    def __init__(self, experts: int) -> None:
        # Do not call the base's constructor: it adds every instance to a global list that is never cleared
        self.experts = experts

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores [T, K] of the chosen experts, and the experts [T, K], for `scores` [T, E].

        Args:
            scores: scores that experts are chosen by, with the expert bias if there is one.
            topk: K, number of experts of a token.
            num_groups: number of groups of consecutive experts.
            group_topk: number of groups of a token.
        """
        assert num_groups is not None and group_topk is not None
        groups_TGE = scores.unflatten(1, (num_groups, -1))
        groups_TG = groups_TGE.topk(self.experts, dim=2).values.sum(2)
        best = groups_TG.topk(group_topk, dim=1, sorted=False).indices
        outside_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(1, best, False)
        chosen = groups_TGE.masked_fill(outside_TG.unsqueeze(2), float("-inf")).flatten(1).topk(topk, dim=1)
        return chosen.values, chosen.indices


def score_groups(model: Iterable[torch.nn.Module], experts: int) -> None:
    """Make the routers of `model` score a group by its `experts` best experts, unless their choices are given."""
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, TopKRouter) and module.router_replay is None:
                module.router_replay = GroupScores(experts)
