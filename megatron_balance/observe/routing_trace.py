"""Every token's experts as JSON lines, in the format of Megatron-LM's router tracer (`--moe-routing-trace-path`).

    {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0, "num_tokens": 2, "topk": 2,
     "top_indices": [[1, 4], [0, 4]]}

Shape suffixes: T tokens of one router call, E logical experts, K choices per token.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_balance.observe.optional import AppendedFile

_STEP = re.compile(rb'\{"step": (\d+), ')


class _Call(NamedTuple):
    """One router call, still on the device."""

    step: int
    layer: int
    choices_TK: torch.Tensor
    complete: torch.Tensor
    """Whether each token has exactly K experts."""


class RoutingTrace:
    """Writes `router_trace_rank{rank}.jsonl`: a record per MoE layer and microbatch that trains.

    It listens to the routers, so it works with any MoE layer. Calls in which tokens were dropped leave no record, as
    upstream, because the format has no room for them.

    Args:
        rank: of this process in the whole job.
        step: the iteration in progress, from 0.
        first_step: where the run starts or resumes; earlier steps of a trace that is already there are kept.

    Raises:
        ValueError: the directory cannot be written to.
    """

    def __init__(
        self, model: Sequence[torch.nn.Module], directory: Path, rank: int, step: Callable[[], int], first_step: int = 0
    ) -> None:
        self.rank, self.step = rank, step
        self._calls: list[_Call] = []
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"router_trace_rank{rank}.jsonl"
            self._file = AppendedFile(path, f"--moe-routing-trace-path {directory}", _cut(path, first_step))
        except OSError as error:
            raise ValueError(f"--moe-routing-trace-path {directory}: {error}; choose a writable directory") from error
        for chunk in model:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._note)

    def flush(self, last: bool = False) -> None:
        """Write the calls since the last time; after every iteration, so that none is written twice or not at all."""
        for call in self._calls:
            if call.complete.item():
                record = {
                    "step": call.step,
                    "stage": "pre_dispatch",
                    "block": "decoder",
                    "layer": call.layer,
                    "rank": self.rank,
                    "num_tokens": call.choices_TK.shape[0],
                    "topk": call.choices_TK.shape[1],
                    "top_indices": call.choices_TK.tolist(),
                }
                self._file.add(json.dumps(record).encode() + b"\n")
        self._file.flush(last)
        self._calls = []

    def _note(self, router: TopKRouter, inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        # Under recomputation the first pass runs without gradients; the second is the one to record
        if not (router.training and torch.is_grad_enabled()):
            return
        assert router.layer_number is not None
        map_TE = output[1]
        # What stays here until `flush` is small, and needs no wait for the device
        choices_TK = map_TE.int().topk(router.topk, dim=1).indices.sort(dim=1).values.int()
        complete = (map_TE.sum(1) == router.topk).all()
        self._calls.append(_Call(self.step(), router.layer_number - 1, choices_TK, complete))


def _cut(path: Path, first_step: int) -> int:
    """Cut a trace off where `first_step` begins or a line was not written to its end; returns its size."""
    path.touch()
    end = 0
    with path.open("r+b") as file:
        for line in file:
            step = _STEP.match(line)
            if step is None or int(step[1]) >= first_step or not line.endswith(b"\n"):
                break
            end += len(line)
        file.truncate(end)
    return end
