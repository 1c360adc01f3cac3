"""Operations of a layer, and the time of its non-MoE part by kind of kernel."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_balance.profile.cluster_profile import Throughput, builtin
from megatron_balance.profile.computation import Computation, non_expert_passes
from megatron_balance.profile.flops import attended_keys, attention_flops, mlp_flops
from megatron_balance.profile.kernel_times import Kernels, Passes, cast, expert_passes, product, weights_passes

CONFIG = {
    **{"hidden_size": 64, "kv_channels": 16, "num_attention_heads": 4, "num_query_groups": 4},
    **{"ffn_hidden_size": 256, "moe_ffn_hidden_size": 128, "moe_shared_expert_intermediate_size": None},
    **{"gated_linear_unit": False, "tensor_model_parallel_size": 1, "num_moe_experts": 8, "moe_router_topk": 2},
    **{"moe_token_dispatcher_type": "alltoall", "recompute_granularity": None, "recompute_modules": None},
    **{"num_layers": 4, "window_size": None, "window_attn_skip_freq": None},
    **{"context_parallel_size": 1, "cp_comm_type": None},
}
PROFILE = builtin(4, 4, 64, 128)


def config(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**(CONFIG | changes))


def test_attention_is_four_square_products_and_half_of_the_scores() -> None:
    assert attention_flops(config(), 1) == 4 * 2 * 64 * 64 + 2 * 64
    assert attention_flops(config(), 1001) - attention_flops(config(), 1) == 1000 * 2 * 64
    # One group of keys and values for four heads: two of the four products shrink to a quarter
    assert attention_flops(config(num_query_groups=1), 0) == 2.5 * 2 * 64 * 64


@pytest.mark.parametrize(("skip", "windows"), [(None, 4), (2, 2), ([1, 0, 0, 0], 1)])
def test_a_window_has_the_keys_that_a_mask_of_it_has(skip: int | list[int] | None, windows: int) -> None:
    before = 9
    length = 200
    ages = np.arange(length)[:, None] - np.arange(length)
    whole, within = (((ages >= 0) & (ages <= most)).sum() / length for most in (length, before))
    expected = (windows * within + (4 - windows) * whole) / 4
    found = attended_keys(config(window_size=(before, 0), window_attn_skip_freq=skip), length)
    assert found == pytest.approx(expected, rel=0.02)
    assert attended_keys(config(window_size=(-1, 0)), length) == attended_keys(config(), length) == length / 2
    assert attended_keys(config(window_size=(10**6, 0)), length) == length / 2


def test_gated_mlps_have_a_third_matrix() -> None:
    assert mlp_flops(config(gated_linear_unit=True), 128) == 1.5 * mlp_flops(config(), 128) == 6 * 64 * 128


def seconds(dense_layers: int = 0, tokens: int = 100, **changes: object) -> tuple[float, float]:
    profile = PROFILE.__class__(
        **{**vars(PROFILE), "forward": Throughput(1e-6, 0, 0, 0), "backward": Throughput(3e-6, 0, 0, 0)}
    )
    return non_expert_passes(profile, config(**changes), tokens, 0, dense_layers)


def test_seconds_are_those_of_as_many_operations_of_experts() -> None:
    # Attention takes 8 * 64 * 64 operations per token; an expert takes the same number per row, 4 * 64 * 128
    assert seconds() == pytest.approx((100e-6, 300e-6))
    assert seconds(tokens=200, tensor_model_parallel_size=2) == pytest.approx((100e-6, 300e-6))
    # A shared expert as wide as the others, and dense layers with twice the width and their own attention
    assert seconds(moe_shared_expert_intermediate_size=128)[0] == pytest.approx(200e-6)
    assert seconds(dense_layers=2)[0] == pytest.approx((3 + 2 * 2) * 100e-6)


KERNELS = Kernels(
    product=Passes(1e-12, 2e-12),
    half_width=64.0,
    start=1e-6,
    attention=Passes(0.5e-12, 2.5e-12),
    memory=1e9,
    launch=1e-5,
)


def test_a_narrow_product_is_slower_and_both_its_gradients_count() -> None:
    # 2 * 3 * 64 * 256 operations at half of the rate, because 64 is the width of half the rate
    assert product(KERNELS, 3, 64, 256) == pytest.approx((2 * 2 * 3 * 64 * 256 / 1e12, 4 * 2 * 3 * 64 * 256 / 1e12))
    assert cast(KERNELS, 3, 64, 256) == (0.0, 0.0)
    # 8-bit numbers: each layout reads two bytes and writes one
    assert cast(KERNELS._replace(casts=1.0), 3, 64, 256) == pytest.approx((6 * 3 * 64 / 1e9, 6 * 3 * 256 / 1e9))


def test_an_expert_has_two_products_and_moves_its_rows() -> None:
    # Rows are sorted there and back (4 * 64 numbers); the activation reads and writes 2 * 128, and twice that backward
    moved = Passes(2 * (4 * 64 + 2 * 128) / 1e9, 2 * (4 * 64 + 4 * 128) / 1e9)
    assert expert_passes(KERNELS, 64, 128) == pytest.approx(product(KERNELS, 1, 64, 128).times(2).plus(moved))
    # Two products of three experts start, and twice as many backward, where 32-bit gradients are read and written
    starts = weights_passes(KERNELS, 3, 2 * 64 * 128, products=2)
    assert starts == pytest.approx((6e-6, 12e-6 + 8 * 3 * 2 * 64 * 128 / 1e9))


def computation(tokens: int = 100, **changes: object) -> Computation:
    return Computation(KERNELS, config(**changes), tokens, 1000)  # pyright: ignore[reportArgumentType]


def test_experts_that_take_no_time_leave_none_for_others() -> None:
    # As a line fitted to noise does
    profile = PROFILE.__class__(**{**vars(PROFILE), "forward": Throughput(0, 0, 0, 0)})
    assert non_expert_passes(profile, config(), 100, 0).forward == 0.0  # pyright: ignore[reportArgumentType]


def test_attention_s_core_has_its_own_rates_and_is_repeated_on_request() -> None:
    core, moved = computation().attention_parts()
    assert core == pytest.approx((100 * 1000 * 128 / 2e12, 2.5 * 100 * 1000 * 128 / 1e12))
    # Ten kernels forward, twenty backward, and two bytes a number
    assert moved == pytest.approx((1e-4 + 2 * 100 * (640 + 256) / 1e9, 2e-4 + 2 * 100 * (896 + 384) / 1e9))
    repeated = computation(recompute_granularity="selective", recompute_modules=["core_attn"]).attention()
    assert repeated.backward - computation().attention().backward == pytest.approx(core.forward)
    assert repeated.forward == computation().attention().forward


def test_attention_has_half_of_its_rate_at_some_number_of_keys_in_each_step_of_a_ring() -> None:
    # Half of 1000 tokens
    slower = KERNELS._replace(half_keys=500.0)

    def core(kernels: Kernels, **changes: object) -> Passes:
        found = Computation(kernels, config(**changes), 100, 1000)  # pyright: ignore[reportArgumentType]
        return found.attention_parts()[0]

    assert core(slower) == pytest.approx(core(KERNELS).times(2))
    assert core(slower, context_parallel_size=4, cp_comm_type="p2p") == pytest.approx(core(KERNELS).times(5))
    assert core(slower, context_parallel_size=4, cp_comm_type="a2a") == core(slower)


def test_tensor_parallel_ranks_share_a_layer() -> None:
    whole = computation().mlp(256)
    half = computation(tensor_model_parallel_size=2).mlp(256)
    assert half.forward < whole.forward and half.backward < whole.backward
    # A row for each expert is copied before an all-to-all, and by nobody before the flex dispatcher
    assert computation().routing().forward > computation(moe_token_dispatcher_type="flex").routing().forward
