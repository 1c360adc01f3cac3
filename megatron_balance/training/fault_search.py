"""Search for the source of a NaN or an infinity: the rank, the layer and the expert.

There are four steps, the most reliable first: weights, a repeated forward pass, losses, gradients. The search ends with
the first step that finds a source on any rank. It may be slow, and every rank takes part in every step.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.utils import unwrap_model
from torch.utils._pytree import tree_leaves

from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.job.agreement import in_words
from megatron_balance.job.groups import gather

LossReports = list[dict[str, torch.Tensor]]
"""Losses of each microbatch, as the loss function returns them."""

BucketSums = list[tuple[Any, torch.Tensor]]
"""DDP's gradient buckets, each with the sum of its elements before the reduction."""

MAX_LINES = 8

SLOT_IN_NAME = re.compile(r"\.local_experts\.(\d+)|\.linear_fc\d\.(?:weight|bias)(\d+)$")
"""Index of a rank's expert in megatron-core's names: SequentialMLP's modules and TEGroupedMLP's parameters."""


class Finding(NamedTuple):
    """A place with a value that is not finite."""

    order: tuple[int, ...]
    """Place in the computation. The smallest one of all ranks' findings is the source; the others are consequences."""
    text: str


class SearchedChunk(NamedTuple):
    """A model chunk of this rank."""

    place: tuple[int, int]
    """Virtual pipeline stage and pipeline rank: sorts chunks in the order of the forward pass."""
    model: GPTModel

    def global_name(self, name: str, experts: Sequence[int] = ()) -> str:
        """Return a module's or parameter's name with the layer's number in the whole model, and with its experts."""
        layers: Any = self.model.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        name = re.sub(r"^(decoder\.layers\.)(\d+)", lambda found: f"{found[1]}{int(found[2]) + offset}", name)
        return name + (f", expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts))}" if experts else "")

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
    """Describe the source of a bad iteration in at most ten lines, equal on every rank; every rank calls this.

    Args:
        reports: this rank's losses; empty except on the last pipeline stage.
        gradients: all of this rank's buckets that were reduced in the iteration.
        repeat: repeats the iteration's forward pass with the same microbatches and random numbers.
    """
    unwrapped: Any = unwrap_model([*model])
    chunks = [SearchedChunk((stage, groups.pp.rank()), chunk) for stage, chunk in enumerate(unwrapped)]

    def searches() -> Iterator[list[Finding]]:
        yield bad_weights(chunks)
        with first_bad_output(chunks) as found:
            again = repeat()
        yield found
        yield bad_losses(reports, again)
        yield bad_gradients(chunks, gradients)

    for own in searches():
        findings = gather(own)
        if any(findings):
            return describe(findings)
    return "no source found: weights, losses and gradients are finite now"


def describe(findings: Sequence[Sequence[Finding]]) -> str:
    """Describe the earliest of all ranks' findings, one per line; `findings[r]` are rank r's."""
    source = min(finding.order for own in findings for finding in own)
    ranks: dict[str, list[int]] = {}
    for rank, own in enumerate(findings):
        for finding in own:
            if finding.order == source:
                ranks.setdefault(finding.text, []).append(rank)
    lines = [f"  {in_words(on)}: {text}" for text, on in ranks.items()]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES:] = [f"  and {len(lines) - MAX_LINES} more"]
    return "\n".join(lines)


def bad_weights(chunks: Sequence[SearchedChunk]) -> list[Finding]:
    """Find every parameter and buffer that contains a NaN or an infinity."""
    return [
        Finding((), f"{_label(chunk, name, tensor)} holds {kind(tensor)}")
        for chunk in chunks
        for name, tensor in chain(chunk.model.named_parameters(), chunk.model.named_buffers())
        if not is_finite(tensor)
    ]


def bad_losses(reports: LossReports, again: LossReports) -> list[Finding]:
    """Find microbatches with a bad loss although all modules' outputs were finite in the repeated pass."""
    once = "it was finite when repeated: a fault of this device or its links?"
    twice = "the model's output is finite: a fault of the loss mask?"
    return [
        Finding((), f"the loss of microbatch {number} is {kind(first)}; {once if is_finite(second) else twice}")
        for number, (first, second) in enumerate(zip(reports, again, strict=True))
        if not is_finite(first)
    ]


