"""Routers' decisions: a table of tokens per expert, and a trace of every token's experts.

Both hook into the routers, so they work with any MoE layer. The trace (`--moe-routing-trace-path`) has the format of
Megatron-LM's router tracer, JSON lines, and four more entries that tell which tokens a record has:

{"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0, "num_tokens": 2, "topk": 2,
 "num_experts": 8, "seq_length": 4, "samples": [6, 7], "positions": [[0, 1], [3, 4]], "top_indices": [[1, 4], [0, 4]]}

`samples` are the first sample and the one after the last, in the order in which the run reads them. `positions` are
ranges of places in each of these samples. The tokens are ordered by position, then by sample.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter

from megatron_balance.device.versions import number_of
from megatron_balance.observe.optional import AppendedFile
from megatron_balance.workloads.forced_routing import BatchPart

_STEP = re.compile(rb'\{"step": (\d+), ')

RouterOutput = tuple[torch.Tensor, torch.Tensor]
"""Probabilities and the routing map, both [T, E]."""


def _hook_routers(model: Sequence[torch.nn.Module], hook: Callable[..., None]) -> None:
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(hook)


def _counts(router: TopKRouter) -> bool:
    """Return whether the current pass counts. Recomputation's first pass, without gradients, does not."""
    return router.training and torch.is_grad_enabled()


class LoadRecorder:
    """Records, for each MoE layer, the tokens per expert in this rank's latest training forward pass."""

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self.counts: dict[int, torch.Tensor] = {}
        _hook_routers(model, self._count)

    def _count(self, router: TopKRouter, inputs: object, output: RouterOutput) -> None:
        if _counts(router):
            self.counts[number_of(router)] = output[1].detach().sum(0)

    def gather(self, groups: ProcessGroupCollection) -> dict[int, list[int]]:
        """Return the tokens per expert of every MoE layer of the model, over all ranks; every rank calls this."""
        own = {}
        for layer, counts_E in sorted(self.counts.items()):
            total_E = counts_E.clone()
            # Data-parallel ranks have different tokens, and tensor-parallel ranks different parts of each sequence
            dist.all_reduce(total_E, group=groups.tp_dp_cp)
            own[layer] = total_E.tolist()
        stages: list[dict[int, list[int]]] = [{}] * groups.pp.size()
        dist.all_gather_object(stages, own, group=groups.pp)
        return dict(sorted(entry for stage in stages for entry in stage.items()))

    def table(self, groups: ProcessGroupCollection) -> str:
        """Format the result of `gather` as a table, with each layer's balance; every rank calls this."""
        loads = self.gather(groups)
        experts = max(map(len, loads.values()), default=0)
        width = max([7, *(len(str(count)) + 1 for counts in loads.values() for count in counts)])
        header = "layer |" + "".join(f"{f'e{expert}':>{width}}" for expert in range(experts)) + " | max/mean"
        lines = ["tokens per expert, last microbatch of the last iteration:", header, "-" * len(header)]
        for layer, counts in loads.items():
            balance = max(counts) * len(counts) / max(1, sum(counts))
            lines.append(f"{layer:5d} |" + "".join(f"{count:{width}d}" for count in counts) + f" | {balance:8.2f}")
        return "\n".join(lines)


class RoutingTrace:
    """Writes `router_trace_rank{rank}.jsonl`: one record per MoE layer and training microbatch.

    As in Megatron-LM, a call that dropped tokens is not recorded, because the format cannot represent it. A replay
    (workloads/replay.py) reads the files.

    Args:
        part: the tokens of a global batch that this rank's routers see.
        step: returns the iteration in progress, from 0.
        consumed: returns the number of samples that all earlier iterations have read.
        first_step: step where the run starts or resumes; an existing trace keeps its earlier steps.

    Raises:
        ValueError: the directory cannot be written to.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        directory: Path,
        rank: int,
        part: BatchPart,
        *,
        step: Callable[[], int],
        consumed: Callable[[], int] = int,
        first_step: int = 0,
    ) -> None:
        self.rank = rank
        self.part = part
        self.step = step
        self.consumed = consumed
        self._positions = _ranges(part.positions().tolist())
        self._calls_of_layer: Counter[int] = Counter()
        self._counted_step: int | None = None
        """Step of the calls in `_calls_of_layer`."""
        self._calls: list[tuple[torch.Tensor, dict[str, Any]]] = []
        """Each router call: whether every token has exactly K experts, and its record, both still on the device."""

        def belongs(line: bytes, is_first: bool) -> bool:
            found = _STEP.match(line)
            return found is not None and int(found[1]) < first_step

        path = directory / f"router_trace_rank{rank}.jsonl"
        self._file = AppendedFile.continued(path, f"--moe-routing-trace-path {directory}", belongs)
        _hook_routers(model, self._note)

    def flush(self, last: bool = False) -> None:
        """Write the calls since the last flush. It runs after every iteration, so that a resumed trace is complete."""
        for complete, record in self._calls:
            if complete.item():
                record["top_indices"] = record["top_indices"].tolist()
                self._file.add(json.dumps(record).encode() + b"\n")
        self._file.flush(last)
        self._calls = []

    def _note(self, router: TopKRouter, inputs: object, output: RouterOutput) -> None:
        if not _counts(router):
            return
        map_TE = output[1]
        # These tensors are small enough to keep until `flush`. Computing them does not wait for the device
        choices_TK = map_TE.int().topk(router.topk, dim=1).indices.sort(dim=1).values.int()
        complete = (map_TE.sum(1) == router.topk).all()
        step = self.step()
        layer = number_of(router) - 1
        samples = self.part.samples(len(choices_TK))
        first = self.consumed() + self.part.first_sample(self._microbatch(step, layer), samples)
        record = {
            "step": step,
            "stage": "pre_dispatch",
            "block": "decoder",
            "layer": layer,
            "rank": self.rank,
            "num_tokens": choices_TK.shape[0],
            "topk": choices_TK.shape[1],
            "num_experts": map_TE.shape[1],
            "seq_length": self.part.seq_length,
            "samples": [first, first + samples],
            "positions": self._positions,
            "top_indices": choices_TK,
        }
        self._calls.append((complete, record))

    def _microbatch(self, step: int, layer: int) -> int:
        """Return the microbatch of a layer's call, and count the call. Every schedule of megatron-core runs the forward
        passes of a layer in the order of microbatches, and its backward passes, too, which include recomputation."""
        if step != self._counted_step:
            self._calls_of_layer = Counter()
            self._counted_step = step
        self._calls_of_layer[layer] += 1
        return self._calls_of_layer[layer] - 1


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Return the runs of consecutive numbers, each as its first number and the one after its last."""
    runs = itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0])
    members = [[number for _, number in run] for _, run in runs]
    return [[run[0], run[-1] + 1] for run in members]
