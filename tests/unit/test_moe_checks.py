"""Command lines for MoE and balancing: refusals that name flag, value and remedy."""

import pytest

from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import NO_EFFECT_WITHOUT_POLICY
from megatron_balance.config.flags import flag_of
from megatron_balance.planning.policies import registered
from megatron_balance.workloads.synthetic import NAMES
from tests.unit.commands import CPU, argv, parse

EP4 = "--expert-model-parallel-size 4"
TOP2 = f"{EP4} --balance-policy top2"
TRANSFER = f"{TOP2} --balance-ownership transfer"
CHUNKS = f"{EP4} --moe-comm-chunks 2"
SHARDED = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 2 --disable-bias-linear"
FORCED = "--moe-router-force-workload hot_rank"
REMEDY = "or give package.module:Class"

BAD = [
    # flags; parts of the message: flag, value, remedy
    ("--expert-model-parallel-size 8 --num-experts 12", "--num-experts 12", "--expert-model-parallel-size 8"),
    ("--num-experts 0", "--num-experts 0", "multiple of"),
    ("--moe-router-topk 9", "--moe-router-topk 9", "1 to --num-experts 8"),
    ("--moe-router-topk 0", "--moe-router-topk 0", "1 to --num-experts 8"),
    (
        "--tensor-model-parallel-size 2 --moe-layer-impl megatron",
        *("--tensor-model-parallel-size 2", "also give --sequence-parallel"),
    ),
    (
        "--tensor-model-parallel-size 2 --sequence-parallel --moe-layer-impl megatron --expert-tensor-parallel-size 1",
        *("--expert-tensor-parallel-size 1", "use --moe-layer-impl balanced", "--expert-tensor-parallel-size 2"),
    ),
    ("--moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor"),
    ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type flex", "needs CUDA", "use alltoall"),
    (
        "--moe-shared-expert-intermediate-size 32",
        *("--moe-shared-expert-intermediate-size 32", "also give --disable-bias-linear"),
    ),
    ("--moe-flex-rows bound", "--moe-flex-rows bound", "needs --moe-token-dispatcher-type flex", "use counted"),
    (
        "--tensor-model-parallel-size 2 --sequence-parallel",
        *("--expert-tensor-parallel-size 2", "--disable-bias-linear", "use --expert-tensor-parallel-size 1"),
    ),
    (
        f"{SHARDED} --moe-ffn-hidden-size 63",
        *("--expert-tensor-parallel-size 2", "must divide", "--moe-ffn-hidden-size 63"),
    ),
    (
        f"{SHARDED} --expert-model-parallel-size 8",
        *("--expert-model-parallel-size 8", "processes (8)", "lower one", "--expert-tensor-parallel-size 1"),
    ),
    (f"{SHARDED} --num-attention-heads 3", "--num-attention-heads 3", "--tensor-model-parallel-size 2"),
    (
        f"{SHARDED} --sequence-parallel --moe-parallel-schedule s2",
        *("--sequence-parallel: not with", "use --moe-parallel-schedule s1", "leave out --sequence-parallel"),
    ),
    (
        "--tensor-model-parallel-size 4 --expert-tensor-parallel-size 2 --disable-bias-linear "
        "--moe-parallel-schedule s2",
        *("--moe-parallel-schedule s2", "--tensor-model-parallel-size 4 must divide", "use --moe-parallel-schedule s1"),
    ),
    (
        f"{SHARDED} --seq-length 31 --moe-parallel-schedule auto",
        *("--seq-length 31", "multiple of --tensor-model-parallel-size 2"),
    ),
    (
        f"{SHARDED} --moe-parallel-schedule s1 --no-moe-parallel-saa",
        *("--no-moe-parallel-saa", "no effect with --moe-parallel-schedule s1", "leave it out"),
    ),
    (
        f"{SHARDED} --moe-parallel-schedule s1 --moe-layer-impl megatron",
        "--moe-parallel-schedule s1: needs --moe-layer-impl balanced",
    ),
    (
        f"{SHARDED} --sequence-parallel --moe-layer-impl megatron --moe-token-dispatcher-type alltoall",
        *("--expert-tensor-parallel-size 2", "gloo needs the same number", "use --moe-layer-impl balanced"),
    ),
    (
        f"{SHARDED} --balance-policy top2 --balance-ownership transfer --expert-model-parallel-size 4",
        *("--expert-tensor-parallel-size 2", "--balance-ownership transfer", "use 1"),
    ),
    (
        "--moe-layer-impl megatron --tensor-model-parallel-size 2 --sequence-parallel",
        *("megatron-core refuses", "Bias", "ETP==1"),
    ),
    ("--moe-router-fusion", "--moe-router-fusion", "needs Transformer Engine", "leave it out"),
    (
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-group-score-topk 3",
        *("--moe-router-group-score-topk 3", "choose 1 to 2", "each of 4 groups"),
    ),
    ("--use-te-activation-func", "--use-te-activation-func", "--moe-layer-impl balanced", "leave it out"),
    (f"{TOP2} --num-experts 12 --moe-router-topk 13", "--moe-router-topk 13", "1 to --num-experts 12"),
    (
        f"{EP4} --balance-policy topmost",
        *("--balance-policy topmost", "choose from", "none, pro_prophet, quota, top2", REMEDY),
    ),
    (
        f"{EP4} --balance-policy quota --balance-token-split local_first",
        *("--balance-token-split local_first", "not with --balance-policy quota", "leave it out"),
    ),
    ("--balance-policy top2", "--balance-policy top2", "--expert-model-parallel-size above 1", "--balance-policy none"),
    (
        f"{TOP2} --moe-layer-impl megatron --disable-bias-linear",
        *("--balance-policy top2", "needs --moe-layer-impl balanced"),
    ),
    (
        f"{TOP2} --moe-expert-capacity-factor 2 --moe-pad-expert-input-to-capacity",
        *("--moe-pad-expert-input-to-capacity", "--balance-policy top2", "leave it out"),
    ),
    (f"{TOP2} --balance-guest-slots 0", "--balance-guest-slots 0", "needs 1 to 6", "--balance-policy none"),
    (f"{TOP2} --balance-guest-slots -1", "--balance-guest-slots -1", "needs 1 to 6", "--balance-policy none"),
    (f"{TOP2} --balance-guest-slots 7", "--balance-guest-slots 7", "needs 1 to 6", "--balance-policy none"),
    (f"{TOP2} --balance-guest-slots 1", "--balance-guest-slots 1", "--balance-policy top2", "--balance-guest-slots 2"),
    (f"{EP4} --balance-policy top3", "--balance-guest-slots 2", "--balance-policy top3", "--balance-guest-slots 3"),
    (f"{TOP2} --balance-alpha 0.4", "--balance-alpha", "no effect", "--balance-policy top2", "leave it out"),
    (f"{EP4} --balance-policy pro_prophet --balance-alpha -0.5", "--balance-alpha -0.5", "at least 0"),
    (
        f"{EP4} --balance-policy demi --balance-capacities 1 2 3",
        *("--balance-capacities 1.0 2.0 3.0", "one number per expert-parallel rank", "4 in all"),
    ),
    (
        f"{TRANSFER} --balance-load exact",
        *("--balance-load exact", "--balance-ownership transfer", "use --balance-load predicted"),
    ),
    (
        f"{TRANSFER} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
        *("--tensor-model-parallel-size 2", "--balance-ownership transfer", "--disable-bias-linear"),
    ),
    (f"{EP4} --moe-comm-chunks 0", "--moe-comm-chunks 0", "give 1 to 1024, or auto"),
    (f"{EP4} --moe-comm-chunks 5000", "--moe-comm-chunks 5000", "give 1 to 1024, or auto"),
    (f"{EP4} --moe-comm-chunks some", "--moe-comm-chunks some", "give 1 to 1024, or auto"),
    (f"{EP4} --moe-comm-order interleaved", "--moe-comm-order", "no effect with --moe-comm-chunks 1", "leave it out"),
    (f"{EP4} --moe-comm-refit-interval 9", "--moe-comm-refit-interval", "no effect with --moe-comm-chunks 1"),
    (f"{CHUNKS} --moe-comm-refit-interval 0", "--moe-comm-refit-interval 0", "at least 1"),
    (f"{CHUNKS} --moe-comm-order best", "--moe-comm-order best", "choose from sequential, interleaved, optsche, demi"),
    (f"{CHUNKS} --moe-comm-order demi", "--moe-comm-chunks 2", "--moe-comm-order demi", "use auto"),
    (
        f"{CHUNKS} --moe-token-dispatcher-type allgather",
        *("--moe-token-dispatcher-type allgather", "not with --moe-comm-chunks 2", "use alltoall"),
    ),
    (
        f"{CHUNKS} --moe-layer-impl megatron --disable-bias-linear",
        "--moe-comm-chunks 2: needs --moe-layer-impl balanced",
    ),
    (f"{TOP2} --balance-interval 0", "--balance-interval 0", "at least 1"),
    (
        f"{FORCED} --moe-router-force-load-balancing",
        *("--moe-router-force-load-balancing", "not with", FORCED, "leave out one of them"),
    ),
    (
        f"{FORCED} --moe-router-load-balancing-type sinkhorn",
        *("--moe-router-load-balancing-type sinkhorn", "not with", FORCED, "use aux_loss or none"),
    ),
]


