"""flow/experts.py: grouped products compared with one slot after another."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.grouped_gemm import grouped_linear
from megatron_balance.flow.slot_weights import GroupedWeights

TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Maximum error as a fraction of the largest value."""

SIZES = {
    "even": [4, 4, 4],
    "uneven": [1, 7, 3],
    "first empty": [0, 5, 2],
    "middle empty": [5, 0, 0, 2],
    "last empty": [5, 2, 0],
    "one slot": [6],
    "one row": [0, 1, 0],
    "no rows": [0, 0, 0],
}
WIDTHS = {"aligned": (16, 32), "odd": (7, 5), "odd in": (7, 16), "odd out": (16, 5), "single": (1, 1)}

sizes_cases = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
width_cases = pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS.keys())
dtype_cases = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)

DEVICE = torch.cuda.current_device()


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def loop_linear(rows_RI: torch.Tensor, weight_SOI: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Multiply each slot's rows by its weight in float64, one slot after another."""
    chunks = rows_RI.double().split(sizes)
    return torch.cat([chunk @ weight.T for chunk, weight in zip(chunks, weight_SOI.double(), strict=True)])


def assert_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    assert found.isfinite().all()
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=TOLERANCE[dtype] * scale)


def assert_same_function(found: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    """Check that outputs are equal, and the inputs' gradients for a random gradient of the output."""
    assert_close(found, expected, found.dtype)
    gradient = torch.randn(found.shape, dtype=torch.float64, device=DEVICE).to(found.dtype)
    ours = torch.autograd.grad(found, inputs, gradient)
    theirs = torch.autograd.grad(expected, inputs, gradient.double())
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, found.dtype)


@sizes_cases
@width_cases
@dtype_cases
def test_grouped_linear(dtype: torch.dtype, widths: tuple[int, int], sizes: list[int]) -> None:
    torch.manual_seed(0)
    inputs, outputs = widths
    rows, weight = random(sum(sizes), inputs, dtype=dtype), random(len(sizes), outputs, inputs, dtype=dtype)
    found = grouped_linear(rows, weight, torch.tensor(sizes))
    assert found.dtype == dtype
    assert_same_function(found, loop_linear(rows, weight, sizes), [rows, weight])


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.sampled_from([4, 8, 9]),
    st.sampled_from([4, 8, 9]),
    st.sampled_from(list(TOLERANCE)),
)
def test_grouped_linear_on_random_shapes(sizes: list[int], inputs: int, outputs: int, dtype: torch.dtype) -> None:
    rows, weight = random(sum(sizes), inputs, dtype=dtype), random(len(sizes), outputs, inputs, dtype=dtype)
    assert_same_function(
        grouped_linear(rows, weight, torch.tensor(sizes)), loop_linear(rows, weight, sizes), [rows, weight]
    )


@dtype_cases
def test_empty_slots_have_zero_gradients(dtype: torch.dtype) -> None:
    sizes = [0, 3, 0]
    rows, weight = random(3, 16, dtype=dtype), random(3, 16, 16, dtype=dtype)
    output = grouped_linear(rows, weight, torch.tensor(sizes))
    (gradient,) = torch.autograd.grad(output, [weight], torch.ones_like(output))
    assert torch.equal(gradient[[0, 2]], torch.zeros_like(gradient[[0, 2]]))
    assert gradient[1].abs().max() > 0


def new_linear(
    slots: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    bias: bool = True,
    layout: tuple[int, int, int] = (1, 1, 1),
):
    """Return GroupedWeights with random parameters, in a layout of (tensor, expert, expert tensor) parallelism."""
    tensor, expert, shards = layout
    config = SimpleNamespace(
        params_dtype=dtype,
        add_bias_linear=bias,
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=shards,
    )
    linear = GroupedWeights(slots, inputs, outputs, config)
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    return linear


def loop_layer(linear: GroupedWeights, rows: torch.Tensor, sizes: list[int], scale: torch.Tensor | None):
    """Compute the layer in float64, one slot after another."""
    output = loop_linear(rows, linear.weight, sizes)
    bias = torch.cat([one.expand(size, -1) for one, size in zip(linear.bias.double(), sizes, strict=True)])
    return output + (bias if scale is None else bias * scale.double().unsqueeze(1))


@sizes_cases
@width_cases
@dtype_cases
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_bias(dtype: torch.dtype, widths: tuple[int, int], sizes: list[int], scaled: bool) -> None:
    torch.manual_seed(0)
    linear, rows = new_linear(len(sizes), *widths, dtype), random(sum(sizes), widths[0], dtype=dtype)
    scale = random(sum(sizes), dtype=dtype) if scaled else None
    found = linear()[0](rows, torch.tensor(sizes), scale)
    assert found.dtype == dtype
    inputs = [rows, *linear.parameters()] + ([scale] if scaled else [])
    assert_same_function(found, loop_layer(linear, rows, sizes, scale), inputs)


