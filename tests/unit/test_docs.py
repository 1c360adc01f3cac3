"""What the documents show works as it stands there."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.placement.cost_model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.policies import load_policy
from megatron_balance.profile.cluster_profile import builtin
from megatron_balance.workloads.synthetic import load_matrix
from tests import features

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_readme_says_which_environment_its_commands_need() -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    commands = re.compile(r"(\w+=\S+ )*(python|torchrun|pip)\b")
    assert lines.index("source .venv/bin/activate") < min(map(lines.index, filter(commands.match, lines)))
    files = [word for line in lines for word in line.split() if word.startswith(("scripts/", "tools/", "configs/"))]
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_what_is_installed_comes_from_the_checkout() -> None:
    """The package is in no registry."""
    pages = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "megatron_balance").rglob("*.py")]
    for page in pages:
        assert not re.search(r"pip install [^\n`]*megatron-balance", page.read_text(encoding="utf-8")), page


def test_the_policy_in_the_docs_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (DOCS / "balancing.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(example.splitlines()) <= 20
    (tmp_path / "my_policies.py").write_text(example, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    policy = load_policy("my_policies:Favourites")
    sys.modules.pop("my_policies")
    current = Placement.identity(16, 4, guest_slots=1)
    # Experts that are cheap to move and dear to compute
    cost = CostModel(builtin(4, 4, hidden=4096, ffn=16384), token_bytes=1, param_bytes=1, grad_bytes=1)
    planned = policy.plan(load_matrix("hot_experts", 4, 16, 2, 4096, seed=0, step=0), current, cost)
    assert planned.added_hosts == 4
    assert policy.plan(np.zeros((4, 16), dtype=np.int64), current, cost).is_identity


def test_the_table_of_features_is_that_of_the_tests() -> None:
    page = (DOCS / "features.md").read_text(encoding="utf-8")
    assert page.endswith("\n".join(["", *features.table(), ""])), "run python -m tests.features"


def test_the_page_shows_the_patch() -> None:
    patch = (DOCS / "pretrain_gpt.patch").read_text(encoding="utf-8")
    shown = re.findall(r"```diff\n(.*?)```", (DOCS / "inside_megatron_lm.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown == [patch[patch.index("--- a") :]]
