"""Changes to megatron-core's routers: auxiliary losses by their definitions, precision of counts, and how they choose.

A microbatch's loss is the sum of the parts of the ranks that share its tokens (the router's `tp_cp_group`). A run's
loss is the mean over microbatches and data-parallel ranks. Versions of megatron-core scale some of these losses by the
number of ranks, and log some losses for one rank only. The losses:

    aux_loss          of a microbatch (Switch Transformer, https://arxiv.org/abs/2101.03961, section 2.2)
    seq_aux_loss      of each sequence, then averaged (DeepSeek-V3, https://arxiv.org/abs/2412.19437, Eq. 17)
    global_aux_loss   of a microbatch, with the experts' shares of all tokens that the iteration has routed so far
                      (https://arxiv.org/abs/2501.11873)
    z-loss            of each token, then averaged (ST-MoE, https://arxiv.org/abs/2202.08906, Eq. 5)
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, clear_aux_losses_tracker, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_balance.device.versions import number_of

Weight = Callable[[torch.Tensor | int], torch.Tensor | int]
"""Returns the factor of a microbatch's losses, given its number of tokens on all ranks that share it."""

LOAD_BALANCING = ("_apply_aux_loss", "_apply_seq_aux_loss", "_apply_global_aux_loss")
"""Methods of a router that compute load-balancing losses from probabilities and scores."""


def routers_of(model: Iterable[torch.nn.Module]) -> Iterator[TopKRouter]:
    """Yield the routers of model chunks in the order of layers."""
    for chunk in model:
        yield from (module for module in chunk.modules() if isinstance(module, TopKRouter))


def keep_precision(model: Iterable[torch.nn.Module]) -> None:
    """Convert routers' counts and expert biases back to float32, after the model was converted to half precision.
    Counts in bfloat16 stop growing at 256, and float16 ends at 65504. A bias would lose most of each update."""
    for router in routers_of(model):
        for buffer in router.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.data = buffer.data.float()


def define_losses(model: Iterable[torch.nn.Module], weight: Weight | None) -> None:
    """Make routers add and log their auxiliary losses as defined in this module's docstring. `weight` is for
    `--calculate-per-token-loss`, where gradients are summed and then divided by the unmasked tokens."""
    for router in routers_of(model):
        for name in LOAD_BALANCING:
            setattr(router, name, functools.partial(_apply_in_float32, getattr(router, name)))
        settings: Any = router
        settings.attach_and_log_load_balancing_loss = functools.partial(_add_load_balancing_loss, router, weight)
        settings.apply_z_loss = functools.partial(_add_z_loss, router, weight)


def take_losses(names: Sequence[str], layers: int) -> torch.Tensor:
    """Return this rank's parts of the losses [names, layers of the model], summed since the previous call."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # since 0.19
        entries: Any = moe_utils.get_moe_metrics_tracker().metrics  # pyright: ignore[reportAttributeAccessIssue]
        values = {name: entry.values for name, entry in entries.items()}
    else:
        values = {name: entry["values"] for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()}
    none = torch.zeros(layers, device=torch.cuda.current_device())
    taken = torch.stack([values.get(name, none) for name in names])
    clear_aux_losses_tracker()
    return taken


def _apply_in_float32(
    apply: Callable[..., torch.Tensor], probs: torch.Tensor, scores: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor:
    """Call one of `LOAD_BALANCING` in float32, because sums over tokens may exceed float16's maximum."""
    return apply(probs, _at_least_float32(scores), *args, **options)


def _add_load_balancing_loss(
    router: TopKRouter,
    weight: Weight | None,
    activation: torch.Tensor,
    coefficient: float,
    loss: torch.Tensor,
    name: str,
    group: dist.ProcessGroup,
    *_: Any,
    valid_token_count: torch.Tensor | int | None = None,
    **__: Any,
) -> torch.Tensor:
    # The loss of a global batch sums the parts of all replicas, but gradients are averaged over replicas
    replicas = group.size() // router.tp_cp_group.size()
    loss = loss if replicas == 1 else loss * replicas
    # Without a padding mask the count is no tensor, and megatron-core 0.16 passes the tokens of one sequence
    padded = isinstance(valid_token_count, torch.Tensor)
    tokens = valid_token_count if padded else activation.shape[0]
    return _add(router, weight, activation, name, loss / coefficient, loss, tokens)


