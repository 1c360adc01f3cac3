"""Where a NaN or an infinity came from: the rank, the layer and the expert.

Four searches, the surest first: weights, the forward pass once more, losses, gradients. The first one that finds
something on any rank ends the search. It may be slow, and every rank takes part in all of it.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.utils import unwrap_model
from torch.utils._pytree import tree_leaves

from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.layer import BalancedMoELayer

LossReports = list[dict[str, torch.Tensor]]
"""The losses of each microbatch, as the loss function returned them."""

BucketSums = list[tuple[Any, torch.Tensor]]
"""DDP's gradient buckets, each with the sum of its elements before the reduction."""

MAX_LINES = 8

SLOT_IN_NAME = re.compile(r"\.local_experts\.(\d+)|\.linear_fc\d\.(?:weight|bias)(\d+)$")
"""megatron-core's ways to number a rank's experts: SequentialMLP's modules, TEGroupedMLP's parameters."""


@dataclass(frozen=True, order=True)
class Finding:
    """One place where something is not finite."""

    order: tuple[int, ...]
    """Place in the computation: the smallest among all ranks' findings is the source, later ones are consequences."""

    text: str


@dataclass(frozen=True)
class Chunk:
    """One model chunk of this rank."""

    place: tuple[int, int]
    """Virtual pipeline stage and pipeline rank: chunks sorted by it are in the order of the forward pass."""

    model: torch.nn.Module

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return chain(self.model.named_parameters(), self.model.named_buffers())

    def global_name(self, name: str) -> str:
        """A module's or parameter's name in this chunk, with the number that its layer has in the whole model."""
        layers = self.model.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        return re.sub(r"^(decoder\.layers\.)(\d+)", lambda found: f"{found[1]}{int(found[2]) + offset}", name)

    def moe_layer(self, name: str) -> BaseMoELayer | None:
        """The MoE layer among whose routed experts `name` is."""
        before, dot, _ = name.partition(".experts")
        return self.model.get_submodule(before) if dot else None


def explain(
    model: list[torch.nn.Module],
    groups: ProcessGroupCollection,
    reports: LossReports,
    gradients: BucketSums,
    repeat: Callable[[], LossReports],
) -> str:
    """The source of a bad iteration in at most ten lines; the same on every rank, and every rank calls it.

    Args:
        reports: this rank's losses; empty off the last pipeline stage.
        gradients: every bucket of this rank that was reduced in the iteration.
        repeat: the iteration's forward pass again, with the same microbatches and random numbers.
    """
    chunks = [Chunk((stage, groups.pp.rank()), unwrap_model(chunk)) for stage, chunk in enumerate(model)]
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
    """The earliest of all ranks' findings, a line each; `findings[r]` are rank r's."""
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
    """Every parameter and buffer that holds a NaN or an infinity."""
    return [
        Finding((), f"{_label(chunk, name, tensor)} holds {kind(tensor)}")
        for chunk in chunks
        for name, tensor in chunk.named_tensors()
        if not is_finite(tensor)
    ]


def bad_losses(reports: LossReports, again: LossReports) -> list[Finding]:
    """The microbatches whose loss was bad, though every module's output is finite `again`."""
    found = []
    for microbatch, report in enumerate(reports):
        if not is_finite(report):
            cause = "it passed when repeated: a fault of this device or its links?"
            if not is_finite(again[microbatch]):
                cause = "the model's output is finite: a fault of the loss mask?"
            found.append(Finding((), f"the loss of microbatch {microbatch} is {kind(report)}; {cause}"))
    return found


def bad_gradients(chunks: Sequence[Chunk], gradients: BucketSums) -> list[Finding]:
    """Among the buckets that were bad on this rank alone, the parameter that the backward pass came to first."""
    buckets = [bucket for bucket, total in gradients if not is_finite(total)]
    if not buckets:
        return []
    suspects = set().union(*(bucket.params for bucket in buckets))
    # Bad gradients spread backwards: the earliest is the last in the order of the forward pass
    found = [Finding((1,), "a gradient bucket was bad before its reduction, and no parameter's gradient is now")]
    for chunk in chunks:
        for position, (name, parameter) in enumerate(chunk.model.named_parameters()):
            if parameter in suspects and not is_finite(parameter.main_grad):
                order = (-chunk.place[0], -chunk.place[1], -position)
                label = _label(chunk, name, parameter.main_grad)
                found.append(Finding(order, f"the gradient of {label} is {kind(parameter.main_grad)}"))
    return [min(found)]


@contextlib.contextmanager
def first_bad_output(chunks: Sequence[Chunk]) -> Iterator[list[Finding]]:
    """While open, listens to every module; the list gets the first that turns finite inputs into a bad output."""
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
    """Hears every module of a chunk finish, and counts along, so that ranks can compare when."""

    def __init__(self, chunk: Chunk, found: list[Finding]) -> None:
        self.chunk, self.found = chunk, found
        self.microbatch, self.finished = -1, 0

    def begin(self, *_: Any) -> None:
        self.microbatch, self.finished = self.microbatch + 1, 0

    def to(self, name: str) -> Callable[..., None]:
        def listen(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            self.finished += 1
            if not self.found and not is_finite(output) and is_finite((args, kwargs)):
                order = (self.microbatch, *self.chunk.place, self.finished)
                label = _label_of_output(self.chunk, name, args, output) or "the loss function"
                text = f"{label} turns finite inputs into {kind(output)} (microbatch {self.microbatch})"
                self.found.append(Finding(order, text))

        return listen


def _label(chunk: Chunk, name: str, tensor: torch.Tensor) -> str:
    """Global name of a parameter, or of its gradient `tensor`, and the experts in which it is bad."""
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
    """Global name of a module, and the experts for which its output is bad."""
    layer = chunk.moe_layer(name)
    if layer is None:
        return chunk.global_name(name)
    experts = layer.local_expert_indices
    if isinstance(layer, BalancedMoELayer):
        rank = layer.ep_group.rank()
        experts = layer.placement.home[rank] + layer.placement.guests[rank]
    rows, sizes = tree_leaves(output)[0], args[1] if len(args) > 1 else None
    slots = _slot_in(name)
    # The modules that compute all experts at once are told how many consecutive rows belong to each
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
    """Whether no floating-point tensor in `values`, nested as it may be, holds a NaN or an infinity."""
    return all(torch.isfinite(torch.stack(tensor.detach().aminmax())).all() for tensor in _floats(values))


def kind(values: Any) -> str:
    """`NaN` or `Inf`, whichever is in `values`; NaN if both are."""
    return "NaN" if any(tensor.isnan().any() for tensor in _floats(values)) else "Inf"


def _floats(values: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(values):
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            continue
        # Recomputation frees the storage of what it will compute again
        if leaf.numel() and leaf.untyped_storage().size():
            yield leaf
