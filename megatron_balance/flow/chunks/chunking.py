"""The dispatched tokens of a layer in chunks, so that one chunk's exchange overlaps with another's computation.

Every source splits the tokens that it sends to each physical expert, and keeps their order. All ranks know all sizes.
"""

import functools
from dataclasses import dataclass

import torch

from megatron_balance.flow.chunks.order import Order, parse
from megatron_balance.flow.plan import DispatchPlan

Shares = tuple[tuple[tuple[float, ...], ...], ...]
"""[C, D, E]: the fraction of each source's tokens for each expert that each chunk carries."""


@dataclass(frozen=True)
class Chunking:
    """How a layer's tokens are split, and the order in which the chunks pass through it."""

    forward: Order
    backward: Order

    shares: Shares | None = None
    """None: chunks of even size."""

    @functools.cached_property
    def chunks(self) -> int:
        return 1 + max(chunk for _, chunk in self.forward)

    def split(self, plan: DispatchPlan) -> torch.Tensor:
        """Return [C, D, P], tokens from each source to each physical expert in each chunk; the sum is the plan's."""
        if self.chunks == 1:
            return plan.tokens_DP.unsqueeze(0)
        if self.shares is None:
            return split_evenly(plan.tokens_DP, self.chunks)
        return split_by(self.shares, plan)


_AT_ONCE = parse("C1.0 D1.0 E.0 C2.0 D2.0")

UNSPLIT = Chunking(_AT_ONCE, _AT_ONCE)
"""All tokens at once."""


def split_evenly(tokens_DP: torch.Tensor, chunks: int) -> torch.Tensor:
    """Split into [C, D, P]: for each pair of source and physical expert, chunks differ by at most one token.

    Pairs with fewer tokens than chunks do not all use the same chunks: source and expert determine which get more.
    """
    sources, physicals = tokens_DP.shape
    numbers = functools.partial(torch.arange, device=tokens_DP.device)
    turn_DP = numbers(sources).unsqueeze(1) + numbers(physicals)
    cut_C11 = numbers(chunks + 1).view(-1, 1, 1)
    return ((tokens_DP * cut_C11 + turn_DP % chunks) // chunks).diff(dim=0)


def split_by(shares: Shares, plan: DispatchPlan) -> torch.Tensor:
    """Split into [C, D, P] by shares, rounded so that no token is lost; the last chunk takes what they do not cover."""
    shares_CDE = torch.tensor(shares, dtype=torch.float64)
    experts_P = torch.from_numpy(plan.placement.tables.expert_P)
    ends_CDP = (shares_CDE[:, :, experts_P].cumsum(0) * plan.tokens_DP).round().to(torch.int64)
    ends_CDP = torch.minimum(ends_CDP, plan.tokens_DP)
    ends_CDP[-1] = plan.tokens_DP
    return ends_CDP.diff(dim=0, prepend=torch.zeros_like(ends_CDP[:1]))
