"""Placement policies, one file each: the next placement from an expected load and the current placement.

    interface        Policy, the base class, and functions that several policies share
    none             no balancing: owners compute their experts
    fastermoe        FasterMoE, top2, top3: the hottest experts on every rank
    pro_prophet      Pro-Prophet: the heaviest ranks' experts on the ranks that hold most of their tokens
    flexmoe          FlexMoE: Expand, Shrink and Migrate vExperts, starting from the placement in use
    quota            even loads with few copies, whose hosts take exact numbers of tokens
    demi             DEMI: one host per expert, by the schedule of mini-tasks (planning/demi)
    demi_baselines   demi_s1 to demi_s3: the strategies that DEMI's paper compares with

A new policy is a new file: the functions below find every class of this package that has a `name`.
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_balance.config.flags import named
from megatron_balance.messages import cleaned, described
from megatron_balance.placement.splits import SPLITS
from megatron_balance.planning.policies.interface import Policy


def registered() -> Mapping[str, type[Policy]]:
    """Return the policies in the modules of this package, by name."""
    return _policies_in(*__path__)


@functools.cache
def _policies_in(*directories: str) -> Mapping[str, type[Policy]]:
    found: dict[str, type[Policy]] = {}
    for module in pkgutil.iter_modules(directories, f"{__name__}."):
        for _, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if cls.__module__ == module.name and issubclass(cls, Policy) and "name" in vars(cls):
                assert cls.name not in found, f"two policies are named {cls.name}"
                found[cls.name] = cls
    return MappingProxyType(dict(sorted(found.items())))


def option_fields() -> frozenset[str]:
    """Return the fields of BalanceConfig that only some policies read."""
    return frozenset(field for policy in registered().values() for field in policy.options.values())


def policy_options(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a policy's constructor, given the flags' values by field name."""
    policy = registered().get(name)
    return {option: values[field] for option, field in policy.options.items()} if policy else {}


def load_policy(name: str, **options: Any) -> Policy:
    """Make a policy, with these options, from its registered name or from `package.module:Class`.

    A class from elsewhere need not inherit from Policy: a method `plan` is enough.

    Raises:
        ValueError: there is no such name, module, class or method `plan`, or the class does not take these options.
    """
    flag = f"--balance-policy {name}"
    known = registered()
    factory = named("--balance-policy", name, known)
    try:
        policy = factory(**options)
        plan = getattr(policy, "plan", None)
    except TypeError as error:
        raise ValueError(f"{flag}: cannot be made with options {sorted(options)}: {cleaned(error)}") from error
    except BaseException as error:  # a user's constructor may raise anything
        if name in known:
            raise
        raise ValueError(f"{flag}: cannot be made: {described(error)}") from error
    if not callable(plan):
        raise ValueError(f"{flag}: has no method plan(counts, current, cost)")
    return policy


def split_of(policy: Policy) -> str:
    """Return the policy's `split`, or `local_first` for a class without one; ValueError: it is unknown."""
    split = getattr(policy, "split", Policy.split)
    if type(split) is not str or split not in SPLITS:
        raise ValueError(f"{type(policy).__qualname__}.split is {cleaned(split, 60)}: choose from {', '.join(SPLITS)}")
    return split
