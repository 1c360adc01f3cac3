"""integrate.py before processes join a job: its flags and its refusals."""

import argparse
import dataclasses

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.app.integrate import Balancing, add_balance_args, attach
from megatron_balance.config.run_config import BalanceConfig, CommConfig

MODEL = {
    **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_moe_experts": 8},
    **{"moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": 4, "add_bias_linear": False},
}


def balancing(flags: str, others: dict | None = None, model: dict | None = None) -> Balancing:
    """Build Balancing from our flags, the surrounding program's settings and fields of the model's configuration."""
    args = add_balance_args(argparse.ArgumentParser()).parse_args(flags.split())
    vars(args).update({"seq_length": 16, "micro_batch_size": 2} | (others or {}))
    config = TransformerConfig(**MODEL)
    # Changed afterwards, because megatron-core's own checks would come first
    vars(config).update(model or {})
    return Balancing(args, config)


def test_only_our_flags_are_added() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq-length")
    args = add_balance_args(parser).parse_args([])
    ours = {field.name for cls in (BalanceConfig, CommConfig) for field in dataclasses.fields(cls)}
    assert set(vars(args)) == ours | {"seq_length"}


def test_flags_of_the_same_name_are_refused() -> None:
    with pytest.raises(ValueError, match="--moe-layer-impl: the parser has this flag already"):
        add_balance_args(add_balance_args(argparse.ArgumentParser()))


def test_settings_reach_the_builders() -> None:
    config = balancing("--balance-policy top2 --moe-comm-chunks 2", {"save": "here", "log_interval": 7}).config
    assert (config.balance.balance_policy, config.comm.moe_comm_chunks) == ("top2", "2")
    assert (config.model.seq_length, config.train.micro_batch_size) == (16, 2)
    assert (config.checkpoint.save, config.log.log_interval) == ("here", 7)


@pytest.mark.parametrize(
    ("flags", "others", "model", "message"),
    [
        ("", {"seq_length": None}, {}, "--seq-length is required"),
        ("--balance-interval 0", {}, {}, "--balance-interval 0: give at least 1"),
        ("--moe-expert-gemm te", {}, {}, "--moe-expert-gemm te: needs Transformer Engine on CUDA .*; use default"),
        ("--balance-alpha 0.3", {}, {}, "--balance-alpha: has no effect with --balance-policy none"),
        ("--balance-policy top2", {}, {"expert_model_parallel_size": 1}, "needs --expert-model-parallel-size above 1"),
        ("--balance-policy top2 --balance-log-dir d", {}, {}, "--balance-log-dir: only pretrain_gpt_moe.py has it"),
        (
            *("--balance-policy demi --balance-ownership transfer", {}, {}),
            "--balance-ownership transfer: .*use --balance-ownership fixed",
        ),
        (
            *("--balance-policy top2 --balance-load exact --balance-interval 2", {}, {}),
            "--balance-interval: has no effect with --balance-load exact",
        ),
        (
            *("--moe-comm-chunks 2", {}, {"moe_token_dispatcher_type": "allgather"}),
            "--moe-token-dispatcher-type allgather: not with --moe-comm-chunks 2; use alltoall",
        ),
        ("--moe-layer-impl megatron --balance-policy top2", {}, {}, "needs --moe-layer-impl balanced"),
        (
            *("", {}, {"overlap_moe_expert_parallel_comm": True}),
            "--overlap-moe-expert-parallel-comm True: not with --moe-layer-impl balanced",
        ),
        ("", {"use_megatron_fsdp": True}, {}, "--use-megatron-fsdp True: .*use --use-distributed-optimizer"),
        ("", {"num_distributed_optimizer_instances": 2}, {}, "--num-distributed-optimizer-instances 2"),
        ("", {"spec": ["a", "b"]}, {}, r"--spec \['a', 'b'\]: not with"),
        ("--moe-comm-node-size 3", {}, {}, "--moe-comm-node-size 3: choose 1 to 1"),
    ],
)
def test_what_cannot_work_is_refused(flags: str, others: dict, model: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balancing(flags, others, model)


@pytest.mark.parametrize("harmless", [{"use_megatron_fsdp": False}, {"num_distributed_optimizer_instances": 1}])
def test_settings_that_do_nothing_are_accepted(harmless: dict) -> None:
    balancing("", harmless)


def test_megatrons_own_layer_may_have_everything() -> None:
    balancing("--moe-layer-impl megatron", {"use_megatron_fsdp": True})


def test_flags_that_were_never_added_are_missed() -> None:
    with pytest.raises(ValueError, match=r"call add_balance_args\(parser\) before parsing"):
        Balancing(argparse.Namespace(seq_length=16, micro_batch_size=2), TransformerConfig(**MODEL))


def test_a_model_without_ddp_is_refused() -> None:
    with pytest.raises(ValueError, match="wrap the model in"):
        attach([object()], balancing(""))  # pyright: ignore