def test_scale_in_higher_precision_keeps_the_rows_precision() -> None:
    """Combine weights are float32 while the experts compute in bfloat16."""
    linear, rows, scale = new_linear(2, 16, 16, torch.bfloat16), *(random(5, 16, dtype=torch.bfloat16), torch.rand(5))
    scale = scale.to(DEVICE).requires_grad_()
    found = linear()[0](rows, torch.tensor([2, 3]), scale)
    assert found.dtype == torch.bfloat16
    assert_close(found, loop_layer(linear, rows, [2, 3], scale), torch.bfloat16)
    gradients = torch.autograd.grad(found, [linear.bias, scale], torch.ones_like(found))
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_only_the_bias_needs_a_gradient(scaled: bool) -> None:
    linear, rows = new_linear(2, 16, 16, torch.float32), random(5, 16, dtype=torch.float32).detach()
    scale = torch.rand(5, device=DEVICE) if scaled else None
    linear.weight.requires_grad_(False)
    output = linear()[0](rows, torch.tensor([2, 3]), scale)
    output.backward(torch.ones_like(output))
    per_row = torch.ones(5, device=DEVICE) if scale is None else scale
    expected = torch.stack([per_row[:2].sum(), per_row[2:].sum()])
    torch.testing.assert_close(linear.bias.grad, expected.unsqueeze(1).expand(2, 16))


def test_without_bias() -> None:
    linear, rows = new_linear(2, 16, 8, torch.float32, bias=False), random(5, 16, dtype=torch.float32)
    assert [name for name, _ in linear.named_parameters()] == ["weight"]
    expected = torch.cat([F.linear(rows[:2], linear.weight[0]), F.linear(rows[2:], linear.weight[1])])
    assert_close(linear()[0](rows, torch.tensor([2, 3])), expected, torch.float32)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [((1, 1, 1), True), ((2, 1, 2), True), ((1, 2, 1), False), ((2, 1, 1), False), ((1, 1, 2), False)],
)
def test_experts_that_other_ranks_share_are_marked(layout: tuple[int, int, int], expected: bool) -> None:
    linear = new_linear(2, 4, 4, torch.float32, layout=layout)
    assert [parameter.allreduce for parameter in linear.parameters()] == [expected, expected]


def test_expanded_gradients_and_strided_rows_are_accepted() -> None:
    weight = torch.randn(2, 8, 4, requires_grad=True)
    rows = torch.randn(4, 6).T.requires_grad_()
    grouped_linear(rows, weight, torch.tensor([2, 4])).sum().backward()
    expected = torch.stack([chunk.sum(0).expand(8, 4) for chunk in rows.detach().split([2, 4])])
    torch.testing.assert_close(weight.grad, expected)


class Alone:
    """A process group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def gate(inner: torch.Tensor, activation, clamp: float | None, offset: float) -> torch.Tensor:
    """Compute a gated unit, one element after another: [R, 2F] -> [R, F]."""
    width = inner.shape[1] // 2
    gated, linear = inner[:, :width], inner[:, width:]
    if clamp is not None:
        gated = torch.where(gated > clamp, clamp, gated)
        linear = torch.where(linear > clamp, clamp, torch.where(linear < -clamp, -clamp, linear))
    return activation(gated) * (linear + offset)


@pytest.mark.parametrize("by_slot", [True, False], ids=["by slot", "grouped"])
@pytest.mark.parametrize(
    ("activation", "clamp", "offset"),
    [(F.silu, None, 0.0), (F.silu, 0.7, 0.0), (quick_gelu, None, 1.0), (quick_gelu, 0.5, 1.0)],
    ids=["plain", "clamped", "offset", "both"],
)
def test_gated_units(activation, clamp: float | None, offset: float, by_slot: bool) -> None:
    torch.manual_seed(0)
    sizes, hidden, inner = [5, 0, 9], 6, 4
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=len(sizes),
        moe_ffn_hidden_size=inner,
        add_bias_linear=True,
        gated_linear_unit=True,
        activation_func=activation,
        activation_func_clamp_value=clamp,
        glu_linear_offset=offset,
        bias_activation_fusion=False,
        params_dtype=torch.float64,
        perform_initialization=False,
    )
    experts = GroupedExperts(range(len(sizes)), config, SimpleNamespace(expt_tp=Alone(), expt_dp=Alone()))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    rows, probs = random(sum(sizes), hidden, dtype=torch.float64), random(sum(sizes), dtype=torch.float64)
    found = experts._all_slots(rows, torch.tensor(sizes), probs, by_slot)
    first = loop_layer(experts.linear_fc1, rows, sizes, None)
    weighted = gate(first, activation, clamp, offset) * probs.unsqueeze(1)
    expected = loop_layer(experts.linear_fc2, weighted, sizes, probs)
    assert clamp is None or ((first.abs() > clamp).any() and (first.abs() < clamp).any())
    assert_same_function(found, expected, [rows, probs, *experts.parameters()])
