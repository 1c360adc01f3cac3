"""Command lines for MoE and balancing. tests/mistakes.py has most refusals."""

import pytest

from megatron_balance.cli.checks import NO_EFFECT_WITHOUT_POLICY
from megatron_balance.config.flags import flag_of
from megatron_balance.config.run_config import WORKLOADS
from megatron_balance.planning.policies import registered
from megatron_balance.workloads.synthetic import NAMES
from tests.unit.commands import parse

EP4 = "--expert-model-parallel-size 4"
TOP2 = f"{EP4} --balance-policy top2"

VALUES = {
    **{"balance_guest_slots": "2", "balance_interval": "1", "balance_load": "exact", "balance_predictor": "ema"},
    **{"balance_token_split": "proportional", "balance_profile": "auto", "balance_calibrate": "calibration.jsonl"},
    **{"balance_explain": "", "balance_log_dir": "loads", "balance_overlap": "blockwise"},
    **{"balance_timeline": "traces", "balance_ownership": "transfer", "balance_guest_ring": "3"},
    **{"balance_inner_policy": "quota", "balance_certify": "0.1"},
}
OPTION_VALUES = {
    **{"balance_alpha": "0.5", "balance_threshold": "1.5", "balance_metric": "variance"},
    **{"balance_vexperts_per_rank": "5", "balance_demi_slots": "4", "balance_demi_weights": "linear"},
    **{"balance_demi_hosts": "3", "balance_capacities": "1.0 1.0 2.0 0.5"},
}
"""Values of flags that only some policies read."""


@pytest.mark.parametrize("policy", ["", "--balance-policy none"])
@pytest.mark.parametrize("name", NO_EFFECT_WITHOUT_POLICY)
def test_balance_flags_without_a_policy(name: str, policy: str) -> None:
    flag = flag_of(name)
    with pytest.raises(ValueError, match=f"^{flag}: has no effect with --balance-policy none; leave it out"):
        parse(f"{EP4} {policy} {flag} {(VALUES | OPTION_VALUES)[name]}")


@pytest.mark.parametrize("name", VALUES)
def test_balance_flags_with_a_policy(name: str) -> None:
    needed = "--balance-load exact" if name in ("balance_guest_ring", "balance_certify") else ""
    settings = parse(f"{EP4} --balance-policy pro_prophet {needed} {flag_of(name)} {VALUES[name]}").config.balance
    assert str(getattr(settings, name)) == (VALUES[name] or "True")


@pytest.mark.parametrize(
    ("policy", "name"), [(name, field) for name, policy in registered().items() for field in policy.options.values()]
)
def test_flags_of_one_policy(policy: str, name: str) -> None:
    flags = f"{flag_of(name)} {OPTION_VALUES[name]}"
    settings = parse(f"{EP4} --balance-policy {policy} {flags}").config.balance
    value = getattr(settings, name)
    assert " ".join(map(str, value if isinstance(value, list) else [value])) == OPTION_VALUES[name]
    with pytest.raises(ValueError, match=f"^{flag_of(name)}: has no effect with --balance-policy top2; leave it out"):
        parse(f"{TOP2} {flags}")


@pytest.mark.parametrize("flag", ["--balance-explain", "--balance-profile builtin"])
def test_balance_flags_that_chunks_read(flag: str) -> None:
    parsed = parse(f"{EP4} --moe-comm-chunks 2 {flag}")
    assert parsed.config.comm.moe_comm_chunks == "2"
    assert any("--moe-comm-chunks 2: --moe-token-dispatcher-type alltoall" in notice for notice in parsed.notices)


@pytest.mark.parametrize("policy", ["none", "demi", "top2"])
def test_mini_tasks_order_chunks_with_any_policy(policy: str) -> None:
    flags = f"{EP4} --moe-comm-chunks auto --moe-comm-order demi --balance-policy {policy}"
    assert parse(flags).config.comm.moe_comm_order == "demi"


@pytest.mark.parametrize("policy", [*registered(), "megatron_balance.planning.policies.fastermoe:Top3"])
def test_policies(policy: str) -> None:
    slots = "--balance-guest-slots 3" if "op3" in policy else ""
    assert parse(f"{EP4} --balance-policy {policy} {slots}").config.balance.balance_policy == policy


TWO_EXPERTS = "--expert-model-parallel-size 2 --num-experts 2 --balance-policy top2"


@pytest.mark.parametrize(
    ("flags", "slots"),
    [
        ("--expert-model-parallel-size 2 --num-experts 4 --balance-policy top3", 2),
        (f"{EP4} --balance-policy fastermoe --balance-guest-slots 1", 1),
        (f"{EP4} --balance-policy fastermoe --balance-guest-slots 6", 6),
        (TWO_EXPERTS, 2),
    ],
)
def test_guest_slots(flags: str, slots: int) -> None:
    assert parse(flags).config.balance.balance_guest_slots == slots


def test_workloads() -> None:
    assert ("none", *NAMES) == WORKLOADS


SHARED = "--moe-shared-expert-overlap --moe-shared-expert-intermediate-size 32 --disable-bias-linear"


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        (SHARED, "--moe-comm-chunks auto"),
        ("--use-fused-weighted-squared-relu --squared-relu", "compute the activation themselves"),
    ],
)
def test_what_only_makes_megatrons_layer_faster_is_noticed(flag: str, instead: str) -> None:
    parsed = parse(f"{flag} --moe-token-dispatcher-type alltoall")
    name = flag.split()[0]
    said = [notice for notice in parsed.notices if notice.startswith(f"{name} has no effect")]
    assert len(said) == 1 and instead in said[0]
    assert not parsed.config.transformer.moe_shared_expert_overlap


def test_grouped_gemm_is_noticed_with_our_layer_only() -> None:
    assert any("--moe-grouped-gemm" in notice for notice in parse("--moe-grouped-gemm").notices)
    assert not any("--moe-grouped-gemm" in notice for notice in parse("").notices)
