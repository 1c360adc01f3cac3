"""A new policy is one file: flag, help, checks and planner find it, and no other file of the package names a policy."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.cli.arguments import build_parser
from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning import policies
from megatron_balance.planning.policy_process import start_policy
from megatron_balance.profile.cluster_profile import builtin
from tests.unit.test_architecture import FILES, imports
from tests.unit.test_checks import parse

EP4 = "--expert-model-parallel-size 4 --balance-policy next_rank"

NEXT_RANK = '''
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megatron_balance.cost.model import owners
from megatron_balance.planning.policies.interface import Policy, one_host_each


@dataclass(frozen=True)
class NextRank(Policy):
    """Lends the hottest expert to the rank `distance` after its owner."""

    name = "next_rank"
    options = MappingProxyType({"distance": "balance_demi_slots"})

    distance: int = 1

    def check(self, owners):
        if self.distance % owners.num_ranks == 0:
            raise ValueError(f"--balance-demi-slots {self.distance}: give no multiple of {owners.num_ranks}")

    def plan(self, counts_DE, current, cost):
        hosts_E = owners(current)
        hottest = counts_DE.sum(0).argmax()
        hosts_E[hottest] = (hosts_E[hottest] + self.distance) % current.num_ranks
        return one_host_each(current, hosts_E)
'''

SHARED = {"none"}
"""Names that are values of other flags, too: `none` also means no codec and no workload."""


@pytest.fixture(autouse=True)
def next_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "next_rank.py").write_text(NEXT_RANK, encoding="utf-8")
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    build_parser.cache_clear()
    yield
    build_parser.cache_clear()
    sys.modules.pop(f"{policies.__name__}.next_rank", None)


def test_it_is_accepted_and_listed() -> None:
    assert parse(EP4).config.balance.balance_policy == "next_rank"
    assert "  next_rank: Lends" in build_parser().format_help()
    with pytest.raises(ValueError, match=r"^--balance-policy other: choose from demi, .*, next_rank, none"):
        parse("--expert-model-parallel-size 4 --balance-policy other")


def test_it_is_checked() -> None:
    with pytest.raises(ValueError, match=r"^--balance-demi-slots 4: give no multiple of 4"):
        parse(f"{EP4} --balance-demi-slots 4")
    with pytest.raises(ValueError, match=r"^--balance-alpha: has no effect with --balance-policy next_rank"):
        parse(f"{EP4} --balance-alpha 0.1")


def test_it_plans() -> None:
    values = vars(parse(f"{EP4} --balance-demi-slots 3").config.balance)
    policy = start_policy("next_rank", **policies.policy_options("next_rank", values))
    counts_DE = np.ones((4, 8), dtype=np.int64)
    counts_DE[:, 5] = 9
    cost = CostModel(builtin(4, 4, 64, 64), token_bytes=1, param_bytes=1, grad_bytes=1)
    assert policy.plan(counts_DE, Placement.identity(8, 4, 1), cost).hosts[5] == (1,)
    assert policies.split_of(policy) == "local_first"


def policies_named(source: str, names: set[str]) -> list[str]:
    """Return the policies' names among a file's strings, and the policies' modules among its imports."""
    strings = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    homes = {cls.__module__ for cls in policies.registered().values()}
    modules = {module for name in imports(source) for module in (name, name.rpartition(".")[0]) if module in homes}
    return sorted(names & strings) + sorted(modules)


def test_no_other_file_names_a_policy() -> None:
    names = policies.registered().keys() - SHARED
    homes = {sys.modules[cls.__module__].__file__ for cls in policies.registered().values()}
    others = [path for path in FILES if str(path) not in homes]
    found = {path.name: policies_named(path.read_text(encoding="utf-8"), names) for path in others}
    assert {name: said for name, said in found.items() if said} == {}


def test_the_rule_about_names_itself() -> None:
    source = "from megatron_balance.planning.policies.demi import Demi\nif policy == 'top2': pass"
    assert policies_named(source, {"top2", "demi"}) == ["top2", "megatron_balance.planning.policies.demi"]
