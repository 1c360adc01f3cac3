"""Search for the source of a NaN or an infinity: the rank, the layer and the expert.

There are four steps, the most reliable first: weights, a repeated forward pass, losses, gradients. The search ends with
the first step that finds a source on any rank. It may be slow, and every rank takes part in every step.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.utils import unwrap_model
from torch.utils._pytree import tree_leaves

from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.layer import BalancedMoELayer

LossReports = list[dict[str, torch.Tensor]]
"""Losses of each microbatch, as returned by the loss function."""

BucketSums = list[tuple[Any, torch.Tensor]]
"""DDP's gradient buckets, each with the sum of its elements before the reduction."""


MAX_LINES = 8

SLOT_IN_NAME = re.compile(r"\.local_experts\.(\d+)|\.linear_fc\d\.(?:weight|bias)(\d+)$")
"""Number of a rank's expert in megatron-core's names: of SequentialMLP's modules and TEGroupedMLP's parameters."""


@dataclass(frozen=True, order=True)
class Finding:
    """A place where a value is not finite."""

    order: tuple[int, ...]
    """Place in the computation: the smallest one among all ranks' findings is the source, others are consequences."""

    text: str


@dataclass(frozen=True)
class Chunk:
    """A model chunk of this rank."""

    place: tuple[int, int]
    """Virtual pipeline stage and pipeline rank, which sort chunks in the order of the forward pass."""

    model: GPTModel

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return chain(self.model.named_parameters(), self.model.named_buffers())

    def global_name(self, name: str) -> str:
        """Return the name of a module or parameter of this chunk, with the number of its layer in the whole model."""
        layers: Any = self.model.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        return re.sub(r"^(decoder\.layers\.)(\d+)", lambda found: f"{found[1]}{int(found[2]) + offset}", name)

    def moe_layer(self, name: str) -> BaseMoELayer | None:
        """Return the MoE layer whose routed experts include the module or parameter `name`, or None."""
        before, dot, _ = name.partition(".experts")
        layer: Any = self.model.get_submodule(before) if dot else None
        return layer


def explain(
    model: Sequence[torch.nn.Module],
    groups: ProcessGroupCollection,
    *,
    reports: LossReports,
    gradients: BucketSums,
    repeat: Callable[[], LossReports],
) -> str:
    """Describe the source of a bad iteration in at most ten lines, the same on every rank; every rank calls this.

    Args:
        reports: this rank's losses; empty except on the last pipeline stage.
        gradients: every bucket of this rank that was reduced in the iteration.
        repeat: repeats the iteration's forward pass with the same microbatches and random numbers.
    """
    unwrapped: Any = unwrap_model([*model])
    chunks = [Chunk((stage, groups.pp.rank()), chunk) for stage, chunk in enumerate(unwrapped)]
    again: LossReports = []

    def forward_again() -> list[Finding]:
        with first_bad_output(chunks) as found:
            again.extend(repeat())
        return found

    searches = (
        lambda: bad_weights(chunks),
        forward_again,
        lambda: bad_losses(reports, again),
        lambda: bad_gradients(chunks, gradients),
    )
    for search in searches:
        findings: list[list[Finding]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(findings, search())
        if any(findings):
            return describe(findings)
    return "no source found: weights, losses and gradients are finite now"


def describe(findings: Sequence[Sequence[Finding]]) -> str:
    """Describe the earliest of all ranks' findings, one per line; `findings[r]` are rank r's."""
    source = min(finding.order for own in findings for finding in own)
    ranks: dict[str, list[str]] = {}
    for rank, own in enumerate(findings):
        for finding in own:
            if finding.order == source:
                ranks.setdefault(finding.text, []).append(str(rank))
    lines = [f"  rank{'s' * (len(on) > 1)} {', '.join(on)}: {text}" for text, on in ranks.items()]
    hidden = len(lines) - MAX_LINES
    return "\n".join(lines[:MAX_LINES] + ([f"  and {hidden} more"] if hidden > 0 else []))


def bad_weights(chunks: Sequence[Chunk]) -> list[Finding]:
    """Find every parameter and buffer that contains a NaN or an infinity."""
    return [
        Finding((), f"{_label(chunk, name, tensor)} holds {kind(tensor)}")
        for chunk in chunks
        for name, tensor in chunk.named_tensors()
        if not is_finite(tensor)
    ]


def bad_losses(reports: LossReports, again: LossReports) -> list[Finding]:
    """Find the microbatches whose loss was bad although every module's output was finite in the repeated pass."""
    found = []
    for microbatch, report in enumerate(reports):
        if not is_finite(report):
            cause = "it was finite when repeated: a fault of this device or its links?"
            if not is_finite(again[microbatch]):
                cause = "the model's output is finite: a fault of the loss mask?"
            found.append(Finding((), f"the loss of microbatch {microbatch} is {kind(report)}; {cause}"))
    return found


def bad_gradients(chunks: Sequence[Chunk], gradients: BucketSums) -> list[Finding]:
    """Find, in the buckets that were bad before the reduction, the parameter that the backward pass reached first."""
    buckets = [bucket for bucket, total in gradients if not is_finite(total)]
    if not buckets:
        return []
    suspects = set().union(*(bucket.params for bucket in buckets))
    # Bad gradients spread backwards: the earliest is the last in the order of the forward pass
    found = [Finding((1,), "a gradient bucket was bad before its reduction, and no parameter's gradient is now")]
    for chunk in chunks:
        for position, (name, parameter) in enumerate(chunk.model.named_parameters()):
            if parameter in suspects and not is_finite(gradient := _main_grad(parameter)):
                order = (-chunk.place[0], -chunk.place[1], -position)
                label = _label(chunk, name, gradient)
                found.append(Finding(order, f"the gradient of {label} is {kind(gradient)}"))
    return [min(found)]


def _main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    return parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue]  # set by DDP


