"""Decisions of a model's forward passes, kept for recomputation, which has only the tensors of the first pass."""

import threading
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

Decisions = defaultdict[object, list[Any]]
"""Decisions of one forward pass, by owner; the latest decision is the last one."""


class PassMemory:
    """The decisions of each forward pass of one model chunk.

    The autograd graph of the chunk's output holds the decisions of its pass. A pass is current during its forward
    computation, and again from when the gradient of its output is complete. Autograd then computes the chunk's whole
    backward pass before that of an earlier pass, even if one call computes both. A forward pass and a backward pass may
    take turns, in different threads.
    """

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._forward: Decisions | None = None
        """The pass whose forward computation is in progress; None also if it has no backward pass."""
        self._forward_thread: int | None = None
        self._repeated: Decisions | None = None
        """The pass whose backward pass is in progress, or was the latest."""
        chunk.register_forward_pre_hook(self._begin)
        chunk.register_forward_hook(self._end)

    def of(self, owner: object) -> list[Any]:
        """Return the decisions of `owner` in the current pass; recomputation repeats them from the last to the first.
        The first pass of a recomputed part has no gradients and appends to the list; the repetition pops from it. Where
        nothing is repeated, the list is empty and is not kept."""
        if threading.get_ident() != self._forward_thread:
            return [] if self._repeated is None else self._repeated[owner]
        computed_once = torch.is_grad_enabled()
        return [] if self._forward is None or computed_once else self._forward[owner]

    def _begin(self, chunk: torch.nn.Module, inputs: Any) -> None:
        self._forward_thread = threading.get_ident()
        self._forward = defaultdict(list) if torch.is_grad_enabled() else None

    def _end(self, chunk: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        decisions = self._forward
        self._forward = None
        self._forward_thread = None
        if decisions is None:
            return
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._repeat, decisions))

    def _repeat(self, decisions: Decisions, gradient: torch.Tensor) -> None:
        self._repeated = decisions
