"""Policies: functions from an expected load and the present placement to the next placement. One file each."""

from collections.abc import Mapping
from typing import Any

from megatron_balance.config.flags import named
from megatron_balance.messages import cleaned, described
from megatron_balance.placement.policies.demi import Demi
from megatron_balance.placement.policies.demi_baselines import DemiS1, DemiS2, DemiS3
from megatron_balance.placement.policies.fastermoe import FasterMoE
from megatron_balance.placement.policies.flexmoe import FlexMoE
from megatron_balance.placement.policies.interface import Policy
from megatron_balance.placement.policies.none import NoPolicy
from megatron_balance.placement.policies.pro_prophet import ProProphet
from megatron_balance.placement.policies.top_k import Top2, Top3
from megatron_balance.placement.splits import SPLITS

POLICIES: dict[str, type[Policy]] = {
    "none": NoPolicy,
    "pro_prophet": ProProphet,
    "fastermoe": FasterMoE,
    "flexmoe": FlexMoE,
    "top2": Top2,
    "top3": Top3,
    "demi": Demi,
    "demi_s1": DemiS1,
    "demi_s2": DemiS2,
    "demi_s3": DemiS3,
}

OPTIONS: dict[str, dict[str, str]] = {
    "pro_prophet": {"alpha": "balance_alpha"},
    "flexmoe": {
        "threshold": "balance_threshold",
        "metric": "balance_metric",
        "vexperts_per_rank": "balance_vexperts_per_rank",
    },
    "demi": {"slots": "balance_demi_slots", "weights": "balance_demi_weights", "capacities": "balance_capacities"},
}
"""Policy -> its options, and the fields of the flags that set them. A policy from elsewhere has none."""

OPTION_FIELDS = tuple(field for options in OPTIONS.values() for field in options.values())


def policy_options(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a policy is to be made with, from flags' values by field name."""
    return {option: values[field] for option, field in OPTIONS.get(name, {}).items()}


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
        plan = getattr(policy, "plan", None)
    except TypeError as error:
        raise ValueError(f"{flag}: cannot be made with options {sorted(options)}: {cleaned(error)}") from error
    except BaseException as error:  # anybody's constructor
        if name in POLICIES:
            raise
        raise ValueError(f"{flag}: cannot be made: {described(error)}") from error
    if not callable(plan):
        raise ValueError(f"{flag}: has no method plan(counts_DE, current, cost)")
    return policy


def split_of(policy: Policy) -> str:
    """How a policy wants tokens to be shared, `Policy.split`.

    Raises:
        ValueError: not a name in SPLITS.
    """
    split = getattr(policy, "split", "local_first")
    if type(split) is not str or split not in SPLITS:
        raise ValueError(f"{type(policy).__qualname__}.split is {cleaned(split, 60)}: choose from {', '.join(SPLITS)}")
    return split
