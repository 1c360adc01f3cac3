"""Routing of Hugging Face models as flags."""

import pytest

from megatron_balance.convert.model import Model
from tests.unit.published_models import PUBLISHED


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("DeepSeek-V2", {"num-groups": "8", "group-topk": "3", "group-score-topk": "1", "topk-scaling-factor": "16.0"}),
        ("DeepSeek-V2-Lite", {"topk-scaling-factor": "1.0"}),
        (
            "DeepSeek-V3",
            {"score-function": "sigmoid", "num-groups": "8", "group-topk": "4", "topk-scaling-factor": "2.5"},
        ),
    ],
)
def test_group_limited_routing_becomes_flags(name: str, flags: dict[str, str]) -> None:
    given = (flag.removeprefix("--moe-router-").partition("=") for flag in Model(PUBLISHED[name][1]).flags())
    found = {flag: value for flag, _, value in given if value and not flag.startswith("--")}
    assert found == flags | {"topk": str(PUBLISHED[name][1]["num_experts_per_tok"])}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("DeepSeek-V2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc': choose 'greedy' or 'group_limited_g"),
        ("DeepSeek-V2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid': only 'softmax'"),
        ("DeepSeek-V2", {"n_group": 7}, "n_group 7: must divide n_routed_experts 160"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func 'softmax': only 'sigmoid'"),
        ("DeepSeek-V3", {"n_group": 256}, "n_group 256: must divide n_routed_experts 256 into groups of 2 or more"),
        ("DeepSeek-V3", {"topk_group": 9}, "topk_group 9: must be at most n_group 8"),
        ("DeepSeek-V3", {"n_group": 128, "topk_group": 3}, "the groups must have num_experts_per_tok 8 experts"),
        ("DeepSeek-V3", {"moe_layer_freq": 2}, "moe_layer_freq 2: only 1"),
    ],
)
def test_other_routing_is_refused(name: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Model(PUBLISHED[name][1] | changes)
