"""A router's choice of experts, and its auxiliary loss."""

import torch

from tests.hostcuda.packages import kernels


def _scores(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    return logits.sigmoid() if score_function == "sigmoid" else logits.softmax(-1)


def _check(logits: torch.Tensor, score_function: str) -> None:
    kernels.dense(logits=logits)
    kernels.require(logits.numel() > 0, "num_tokens and num_experts must be greater than 0")
    kernels.require(
        score_function in ("softmax", "sigmoid"), "score_function must be softmax or sigmoid for router fusion"
    )


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int,
    group_topk: int,
    scaling_factor: float,
    score_function: str,
    expert_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen experts' probabilities, zero for all others, and their map, both shaped as `logits`."""
    if logits.dtype == torch.float64:
        raise ValueError("Current TE does not support float64 router type")
    _check(logits, score_function)
    kernels.require(
        expert_bias is None or score_function == "sigmoid",
        "score_function must be sigmoid when expert_bias is not None",
    )
    kernels.dense(expert_bias=expert_bias)
    if num_groups and num_groups > 0:
        raise NotImplementedError("fused_topk_with_score_function with groups of experts")
    rows = logits.view(-1, logits.shape[-1])
    if score_function == "sigmoid":
        scores = rows.float().sigmoid()
        chosen = (scores if expert_bias is None else scores + expert_bias).topk(topk, -1).indices
        found = scores.gather(1, chosen)
        found = found / (found.sum(-1, keepdim=True) + 1e-20) if topk > 1 else found
    elif use_pre_softmax:
        found, chosen = rows.float().softmax(-1).topk(topk, -1)
    else:
        found, chosen = rows.float().topk(topk, -1)
        found = found.softmax(-1)
    if scaling_factor:
        found = found * scaling_factor
    probs = torch.zeros_like(rows).scatter(1, chosen, found.to(logits.dtype))
    routing_map = torch.zeros_like(rows, dtype=torch.bool).scatter(1, chosen, True)
    return probs.view(logits.shape), routing_map


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the map of chosen experts and all scores, both shaped as `logits`."""
    _check(logits, score_function)
    kernels.require(topk > 0, "topk must be greater than 0")
    rows = logits.view(-1, logits.shape[-1])
    scores = _scores(rows, score_function)
    if score_function == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    chosen = rows.topk(topk, -1).indices
    return torch.zeros_like(rows, dtype=torch.bool).scatter(1, chosen, True), scores.view(logits.shape)


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """Return the Switch Transformer's loss, a scalar.

    Args:
        probs: [tokens, experts].
        tokens_per_expert: [experts], of all `total_num_tokens`.
    """
    kernels.dense(probs=probs, tokens_per_expert=tokens_per_expert)
    kernels.require(topk > 0 and num_experts > 0, "topk must be greater than 0")
    kernels.require(int(total_num_tokens) > 0, "total_num_tokens must be greater than 0")
    mean = (probs.sum(0) * tokens_per_expert).sum()
    return mean * (num_experts * coeff / (topk * int(total_num_tokens) ** 2))