@pytest.mark.parametrize(("flags", "said"), [(case[0], case[1:]) for case in BAD], ids=[case[0] for case in BAD])
def test_mistakes(flags: str, said: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        parse(flags)
    missing = [part for part in said if part not in str(error.value)]
    assert not missing, str(error.value)


@pytest.mark.parametrize("flags", ["--expert-model-parallel-size 2", "--balance-policy top2"])
def test_what_needs_experts(flags: str) -> None:
    with pytest.raises(ValueError, match=f"^{flags}: needs --num-experts"):
        parse_args(argv(flags, without="--num-experts"), CPU)


VALUES = {
    "balance_guest_slots": "2",
    "balance_interval": "1",
    "balance_load": "exact",
    "balance_predictor": "ema",
    "balance_token_split": "proportional",
    "balance_profile": "auto",
    "balance_calibrate": "calibration.jsonl",
    "balance_explain": "",
    "balance_log_dir": "loads",
    "balance_overlap": "blockwise",
    "balance_timeline": "traces",
    "balance_ownership": "transfer",
}
OPTION_VALUES = {
    "balance_alpha": "0.5",
    "balance_threshold": "1.5",
    "balance_metric": "variance",
    "balance_vexperts_per_rank": "5",
    "balance_demi_slots": "4",
    "balance_demi_weights": "linear",
    "balance_demi_hosts": "3",
    "balance_capacities": "1.0 1.0 2.0 0.5",
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
    settings = parse(f"{EP4} --balance-policy pro_prophet {flag_of(name)} {VALUES[name]}").config.balance
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


def test_weights_travel_ahead_of_a_load_that_is_predicted_only() -> None:
    with pytest.raises(ValueError, match=r"^--balance-load exact: not with --balance-overlap blockwise, .* predicted$"):
        parse(f"{EP4} --balance-policy top2 --balance-overlap blockwise --balance-load exact")


def test_calibrated_plans_are_recorded() -> None:
    with pytest.raises(ValueError, match=r"^--balance-calibrate on: .*; also give --balance-log-dir$"):
        parse(f"{TOP2} --balance-calibrate on")
    parse(f"{TOP2} --balance-calibrate on --balance-log-dir d")


@pytest.mark.parametrize("flag", ["--balance-explain", "--balance-profile builtin"])
def test_balance_flags_that_chunks_read(flag: str) -> None:
    parsed = parse(f"{CHUNKS} {flag}")
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


def test_hot_experts_need_no_more_slots_than_a_rank_has_strangers() -> None:
    flags = "--expert-model-parallel-size 2 --num-experts 4 --balance-policy top3"
    assert parse(flags).config.balance.balance_guest_slots == 2


@pytest.mark.parametrize("slots", [1, 6])
def test_as_many_guests_as_there_are_strangers(slots: int) -> None:
    flags = f"{EP4} --balance-policy fastermoe --balance-guest-slots {slots}"
    assert parse(flags).config.balance.balance_guest_slots == slots


def test_two_experts_and_the_default_of_two_guest_slots() -> None:
    flags = "--expert-model-parallel-size 2 --num-experts 2 --balance-policy top2"
    assert parse(flags).config.balance.balance_guest_slots == 2
    with pytest.raises(ValueError, match=r"^--balance-guest-slots 2: .* needs 1 to 1, "):
        parse(f"{flags} --balance-guest-slots 2")


@pytest.mark.parametrize("workload", NAMES)
def test_workloads(workload: str) -> None:
    settings = parse(f"--moe-router-force-workload {workload}").config.balance
    assert settings.moe_router_force_workload == workload


def test_unknown_workload(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse("--moe-router-force-workload tepid")
    assert error.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "tepid" in line]
    assert "--moe-router-force-workload" in line and all(workload in line for workload in NAMES)


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        (
            "--moe-shared-expert-overlap --moe-shared-expert-intermediate-size 32 --disable-bias-linear",
            "--moe-comm-chunks auto",
        ),
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
