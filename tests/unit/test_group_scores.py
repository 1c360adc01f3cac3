"""How routers choose: scores of groups of experts, megatron-core's where they agree and DeepSeek's where they do not,
and expert biases with softmax scores."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from megatron_balance.flow.routers import BiasedChoices, GroupScores

GROUPS = 4
EXPERTS = 12


def route(logits_TE: torch.Tensor, topk: int, group_topk: int, best: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return megatron-core's combine weights and choices, [T, E] each."""
    return topk_routing_with_score_function(
        logits_TE,
        topk,
        use_pre_softmax=True,
        num_groups=GROUPS,
        group_topk=group_topk,
        router_replay=None if best is None else GroupScores(best),
    )


@pytest.mark.parametrize(("topk", "group_topk"), [(2, 2), (4, 2), (6, 3), (3, 1)])
def test_the_default_number_of_experts_gives_megatrons_choices(topk: int, group_topk: int) -> None:
    logits_TE = torch.randn(64, EXPERTS, generator=torch.Generator().manual_seed(1))
    expected = route(logits_TE, topk, group_topk, None)
    for found, wanted in zip(route(logits_TE, topk, group_topk, topk // group_topk), expected, strict=True):
        assert torch.equal(found, wanted)


def test_one_good_expert_is_enough_for_a_group() -> None:
    """Groups of three experts: one has the best expert, another the two best together, and two have neither."""
    logits_TE = torch.tensor([[5.0, -9, -9, 4.9, 4.8, -9, -9, -9, -9, -9, -9, 3.0]])
    for best, group in ((1, 0), (2, 1)):
        _, map_TE = route(logits_TE, 3, 1, best)
        assert map_TE.view(GROUPS, -1).sum(1).nonzero().tolist() == [[group]]


def test_losses_see_the_weights_of_the_chosen_experts_only() -> None:
    logits_TE = torch.randn(16, EXPERTS, generator=torch.Generator().manual_seed(2), requires_grad=True)
    weights_TE, map_TE = route(logits_TE, 4, 2, 1)
    assert torch.equal(weights_TE > 0, map_TE) and (map_TE.sum(1) == 4).all()
    (gradient_TE,) = torch.autograd.grad((weights_TE * torch.arange(EXPERTS)).sum(), logits_TE)
    assert gradient_TE.isfinite().all() and gradient_TE.abs().sum() > 0


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_biases_choose_and_do_not_weigh(pre_softmax: bool) -> None:
    """The reference is ERNIE 4.5's: the scores of the chosen experts, divided by their sum unless `pre_softmax`."""
    generator = torch.Generator().manual_seed(3)
    logits_TE = torch.randn(64, EXPERTS, generator=generator)
    bias_E = torch.randn(EXPERTS, generator=generator) / 10
    config = SimpleNamespace(moe_router_pre_softmax=pre_softmax)
    router: Any = SimpleNamespace(config=config, expert_bias=bias_E)
    hook = BiasedChoices(router)
    weights_TE, map_TE = topk_routing_with_score_function(
        logits_TE, 3, use_pre_softmax=pre_softmax, router_replay=cast(Any, hook)
    )
    scores_TE = logits_TE.softmax(1)
    chosen_TK = (scores_TE + bias_E).topk(3).indices
    scores_TK = scores_TE.gather(1, chosen_TK)
    wanted_TK = scores_TK if pre_softmax else scores_TK / scores_TK.sum(1, keepdim=True)
    assert torch.allclose(weights_TE.gather(1, chosen_TK), wanted_TK) and map_TE.gather(1, chosen_TK).all()
    assert not torch.equal(chosen_TK.sort().values, scores_TE.topk(3).indices.sort().values)
