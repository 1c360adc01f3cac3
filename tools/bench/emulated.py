"""An emulated device: a layer sleeps instead of computing, but its messages are real; two cores emulate eight devices.

    python tools/bench/testbed.py --nodes 2 --ranks-per-node 4 --link-mbit 400 -- \\
        tools/bench/emulated.py --expert-us-per-token 20 [--attention-ms 5] -- FLAGS OF pretrain_gpt_moe.py

Losses are meaningless. Norms, routers, embedding, output layer and optimizer are really computed, so give the model a
small vocabulary. A measured cluster profile (`--balance-profile auto`) would be that of this machine; give a file.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_balance.device import cpu, quiet

BACKWARD_RATIO = 2.0
"""Backward time over forward time: the backward pass of a matrix product is two matrix products."""


@dataclass(frozen=True)
class EmulatedDevice:
    """Times of a device for the operations that are emulated."""

    expert_seconds_per_token: float
    """Forward time of the experts, per received row."""

    attention_seconds: float | None = None
    """Forward time of one layer's self-attention, per microbatch; None: it is computed."""

    backward_ratio: float = BACKWARD_RATIO
    """Backward time over forward time."""

    sleep: Callable[[float], None] = time.sleep

    def __str__(self) -> str:
        attention = "computed" if self.attention_seconds is None else f"{self.attention_seconds * 1e3:g} ms"
        return (
            f"EMULATED COMPUTATION: experts {self.expert_seconds_per_token * 1e6:g} us per token, "
            f"attention {attention}; backward {self.backward_ratio:g} times as long; messages are real, "
            "losses mean nothing"
        )

    def pass_through(
        self, values: torch.Tensor, seconds: float, parameters: Iterable[torch.Tensor | None]
    ) -> torch.Tensor:
        """Return `values` after `seconds`; delay their gradient as well, and make the parameters' gradients zero."""
        return _Sleep.apply(values, self, seconds, *(one for one in parameters if one is not None))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, device: EmulatedDevice, seconds: float, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.device = device
        ctx.seconds = seconds
        ctx.parameters = parameters
        device.sleep(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:
        ctx.device.sleep(ctx.seconds * ctx.device.backward_ratio)
        # Views of a single zero: no memory is written
        zeros = (one.new_zeros(()).expand(one.shape) for one in ctx.parameters)
        return gradients[0], None, None, *zeros


def emulate(model: Iterable[torch.nn.Module], device: EmulatedDevice, log: Callable[[str], object] = print) -> None:
    """Make all MoE layers of a built model sleep instead of computing; `log` is called with a line about it.

    Experts return their rows times the combine weights; gradients keep their shapes, messages and order.

    Raises:
        ValueError: the model has no balanced MoE layer.
    """
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_balance.flow.experts import GroupedExperts

    modules = [module for chunk in model for module in chunk.modules()]
    experts = [module for module in modules if isinstance(module, GroupedExperts)]
    if not experts:
        raise ValueError("--moe-layer-impl megatron, or no MoE layer: only experts of `balanced` layers are emulated")
    for module in experts:
        module.compute = functools.partial(_emulated_experts, module, device)
    for layer in modules if device.attention_seconds is not None else ():
        if isinstance(layer, TransformerLayer):
            attention: Any = layer.self_attention
            attention.forward = functools.partial(_emulated_attention, attention, device)
    log(str(device))


def _emulated_experts(
    experts: Any,
    device: EmulatedDevice,
    rows_RH: torch.Tensor,
    tokens_per_slot: torch.Tensor,
    probs_R: torch.Tensor,
    gradients: Any,
) -> torch.Tensor:
    """Replacement of GroupedExperts.compute."""
    guests = len(tokens_per_slot) - len(experts.home_experts)
    # The modules must be called, see GroupedWeights.forward
    for linear in (experts.linear_fc1, experts.linear_fc2):
        linear(guests)
    # The shards' outputs are summed
    output_RH = (rows_RH * (probs_R / experts.shards).unsqueeze(-1)).to(rows_RH.dtype)
    return device.pass_through(output_RH, len(rows_RH) * device.expert_seconds_per_token, ())


def _emulated_attention(
    attention: Any, device: EmulatedDevice, hidden_states: torch.Tensor, *_: object, **__: object
) -> tuple[torch.Tensor, None]:
    """Replacement of megatron-core's SelfAttention.forward, with its messages; returns (output, bias)."""
    from megatron.core.tensor_parallel import mappings

    assert device.attention_seconds is not None
    group = attention.pg_collection.tp
    apart = attention.config.sequence_parallel
    if group.size() > 1:
        enter = (
            mappings.gather_from_sequence_parallel_region if apart else mappings.copy_to_tensor_model_parallel_region
        )
        hidden_states = enter(hidden_states, group=group)
    output = device.pass_through(hidden_states, device.attention_seconds / group.size(), attention.parameters())
    if group.size() > 1:
        # All ranks have the same output, so each contributes a fraction of it
        reduce = mappings.reduce_from_tensor_model_parallel_region
        scatter = mappings.reduce_scatter_to_sequence_parallel_region
        output = (scatter if apart else reduce)(output / group.size(), group=group)
    return output, None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expert-us-per-token", type=float, required=True, help="forward, per received token")
    parser.add_argument("--attention-ms", type=float, help="forward, per layer and microbatch; computed if not given")
    parser.add_argument("flags", nargs="*", help="flags of pretrain_gpt_moe.py")
    args = parser.parse_args(argv)
    quiet.silence_expected_warnings()
    cpu.install()
    from megatron_balance.app import launch

    attention = None if args.attention_ms is None else args.attention_ms / 1e3
    device = EmulatedDevice(args.expert_us_per_token / 1e6, attention)
    last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    build_run = launch.build_run

    def build_emulated(config: Any, **known: Any) -> Any:
        run = build_run(config, **known)
        emulate(run.model, device, functools.partial(print, flush=True) if last else lambda line: None)
        return run

    launch.build_run = build_emulated
    launch.pretrain(args.flags)


if __name__ == "__main__":
    sys.exit(main())