def bad_gradients(chunks: Sequence[SearchedChunk], gradients: BucketSums) -> list[Finding]:
    """Find the parameter that the backward pass reached first among the buckets that were bad before the reduction."""
    buckets = [bucket for bucket, total in gradients if not is_finite(total)]
    if not buckets:
        return []
    suspects = set().union(*(bucket.params for bucket in buckets))
    # Bad gradients spread backwards: the earliest one comes last in the order of the forward pass
    found = [Finding((1,), "a gradient bucket was bad before its reduction, and no parameter's gradient is now")]
    for chunk in chunks:
        for position, (name, parameter) in enumerate(chunk.model.named_parameters()):
            if parameter not in suspects:
                continue
            gradient: torch.Tensor = parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue]  # set by DDP
            if not is_finite(gradient):
                order = (-chunk.place[0], -chunk.place[1], -position)
                label = _label(chunk, name, gradient)
                found.append(Finding(order, f"the gradient of {label} is {kind(gradient)}"))
    return [min(found)]


@contextlib.contextmanager
def first_bad_output(chunks: Sequence[SearchedChunk]) -> Iterator[list[Finding]]:
    """Hook into every module; the yielded list receives the first module that turns finite inputs into a bad output."""
    found: list[Finding] = []
    with contextlib.ExitStack() as hooks:
        for chunk in chunks:
            listener = _Listener(chunk, found)
            hooks.enter_context(chunk.model.register_forward_pre_hook(listener.begin))
            for name, module in chunk.model.named_modules():
                hooks.enter_context(module.register_forward_hook(partial(listener.listen, name), with_kwargs=True))
        yield found


class _Listener:
    """Hooks for a chunk's modules. They count finished modules, so that ranks can compare their order."""

    def __init__(self, chunk: SearchedChunk, found: list[Finding]) -> None:
        self.chunk = chunk
        self.found = found
        self.microbatch = -1
        self.finished = 0

    def begin(self, *_: Any) -> None:
        self.microbatch += 1
        self.finished = 0

    def listen(self, name: str, module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        self.finished += 1
        if isinstance(module, GroupedExperts):
            # Rows after those of the experts are undefined
            rows_RH, tokens_per_slot, probs_R, *others = args
            used = int(tokens_per_slot.sum())
            args = (rows_RH[:used], tokens_per_slot, probs_R[:used], *others)
            output = output[:used]
        if not self.found and not is_finite(output) and is_finite((args, kwargs)):
            order = (self.microbatch, *self.chunk.place, self.finished)
            label = _label_of_output(self.chunk, name, args, output) or "the loss function"
            text = f"{label} turns finite inputs into {kind(output)} (microbatch {self.microbatch})"
            self.found.append(Finding(order, text))


def _label(chunk: SearchedChunk, name: str, tensor: torch.Tensor) -> str:
    """Return a parameter's global name with the experts whose part of `tensor`, its value or gradient, is bad."""
    layer = chunk.moe_layer(name)
    if layer is None:
        return chunk.global_name(name)
    if isinstance(layer.experts, GroupedExperts):
        return chunk.global_name(name, [layer.experts.home_experts[slot] for slot in _bad_parts(tensor)])
    return chunk.global_name(name, [layer.local_expert_indices[slot] for slot in _slot_in(name)])


def _label_of_output(chunk: SearchedChunk, name: str, args: tuple, output: Any) -> str:
    layer = chunk.moe_layer(name)
    if layer is None:
        return chunk.global_name(name)
    experts = layer.local_expert_indices
    if isinstance(layer, BalancedMoELayer):
        rank = layer.ep_group.rank()
        experts = layer.placement.home[rank] + layer.placement.guests[rank]
    rows = tree_leaves(output)[0]
    slots = _slot_in(name)
    # A module that computes all experts together receives the number of consecutive rows of each expert
    if not slots and len(args) > 1 and len(args[1]) == len(experts):
        sizes = [int(size) for size in args[1]]
        if sum(sizes) == rows.shape[0]:
            slots = _bad_parts(rows.split(sizes))
    return chunk.global_name(name, [experts[slot] for slot in slots])


def _slot_in(name: str) -> list[int]:
    found = SLOT_IN_NAME.search(name)
    return [int(found[1] or found[2])] if found else []


def _bad_parts(parts: Iterable[torch.Tensor]) -> list[int]:
    return [index for index, part in enumerate(parts) if not is_finite(part)]


def is_finite(values: Any) -> bool:
    """Return whether no floating-point tensor in `values`, at any depth, contains a NaN or an infinity."""
    return all(torch.isfinite(torch.stack(tensor.detach().aminmax())).all() for tensor in _floats(values))


def kind(values: Any) -> str:
    """Return `NaN` if `values` contain one, otherwise `Inf`."""
    return "NaN" if any(tensor.isnan().any() for tensor in _floats(values)) else "Inf"


def _floats(values: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(values):
        # The storage of a tensor is free while recomputation has not restored it
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            continue
        if leaf.numel() and leaf.untyped_storage().size():
            yield leaf
