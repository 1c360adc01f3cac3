"""Every token's experts as JSON lines, in the format of Megatron-LM's router tracer (`--moe-routing-trace-path`).

{"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0, "num_tokens": 2, "topk": 2,
 "top_indices": [[1, 4], [0, 4]]}
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from megatron.core.transformer.moe.router import TopKRouter

from megatron_balance.device.versions import number_of
from megatron_balance.observe.optional import AppendedFile

_STEP = re.compile(rb'\{"step": (\d+), ')


class _Call(NamedTuple):
    """A router call, whose tensors are still on the device."""

    step: int
    layer: int
    choices_TK: torch.Tensor
    complete: torch.Tensor
    """Whether each token has exactly K experts."""


class RoutingTrace:
    """Writes `router_trace_rank{rank}.jsonl`: one record per MoE layer and training microbatch.

    It hooks into the routers, so it works with any MoE layer. As upstream, calls in which tokens were dropped are not
    recorded, because the format cannot represent them.

    Args:
        rank: rank of this process in the whole job.
        step: returns the iteration in progress, from 0.
        first_step: step where the run starts or resumes; earlier steps of an existing trace are kept.

    Raises:
        ValueError: the directory cannot be written to.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        directory: Path,
        rank: int,
        step: Callable[[], int],
        *,
        first_step: int = 0,
    ) -> None:
        self.rank = rank
        self.step = step
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
        """Write the calls since the last flush; called after every iteration, so that a resumed trace is complete."""
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
        # With recomputation, the first pass runs without gradients; only the second is recorded
        if not (router.training and torch.is_grad_enabled()):
            return
        map_TE = output[1]
        # These tensors are small enough to keep until `flush`, and computing them does not wait for the device
        choices_TK = map_TE.int().topk(router.topk, dim=1).indices.sort(dim=1).values.int()
        complete = (map_TE.sum(1) == router.topk).all()
        self._calls.append(_Call(self.step(), number_of(router) - 1, choices_TK, complete))


def _cut(path: Path, first_step: int) -> int:
    """Truncate a trace at `first_step` or at the first incomplete line, and return its size."""
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