@contextlib.contextmanager
def first_bad_output(chunks: Sequence[Chunk]) -> Iterator[list[Finding]]:
    """Hook into every module; the yielded list receives the first one that turns finite inputs into a bad output."""
    found: list[Finding] = []
    hooks = []
    for chunk in chunks:
        listener = _Listener(chunk, found)
        hooks.append(chunk.model.register_forward_pre_hook(listener.begin))
        for name, module in chunk.model.named_modules():
            listen = listener.to(name)
            hooks.append(module.register_forward_hook(listen, with_kwargs=True))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class _Listener:
    """Hooks for the modules of a chunk, which count finished modules so that ranks can compare their order."""

    def __init__(self, chunk: Chunk, found: list[Finding]) -> None:
        self.chunk = chunk
        self.found = found
        self.microbatch = -1
        self.finished = 0

    def begin(self, *_: Any) -> None:
        self.microbatch = self.microbatch + 1
        self.finished = 0

    def to(self, name: str) -> Callable[..., None]:
        def listen(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            self.finished += 1
            args, output = _defined(module, args, output)
            if not self.found and not is_finite(output) and is_finite((args, kwargs)):
                order = (self.microbatch, *self.chunk.place, self.finished)
                label = _label_of_output(self.chunk, name, args, output) or "the loss function"
                text = f"{label} turns finite inputs into {kind(output)} (microbatch {self.microbatch})"
                self.found.append(Finding(order, text))

        return listen


def _defined(module: torch.nn.Module, args: tuple, output: Any) -> tuple[tuple, Any]:
    """Return the positional inputs and the output of a module without rows that hold anything: those of no expert."""
    if not isinstance(module, GroupedExperts):
        return args, output
    rows_RH, tokens_per_slot, probs_R, *others = args
    used = int(tokens_per_slot.sum())
    return (rows_RH[:used], tokens_per_slot, probs_R[:used], *others), output[:used]


def _label(chunk: Chunk, name: str, tensor: torch.Tensor) -> str:
    """Return the global name of a parameter and the experts for which `tensor`, its value or gradient, is bad."""
    layer = chunk.moe_layer(name)
    if layer is None:
        return chunk.global_name(name)
    experts = layer.local_expert_indices
    slots = _slot_in(name)
    if isinstance(layer.experts, GroupedExperts):
        experts = layer.experts.home_experts
        slots = [slot for slot, part in enumerate(tensor) if not is_finite(part)]
    return chunk.global_name(name) + _of_experts([experts[slot] for slot in slots])


def _label_of_output(chunk: Chunk, name: str, args: tuple, output: Any) -> str:
    """Return the global name of a module and the experts for which its output is bad."""
    layer = chunk.moe_layer(name)
    if layer is None:
        return chunk.global_name(name)
    experts = layer.local_expert_indices
    if isinstance(layer, BalancedMoELayer):
        rank = layer.ep_group.rank()
        experts = layer.placement.home[rank] + layer.placement.guests[rank]
    rows = tree_leaves(output)[0]
    sizes = args[1] if len(args) > 1 else None
    slots = _slot_in(name)
    # Modules that compute all experts together receive the number of consecutive rows of each expert
    if not slots and sizes is not None and len(sizes) == len(experts):
        sizes = [int(size) for size in sizes]
        if sum(sizes) == rows.shape[0]:
            slots = [slot for slot, part in enumerate(rows.split(sizes)) if not is_finite(part)]
    return chunk.global_name(name) + _of_experts([experts[slot] for slot in slots])


def _slot_in(name: str) -> list[int]:
    found = SLOT_IN_NAME.search(name)
    return [int(found[1] or found[2])] if found else []


def _of_experts(experts: Sequence[int]) -> str:
    return f", expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts))}" if experts else ""


def is_finite(values: Any) -> bool:
    """Return whether no floating-point tensor in `values`, at any depth, contains a NaN or an infinity."""
    return all(torch.isfinite(torch.stack(tensor.detach().aminmax())).all() for tensor in _floats(values))


def kind(values: Any) -> str:
    """Return `NaN` if `values` contain one, otherwise `Inf`."""
    return "NaN" if any(tensor.isnan().any() for tensor in _floats(values)) else "Inf"


def _floats(values: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(values):
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            continue
        # Recomputation frees the storage of tensors that it will recompute
        if leaf.numel() and leaf.untyped_storage().size():
            yield leaf
