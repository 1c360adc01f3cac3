"""The time of the non-MoE part of a block, derived from the time of experts."""

from types import SimpleNamespace

import pytest

from megatron_balance.profile.cluster_profile import Throughput, builtin
from megatron_balance.profile.flops import attention_flops, mlp_flops, non_expert_seconds

CONFIG = {
    **{"hidden_size": 64, "kv_channels": 16, "num_attention_heads": 4, "num_query_groups": 4},
    **{"ffn_hidden_size": 256, "moe_ffn_hidden_size": 128, "moe_shared_expert_intermediate_size": None},
    **{"gated_linear_unit": False, "tensor_model_parallel_size": 1},
}
PROFILE = builtin(4, 4, 64, 128)


def config(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**(CONFIG | changes))


def test_attention_is_four_square_products_and_half_of_the_scores() -> None:
    assert attention_flops(config(), 1) == 4 * 2 * 64 * 64 + 2 * 64
    assert attention_flops(config(), 1001) - attention_flops(config(), 1) == 1000 * 2 * 64
    # One group of keys and values for four heads: two of the four products shrink to a quarter
    assert attention_flops(config(num_query_groups=1), 0) == 2.5 * 2 * 64 * 64


def test_gated_mlps_have_a_third_matrix() -> None:
    assert mlp_flops(config(gated_linear_unit=True), 128) == 1.5 * mlp_flops(config(), 128) == 6 * 64 * 128


def seconds(dense_layers: int = 0, tokens: int = 100, **changes: object) -> tuple[float, float]:
    profile = PROFILE.__class__(
        **{**vars(PROFILE), "forward": Throughput(1e-6, 0, 0, 0), "backward": Throughput(3e-6, 0, 0, 0)}
    )
    return non_expert_seconds(profile, config(**changes), tokens, 0, dense_layers)


def test_seconds_are_those_of_as_many_operations_of_experts() -> None:
    # Attention takes 8 * 64 * 64 operations per token; an expert takes the same number per row, 4 * 64 * 128
    assert seconds() == pytest.approx((100e-6, 300e-6))
    assert seconds(tokens=200, tensor_model_parallel_size=2) == pytest.approx((100e-6, 300e-6))
    # A shared expert as wide as the others, and dense layers with twice the width and their own attention
    assert seconds(moe_shared_expert_intermediate_size=128)[0] == pytest.approx(200e-6)
    assert seconds(dense_layers=2)[0] == pytest.approx((3 + 2 * 2) * 100e-6)
