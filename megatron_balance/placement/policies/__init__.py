"""Policies: functions from an expected load and the present placement to the next placement. One file each."""

from typing import Any

from megatron_balance.flags import named
from megatron_balance.placement.policies.fastermoe import FasterMoE
from megatron_balance.placement.policies.interface import Policy
from megatron_balance.placement.policies.none import NoPolicy
from megatron_balance.placement.policies.pro_prophet import ProProphet
from megatron_balance.placement.policies.top_k import Top2, Top3

POLICIES: dict[str, type[Policy]] = {
    "none": NoPolicy,
    "pro_prophet": ProProphet,
    "fastermoe": FasterMoE,
    "top2": Top2,
    "top3": Top3,
}


def load_policy(name: str, **options: Any) -> Policy:
    """A policy by its name here, or by `package.module:Class`.

    Args:
        options: what the policy's class takes, such as alpha.

    Raises:
        ValueError: no such name, module or class, options that the class does not take, or no method `plan`.
    """
    flag = f"--balance-policy {name}"
    factory = named("--balance-policy", name, POLICIES)
    try:
        policy = factory(**options)
    except TypeError as error:
        raise ValueError(f"{flag}: cannot be made with options {sorted(options)}: {error}") from error
    if not callable(getattr(policy, "plan", None)):
        raise ValueError(f"{flag}: has no method plan(counts_DE, current, cost)")
    return policy
