"""A mixture of experts by its definition: one process, one expert at a time, no communication.

The layer's fast computation must give the same results. In shapes, F is an expert's inner width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class ExpertWeights:
    """All experts' parameters: w1 [E, F or 2F, H], w2 [E, H, F], b1 [E, F or 2F] and b2 [E, H] or None."""

    w1: torch.Tensor
    w2: torch.Tensor
    b1: torch.Tensor | None = None
    b2: torch.Tensor | None = None


def mixture_of_experts(
    tokens_TH: torch.Tensor,
    probs_TE: torch.Tensor,
    map_TE: torch.Tensor,
    weights: ExpertWeights,
    activation: Callable[[torch.Tensor], torch.Tensor],
    gated: bool,
) -> torch.Tensor:
    """Return, for each token, the sum over its chosen experts of probability times expert(token): [T, H].

    Args:
        tokens_TH: [T, H].
        probs_TE: [T, E] combine weights.
        map_TE: [T, E] bool, the chosen experts.
        weights: all E experts.
        activation: applied between the projections; with `gated`, to the first half, which then multiplies the second.
        gated: whether experts are gated linear units.
    """
    output = torch.zeros_like(tokens_TH)
    for expert in range(map_TE.shape[1]):
        chosen = map_TE[:, expert].nonzero().squeeze(1)
        bias1 = None if weights.b1 is None else weights.b1[expert]
        bias2 = None if weights.b2 is None else weights.b2[expert]
        inner = F.linear(tokens_TH[chosen], weights.w1[expert], bias1)
        if gated:
            gate, linear = inner.chunk(2, dim=-1)
            inner = activation(gate) * linear
        else:
            inner = activation(inner)
        rows = F.linear(inner, weights.w2[expert], bias2) * probs_TE[chosen, expert].unsqueeze(1)
        output = output.index_add(0, chosen, rows)
    return output
