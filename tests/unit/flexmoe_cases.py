"""Layers that FlexMoE plans for: loads, placements in use and cost models."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from megatron_balance.cost.model import CostModel, Overlap
from megatron_balance.placement.placement import Placement
from megatron_balance.profile.cluster_profile import builtin
from tests.unit.placements import loads, placements


def cost_model(
    num_ranks: int, node_size: int = 8, expert_bytes: float = 8e6, split: str = "proportional", **options: Any
) -> CostModel:
    return CostModel(
        builtin(num_ranks, node_size, 1024, 2048),
        token_bytes=2048,
        param_bytes=expert_bytes,
        grad_bytes=expert_bytes,
        split=split,
        **options,
    )


def with_rates(cost: CostModel, rates: Sequence[float]) -> CostModel:
    return replace(cost, profile=replace(cost.profile, rates=tuple(rates)))


@st.composite
def drawn_costs(draw: st.DrawFn, num_ranks: int, microbatches: int) -> CostModel:
    """Draw a cost model with cheap or expensive guests, hidden or not, and ranks of equal or of any speed."""
    cost = cost_model(
        num_ranks,
        draw(st.integers(1, 4)),
        draw(st.sampled_from([0.0, 1e5, 1e7])),
        draw(st.sampled_from(["proportional", "proportional", "local_first"])),
        overlap=draw(st.sampled_from([None, Overlap(1e-4, 2e-4)])),
        microbatches=microbatches,
    )
    if draw(st.booleans()):
        cost = with_rates(cost, [draw(st.sampled_from([0.5, 1.0, 1.5])) for _ in range(num_ranks)])
    return cost


@st.composite
def layers(draw: st.DrawFn) -> tuple[np.ndarray, Placement, CostModel]:
    """Draw a placement in use, its load in one or two microbatches, and a cost model."""
    placement = draw(placements(with_quotas=False))
    microbatches = draw(st.integers(1, 2))
    counts_BDE = np.stack([draw(loads(placement, largest=100_000)).numpy() for _ in range(microbatches)])
    cost = draw(drawn_costs(placement.num_ranks, microbatches))
    return counts_BDE, placement, cost
