"""Tries whether a layer whose numbers of rows only the device knows can be captured as a CUDA graph, and times it.

    python tools/bench/gpu_graph.py --output graph.json

The step: order of rows, copies of tokens, the experts' products, SwiGLU and combine weights, sums of rows; and its
backward pass to tokens and weights. As with `--moe-flex-rows bound`, there is room for more rows than arrive, the rest
holds NaN, and the products read the ends of the slots on the device. The graph is replayed with other routings, tokens
and gradients, and each result must have the bits of the same step without a graph. Exit status: 1 if one has not.
--cpu tries it at a tiny size without graphs.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

import device_timer
from megatron_balance.device import quiet

REPLAYS = 3
"""Routings that the graph is replayed with."""


class Sizes(NamedTuple):
    """A layer on one rank."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    topk: int
    bound: float
    """Room for rows, over the rows that arrive."""


REAL = Sizes(4096, 2048, 768, 16, 8, 1.5)
TINY = Sizes(8, 16, 8, 4, 2, 1.5)


class Inputs(NamedTuple):
    """What changes from replay to replay."""

    routing_TE: torch.Tensor
    tokens_TH: torch.Tensor
    probs_TE: torch.Tensor
    gradient_TH: torch.Tensor


def inputs(sizes: Sizes, device: torch.device, seed: int) -> Inputs:
    """Return random inputs; experts differ in popularity, and the last one has no rows."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    scores_TE = normal(sizes.tokens, sizes.experts) + normal(sizes.experts)
    scores_TE[:, -1] = -torch.inf
    chosen_TK = scores_TE.topk(sizes.topk, 1).indices
    routing_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter_(1, chosen_TK, True)
    tokens_TH, gradient_TH = (normal(sizes.tokens, sizes.hidden).bfloat16() for _ in range(2))
    return Inputs(routing_TE, tokens_TH, scores_TE.softmax(1), gradient_TH)


def step_of(sizes: Sizes, device: torch.device) -> Callable[[Inputs], list[torch.Tensor]]:
    """Return the step, with weights of its own: inputs -> output, gradients of tokens and of both weights."""
    from gpu_products import random
    from megatron_balance.flow import rows
    from megatron_balance.flow.grouped_gemm import DeviceSplit, TorchGemm, weight_gradients

    first_SOI = random(sizes.experts, 2 * sizes.ffn, sizes.hidden, device=device, scale=0.02)
    second_SOI = random(sizes.experts, sizes.hidden, sizes.ffn, device=device, scale=0.02)
    gemm = TorchGemm()
    number = sizes.tokens * sizes.topk
    more = int(number * (sizes.bound - 1))

    def with_room(rows_RH: torch.Tensor) -> torch.Tensor:
        return F.pad(rows_RH, (0, 0, 0, more), value=torch.nan)

    def step(given: Inputs) -> list[torch.Tensor]:
        order = rows.row_order(given.routing_TE, number)
        split = DeviceSplit(given.routing_TE.sum(0).cumsum(0, dtype=torch.int32))
        rows_RH = with_room(rows.gather_rows(given.tokens_TH, order))
        probs_R1 = F.pad(rows.gather_weights(given.probs_TE, order), (0, more), value=torch.nan).unsqueeze(1)
        inner = gemm.outputs(rows_RH, [first_SOI], split)
        gate_RF, linear_RF = inner.chunk(2, dim=-1)
        units_RF = (F.silu(gate_RF) * linear_RF * probs_R1).bfloat16()
        output_TH = rows.combine(gemm.outputs(units_RF, [second_SOI], split)[:number], order)
        gradient_RH = with_room(rows.gather_rows(given.gradient_TH, order))
        to_units_RF = gemm.input_gradients(gradient_RH, [second_SOI], split) * probs_R1
        to_gate_RF = torch.ops.aten.silu_backward(to_units_RF * linear_RF, gate_RF.float())
        to_inner = torch.cat([to_gate_RF, to_units_RF * F.silu(gate_RF)], 1).bfloat16()
        to_tokens_TH = rows.combine(gemm.input_gradients(to_inner, [first_SOI], split)[:number], order)
        weights = weight_gradients(to_inner, rows_RH, split), weight_gradients(gradient_RH, units_RF, split)
        return [output_TH, to_tokens_TH, *weights]

    return step


NAMES = ("output", "gradient of tokens", "gradient of first weights", "gradient of second weights")


def check(results: device_timer.Results, sizes: Sizes) -> None:
    """Compare replays with the step, and time both."""
    from gpu_latency import captured

    timer = results.timer
    step = step_of(sizes, timer.device)
    static = inputs(sizes, timer.device, 0)
    kept: list[torch.Tensor] = []

    def work() -> None:
        kept[:] = step(static)

    replay = captured(work) if timer.cuda else work
    for seed in range(REPLAYS):
        fresh = inputs(sizes, timer.device, seed + 1)
        for there, here in zip(static, fresh, strict=True):
            there.copy_(here)
        for tensor in kept:
            # What a replay leaves unwritten must not look right
            tensor.fill_(torch.nan)
        replay()
        for name, found, expected in zip(NAMES, kept, step(fresh), strict=True):
            difference = int((found != expected).sum())
            results.add("replays", "elements", {"seed": seed, "result": name, "number": "different"}, difference)
            finite = int(expected.isfinite().sum())
            results.add("replays", "elements", {"seed": seed, "result": name, "number": "finite"}, finite)
            if difference or finite < expected.numel():
                results.failures.append(f"seed {seed}, {name}: {difference} differ, {finite} are finite")
    for name, call in (("step", lambda _: step(static)), ("replay", lambda _: replay())):
        results.rate("device time", {"way": name}, call)
    for name, call in (("step", lambda: step(static)), ("replay", replay)):
        # From an idle device to an idle device, so that the host's launches count where they take longer
        results.rate("time from idle to idle", {"way": name}, lambda _, call=call: (call(), timer.synchronize()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the results, as JSON")
    parser.add_argument("--cpu", action="store_true", help="try all of it on the CPU, at a tiny size")
    args = parser.parse_args(arguments)
    quiet.silence_expected_warnings()
    timer = device_timer.Timer(device_timer.device_of(args.cpu))
    results = device_timer.Results(timer, args.output, 60)
    results.section("graph", lambda: check(results, REAL if timer.cuda else TINY))
    return results.finish({"replays": ("number",)})


if __name__ == "__main__":
    sys.exit(main())