def _add_z_loss(
    router: TopKRouter, weight: Weight | None, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> torch.Tensor:
    coefficient = router.config.moe_z_loss_coeff
    if coefficient is None or not router.training or not torch.is_grad_enabled():
        return logits
    share = 1 / router.tp_cp_group.size()
    value = z_loss_func(_at_least_float32(logits), share, padding_mask=padding_mask)
    tokens = logits.shape[0] if padding_mask is None else (~padding_mask).sum()
    return _add(router, weight, logits, "z_loss", value, value * coefficient, tokens)


def _add(
    router: TopKRouter,
    weight: Weight | None,
    activation: torch.Tensor,
    name: str,
    value: torch.Tensor,
    loss: torch.Tensor,
    tokens: torch.Tensor | int | None,
) -> torch.Tensor:
    """Return `activation` with `loss` attached to its backward pass; log `value`, the loss without its coefficient."""
    config = router.config
    size = router.tp_cp_group.size()
    if getattr(router, "is_mtp_layer", False) and getattr(config, "mtp_use_repeated_layer", False):
        assert config.mtp_num_layers is not None
        value = value / config.mtp_num_layers
        loss = loss / config.mtp_num_layers
    if router.layer_number is not None:
        record: Any = moe_utils.save_to_aux_losses_tracker
        if hasattr(moe_utils, "get_moe_metrics_tracker"):  # since 0.19
            record = moe_utils.get_moe_metrics_tracker().record  # pyright: ignore[reportAttributeAccessIssue]
        layers = config.num_layers + (config.mtp_num_layers or 0)
        record(name, value, number_of(router), layers, reduce_group=router.tp_cp_group)
    if weight is not None:
        assert tokens is not None
        loss = loss * weight(tokens * size)
    return MoEAuxLossAutoScaler.apply(activation, loss)


def _at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class GroupScores(RouterReplay):
    """Chooses experts from the groups in which the sum of the `experts` highest scores is largest: one in DeepSeek-V2
    (section 2.2.2), two in DeepSeek-V3 (section 2.1.2), always `topk // group_topk` in megatron-core. The base class is
    megatron-core's hook for given choices, which leaves probabilities and losses to megatron-core."""

    def __init__(self, experts: int) -> None:
        # The base's constructor would add every instance to a global list that is never cleared
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
        """Return the scores [T, K] of the chosen experts, and the experts [T, K]. `scores` [T, E] include the expert
        bias. A token chooses among `num_groups` groups of consecutive experts."""
        assert num_groups is not None and group_topk is not None
        groups_TGE = scores.unflatten(1, (num_groups, -1))
        groups_TG = groups_TGE.topk(self.experts, dim=2).values.sum(2)
        best = groups_TG.topk(group_topk, dim=1, sorted=False).indices
        outside_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(1, best, False)
        chosen = groups_TGE.masked_fill(outside_TG.unsqueeze(2), float("-inf")).flatten(1).topk(topk, dim=1)
        return chosen.values, chosen.indices


class BiasedChoices(RouterReplay):
    """Chooses the experts with the highest sums of softmax score and expert bias (ERNIE 4.5), which megatron-core does
    with sigmoid scores only. Biases do not change the combine weights."""

    def __init__(self, router: TopKRouter) -> None:
        # See GroupScores
        self.router = router

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores [T, K] of the chosen experts, and the experts [T, K]. `scores` [T, E] are logits, or
        softmax scores with `--moe-router-pre-softmax`."""
        assert self.router.expert_bias is not None
        probabilities_TE = scores if self.router.config.moe_router_pre_softmax else scores.softmax(1, torch.float32)
        chosen_TK = (probabilities_TE + self.router.expert_bias).topk(topk, dim=1).indices
        return scores.gather(1, chosen_TK), chosen_TK


def bias_choices(model: Iterable[torch.nn.Module]) -> None:
    """Make routers with softmax scores add their expert biases to choose, unless they replay given choices."""
    for router in routers_of(model):
        if router.enable_expert_bias and router.score_function == "softmax" and router.router_replay is None:
            router.router_replay = BiasedChoices(router)


def score_groups(model: Iterable[torch.nn.Module], experts: int) -> None:
    """Make routers score a group by its `experts` best experts, unless they replay given choices."""
    for router in routers_of(model):
        if router.router_replay is None:
            router.router_replay = GroupScores(experts)
