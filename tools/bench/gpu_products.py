"""Rates of matrix products: the experts' as our code computes them, a large one, and attention; for gpu_rates.py.

In shapes, S counts slots.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import device_timer
from megatron_balance.flow.grouped_gemm import DeviceSplit, RowSplit, TorchGemm, WeightTerm, weight_gradients


class Shape(NamedTuple):
    """Experts with gated units, on one rank."""

    name: str
    experts: int
    hidden: int
    ffn: int


SHAPES = (
    Shape("Mixtral 8x7B", 8, 4096, 14336),
    Shape("Qwen3-235B", 16, 4096, 1536),
    Shape("Qwen3-30B", 16, 2048, 768),
    Shape("DeepSeek-V3", 8, 7168, 2048),
)
TINY_SHAPES = (Shape("tiny", 3, 32, 16),)

ROWS = (64, 256, 1024, 4096, 16384)
"""Mean numbers of rows of an expert."""

UNEVEN_ROWS = 1024
"""Mean number of rows where experts differ."""

HEADS = 32
CHANNELS = 128


class _Data(NamedTuple):
    rows_RI: torch.Tensor
    gradient_RO: torch.Tensor
    weight_SOI: torch.Tensor
    total_SOI: torch.Tensor
    """Sums of weight gradients in float32."""


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    """Return normal numbers; zeros would make products faster."""
    return torch.randn(shape, device=device, dtype=dtype).mul_(scale)


def uneven(experts: int, mean: int) -> list[int]:
    """Return numbers of rows by Zipf's law, with this mean; the sum is that of even rows."""
    weights = [1 / (1 + expert) for expert in range(experts)]
    total = experts * mean
    sizes = [int(total * weight / sum(weights)) for weight in weights]
    return [sizes[0] + total - sum(sizes), *sizes[1:]]


def products(results: device_timer.Results, shape: Shape, rows: Sequence[int], uneven_rows: int) -> None:
    """Measure the products of both projections, for even rows and for rows by Zipf's law.

    Args:
        rows: mean numbers of rows of an expert.
        uneven_rows: mean number of rows for rows by Zipf's law.
    """
    for inputs, outputs in ((shape.hidden, 2 * shape.ffn), (shape.ffn, shape.hidden)):
        loads = [("even", mean, [mean] * shape.experts) for mean in rows]
        for load, mean, sizes in [*loads, ("zipf", uneven_rows, uneven(shape.experts, uneven_rows))]:
            key = {"load": load, "experts": shape.experts, "inputs": inputs, "outputs": outputs, "rows": mean}
            name = f"products of {shape.name}: {', '.join(map(str, key.values()))}"
            results.section(name, functools.partial(_products, results, key, sizes))


def _products(results: device_timer.Results, key: dict, sizes: list[int]) -> None:
    device = results.timer.device
    gemm = TorchGemm()
    experts = len(sizes)
    number = sum(sizes)
    inputs = key["inputs"]
    outputs = key["outputs"]
    split = RowSplit(sizes, device)
    counted = DeviceSplit(split.ends)

    def make() -> _Data:
        weight_SOI = random(experts, outputs, inputs, device=device, scale=0.02)
        rows_RI, gradient_RO = (random(number, width, device=device) for width in (inputs, outputs))
        return _Data(rows_RI, gradient_RO, weight_SOI, torch.zeros_like(weight_SOI, dtype=torch.float32))

    # The smallest of the three products of a pass
    data = device_timer.in_turns(make, 2 * (experts * inputs * outputs + number * (inputs + outputs)), results.timer)

    def slots(one: _Data) -> list[torch.Tensor]:
        # A first part without slots makes `TorchGemm` compute each slot by itself, as it does for guests
        return [one.weight_SOI[:0], one.weight_SOI]

    def terms(one: _Data) -> list[WeightTerm]:
        parts = (one.total_SOI, one.gradient_RO.split(sizes), one.rows_RI.split(sizes))
        return [term for term in map(WeightTerm, *parts) if len(term.rows_RI)]

    ways = {
        ("forward", "grouped"): lambda one: gemm.outputs(one.rows_RI, [one.weight_SOI], split),
        ("forward", "by slot"): lambda one: gemm.outputs(one.rows_RI, slots(one), split),
        ("input gradient", "grouped"): lambda one: gemm.input_gradients(one.gradient_RO, [one.weight_SOI], split),
        ("input gradient", "by slot"): lambda one: gemm.input_gradients(one.gradient_RO, slots(one), split),
        ("weight gradient", "grouped"): lambda one: weight_gradients(one.gradient_RO, one.rows_RI, counted),
        ("weight gradient", "by slot"): lambda one: gemm.add_weight_gradients(terms(one)),
    }
    for (which, way), compute in ways.items():
        results.rate(
            "products",
            {"pass": which, "way": way, **key},
            lambda turn, compute=compute: compute(data[turn % len(data)]),
            flops=2 * number * inputs * outputs,
        )


def square(results: device_timer.Results, size: int) -> None:
    """Measure a large product of square matrices, whose rate is about the highest that can be reached.

    `sustained` repeats it for half a second, in which a card may lower its clocks to stay within its power.
    """
    device = results.timer.device
    # More calls would fill the stream's queue, and the host would wait
    sustained = device_timer.Timer(device, target=0.5, most=300)
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float32, "float32")):
        one, other = (random(size, size, device=device, dtype=dtype) for _ in range(2))
        result = torch.empty_like(one)

        def multiply(_: int, one: torch.Tensor = one, other: torch.Tensor = other, out: torch.Tensor = result) -> None:
            torch.mm(one, other, out=out)

        key = {"dtype": name, "size": size}
        results.rate("square product", key, multiply, flops=2 * size**3)
        if dtype == torch.bfloat16:
            results.rate("square product, sustained", key, multiply, flops=2 * size**3, timer=sustained)


def attention(results: device_timer.Results, sequence: int, batches: Sequence[int]) -> None:
    """Measure causal attention, whose operations are half of those without a mask; the backward pass has 5/2."""
    backends = {"flash": SDPBackend.FLASH_ATTENTION}
    if results.timer.cuda:
        backends["cudnn"] = SDPBackend.CUDNN_ATTENTION
    for (name, backend), batch in itertools.product(backends.items(), batches):
        work = functools.partial(_attention, results, name, backend, (batch, HEADS, sequence, CHANNELS))
        results.section(f"attention by {name}, batch {batch}", work)


def _attention(results: device_timer.Results, name: str, backend: SDPBackend, shape: tuple[int, ...]) -> None:
    batch, heads, sequence, channels = shape
    device = results.timer.device
    # As megatron-core's layers have them: [s, b, heads, channels], seen as [b, heads, s, channels]
    inputs = [
        random(sequence, batch, heads, channels, device=device).permute(1, 2, 0, 3).requires_grad_() for _ in range(3)
    ]
    key = {"backend": name, "batch": batch, "heads": heads, "channels": channels, "sequence": sequence}
    flops = 2 * batch * heads * sequence**2 * channels
    with sdpa_kernel(backend):

        def forward(_: int) -> torch.Tensor:
            return F.scaled_dot_product_attention(*inputs, is_causal=True)

        output = forward(0)
        gradient = torch.randn_like(output)
        results.rate("attention", {"pass": "forward", **key}, forward, flops=flops)
        results.rate(
            "attention",
            {"pass": "backward", **key},
            lambda _: torch.autograd.grad(output, inputs, gradient, retain_graph=True),
            flops=5 * flops / 2,
        )
