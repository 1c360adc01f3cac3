"""Runs in which experts keep changing their owners."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies.interface import Policy
from megatron_balance.profile.cluster_profile import builtin


class Wandering(Policy):
    """Lends the heaviest expert to the rank after its owner, which soon owns it and lends it to the next rank."""

    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        hosts = [(current.owner(expert),) for expert in range(current.num_experts)]
        heaviest = int(counts.sum((0, 1)).argmax())
        hosts[heaviest] = ((current.owner(heaviest) + 1) % current.num_ranks,)
        return current.rehost(hosts)


def wandering(num_ranks: int, directory: Path, ownership: str = "transfer") -> str:
    """Return flags for a cluster where a Transfer costs one slow message, and lending two in each iteration."""
    path = directory / f"{num_ranks}_slow_messages.json"
    if not path.exists():
        profile = builtin(num_ranks, num_ranks, 32, 64)
        slow = {group: fit._replace(alpha=1.0, beta=0.0) for group, fit in profile.links["p2p"].items()}
        directory.mkdir(parents=True, exist_ok=True)
        replace(profile, links={**profile.links, **dict.fromkeys(("p2p", "trans", "agg"), slow)}).save(path)
    return (
        f"--expert-model-parallel-size {num_ranks} --moe-router-force-workload rotating_hotspot --balance-policy "
        f"{__name__}:Wandering --balance-profile {path} --balance-ownership {ownership}"
    )
