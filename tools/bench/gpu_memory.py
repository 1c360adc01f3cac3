"""Rates of memory-bound work: copies, a layer's rows, activations, optimizers, codecs; for gpu_rates.py.

Bytes are the fewest that must be read and written: each input once, each result once.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import device_timer
from gpu_products import random
from megatron_balance.comm.codecs import load_codec
from megatron_balance.flow import rows

WIDE = torch.float32
NARROW = torch.bfloat16


class Layer(NamedTuple):
    """The sizes that determine the number of rows of a layer."""

    hidden: int
    experts: int
    topk: int


LAYERS = (Layer(4096, 8, 2), Layer(2048, 128, 8), Layer(7168, 256, 8))
"""Mixtral 8x7B, Qwen3-30B, DeepSeek-V3."""


def copies(results: device_timer.Results, num_bytes: int) -> None:
    """Measure a large copy within the device's memory; bytes that are read and bytes that are written both count."""
    source = random(num_bytes // WIDE.itemsize, device=results.timer.device, dtype=WIDE)
    target = torch.empty_like(source)
    key = {"bytes": num_bytes}
    results.rate("device copy", key, lambda _: target.copy_(source), num_bytes=2 * num_bytes)


def routing(tokens: int, layer: Layer, device: torch.device) -> torch.Tensor:
    """Return a random routing [T, E] bool in which each token chooses `topk` experts."""
    chosen_TK = torch.rand(tokens, layer.experts, device=device).topk(layer.topk, 1).indices
    return torch.zeros(tokens, layer.experts, dtype=torch.bool, device=device).scatter_(1, chosen_TK, True)


def layer_rows(results: device_timer.Results, layer: Layer, tokens: int) -> None:
    """Measure the order of a layer's rows, their copies from tokens, and the sums of each token's rows."""
    timer = results.timer
    number = tokens * layer.topk
    routing_TE = routing(tokens, layer, timer.device)
    key = {"tokens": tokens, "hidden": layer.hidden, "experts": layer.experts, "topk": layer.topk}
    results.rate("row order", key, lambda _: rows.row_order(routing_TE, number))
    order = rows.row_order(routing_TE, number)
    _ = order.rest
    index = 4 * (number + tokens)
    width = layer.hidden * NARROW.itemsize
    num_bytes = (number + tokens) * width + index

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        return random(tokens, layer.hidden, device=timer.device), random(number, layer.hidden, device=timer.device)

    turns = device_timer.in_turns(make, num_bytes, timer)
    calls = {
        "gather_rows": lambda turn: rows.gather_rows(turns[turn % len(turns)][0], order),
        "combine": lambda turn: rows.combine(turns[turn % len(turns)][1], order),
    }
    for name, call in calls.items():
        results.rate("rows", {"operation": name, **key}, call, num_bytes=num_bytes)


def _rates(results: device_timer.Results, calls: dict[str, tuple[int, Any]], size: int, key: dict[str, int]) -> None:
    """Add a row for each call; its first entry is the number of bytes per element."""
    for name, (each, call) in calls.items():
        results.rate("memory-bound", {"operation": name, **key}, call, num_bytes=each * size)


def swiglu(results: device_timer.Results, tokens: int, ffn: int) -> None:
    """Measure SwiGLU with combine weights, [R, 2F] -> [R, F]."""
    device = results.timer.device
    inner = random(tokens, 2 * ffn, device=device).requires_grad_()
    probs_R = torch.rand(tokens, device=device)
    probs_R.requires_grad_()
    gradient_RF = random(tokens, ffn, device=device)

    def forward() -> torch.Tensor:
        gate_RF, linear_RF = inner.chunk(2, dim=-1)
        return (F.silu(gate_RF) * linear_RF * probs_R.unsqueeze(-1)).to(inner.dtype)

    output = forward()

    def backward(_: int) -> None:
        torch.autograd.grad(output, [inner, probs_R], gradient_RF, retain_graph=True)

    calls = {"SwiGLU forward": (6, lambda _: forward()), "SwiGLU backward": (10, backward)}
    _rates(results, calls, gradient_RF.numel(), {"rows": tokens, "width": ffn})


def adam(results: device_timer.Results, size: int) -> None:
    """Measure steps of torch's AdamW, which megatron-core falls back to: fused, and as it is by default.

    Bytes: float32 parameter, gradient and two means are read, all but the gradient written.
    """
    calls = {}
    for name, options in (("AdamW fused", {"fused": True}), ("AdamW by default", {})):
        parameters = [torch.nn.Parameter(random(size // 8, device=results.timer.device, dtype=WIDE)) for _ in range(8)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, **options)
        calls[name] = 28, lambda _, optimizer=optimizer: optimizer.step()
    _rates(results, calls, size // 8 * 8, {"rows": 8, "width": size // 8})


def codecs(results: device_timer.Results, tokens: int, hidden: int) -> None:
    """Measure the codecs that work on a device; their bytes are those of the rows and of the payload."""
    for name, dtype in (("fp8", NARROW), ("int8", NARROW), ("bf16", WIDE)):
        codec = load_codec(name)
        values = random(tokens, hidden, device=results.timer.device, dtype=dtype)
        payload = codec.encode(values)
        calls = {
            "encode": lambda _, codec=codec, values=values: codec.encode(values),
            "decode": lambda _, codec=codec, payload=payload, dtype=dtype: codec.decode(payload, hidden, dtype),
        }
        key = {"codec": name, "dtype": str(dtype).removeprefix("torch."), "rows": tokens, "width": hidden}
        for direction, call in calls.items():
            num_bytes = values.nbytes + payload.nbytes
            results.rate("codecs", {"direction": direction, **key}, call, num_bytes=num_bytes)
