"""flow/swiglu.py compared with what autograd computes, operation by operation."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.flow.grouped_gemm import RowSplit, TorchGemm
from megatron_balance.flow.slot_linear import SlotLinear, is_swiglu, swiglu_linear
from megatron_balance.flow.slot_weights import GroupedWeights, LinearGradients

INNER = 6
OUTPUTS = 5


def config(**fields: Any) -> TransformerConfig:
    return cast(TransformerConfig, SimpleNamespace(**fields))


def projection(slots: int, dtype: torch.dtype, bias: bool) -> GroupedWeights:
    shape = config(
        params_dtype=dtype,
        add_bias_linear=bias,
        tensor_model_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
    )
    linear = GroupedWeights(slots, INNER, OUTPUTS, shape)
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    return linear


def plain(inner: torch.Tensor, probs_R: torch.Tensor, linear: SlotLinear, split: RowSplit) -> torch.Tensor:
    gate, other = inner.chunk(2, dim=-1)
    units = F.silu(gate) * other
    return linear((units * probs_R.unsqueeze(-1)).to(units.dtype), split, probs_R)


@pytest.mark.parametrize("sizes", [[5, 0, 9], [0, 1], [4], [0, 0]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
    ids=["float64", "float32", "bfloat16, weights in float32"],
)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("at_once", [False, True], ids=["later", "at once"])
def test_the_same_bits(sizes: list[int], dtype: torch.dtype, weights: torch.dtype, bias: bool, at_once: bool) -> None:
    torch.manual_seed(0)
    linear = projection(len(sizes), dtype, bias)
    rows = sum(sizes)
    inner = torch.randn(rows, 2 * INNER, dtype=dtype, requires_grad=True)
    probs = torch.rand(rows, dtype=weights, requires_grad=True)
    gradient = torch.randn(rows, OUTPUTS, dtype=dtype)
    split = RowSplit(sizes, inner.device)
    found = []
    for function in (swiglu_linear, plain):
        gradients = LinearGradients(linear, len(sizes), TorchGemm())
        output = function(inner, probs, SlotLinear(linear(), gradients, at_once=at_once), split)
        of_inputs = torch.autograd.grad(output, [inner, probs], gradient)
        found.append([output.detach(), *of_inputs, *gradients.finish()])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_only_the_input_is_kept() -> None:
    linear = projection(2, torch.float32, bias=False)
    inner = torch.randn(7, 2 * INNER, requires_grad=True)
    probs = torch.rand(7, requires_grad=True)
    layer = SlotLinear(linear(), LinearGradients(linear, 2, TorchGemm()))
    split = RowSplit([3, 4], inner.device)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        swiglu_linear(inner, probs, layer, split)
    assert {tensor.data_ptr() for tensor in kept} == {tensor.data_ptr() for tensor in (inner, probs, linear.weight)}


def test_what_is_another_function() -> None:
    swiglu = {
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "activation_func_clamp_value": None,
        "glu_linear_offset": 0.0,
        "bias_activation_fusion": False,
    }
    others = {
        "gated_linear_unit": False,
        "activation_func": F.gelu,
        "activation_func_clamp_value": 1.0,
        "glu_linear_offset": 1.0,
        "bias_activation_fusion": True,
    }
    assert is_swiglu(config(**swiglu))
    for name, value in others.items():
        assert not is_swiglu(config(**swiglu | {name: value})), name
