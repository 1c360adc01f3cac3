"""observe/routing.py in training runs: the trace matches what the routers did."""

import functools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from megatron_balance.observe.routing import RoutingTrace
from megatron_balance.training.loop import evaluate, train_step
from tests.distributed import runs

Load = dict[tuple[int, int], list[list[int]]]
"""(step, layer from 0) -> tokens per expert of each microbatch."""


def trained(flags: str, directory: Path) -> tuple[Load, Load]:
    """Return the loads of this rank's routers in two iterations from the fourth, and those in its trace."""
    run = runs.build(f"--global-batch-size 8 --eval-iters 1 --eval-interval 5 {flags}")
    run.progress.iteration = 3
    routed: Load = {}

    def count(router: TopKRouter, inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if router.training and torch.is_grad_enabled():
            key = (run.progress.iteration, router.layer_number - 1)
            routed.setdefault(key, []).append(output[1].sum(0).tolist())

    for chunk in run.model:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(count)
    step = functools.partial(getattr, run.progress, "iteration")
    trace = RoutingTrace(run.model, directory, dist.get_rank(), run.part, step=step, first_step=3)
    for _ in range(2):
        train_step(run)
        trace.flush()
    evaluate(run, run.data.valid)
    trace.flush(last=True)
    told: Load = {}
    for line in (directory / f"router_trace_rank{dist.get_rank()}.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert all(row == sorted(set(row)) and len(row) == record["topk"] for row in record["top_indices"])
        assert (record["num_tokens"], record["rank"]) == (len(record["top_indices"]), dist.get_rank())
        loads = Counter(expert for row in record["top_indices"] for expert in row)
        told.setdefault((record["step"], record["layer"]), []).append([loads[expert] for expert in range(8)])
    return routed, told


@pytest.mark.parametrize(
    ("world_size", "flags", "microbatches"),
    [
        (1, "", 4),
        (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 4),
        (2, "--expert-model-parallel-size 2 --moe-layer-impl megatron", 2),
        (2, "--pipeline-model-parallel-size 2", 4),
    ],
    ids=["one rank", "recompute", "megatron", "pipeline"],
)
def test_a_trace_tells_what_the_routers_did(
    ranks, tmp_path: Path, world_size: int, flags: str, microbatches: int
) -> None:
    layers = set()
    for routed, told in ranks(world_size).run(trained, flags, tmp_path):
        assert told == routed
        assert {step for step, _ in told} == {3, 4}
        assert {len(loads) for loads in told.values()} == {microbatches}
        layers |= {layer for _, layer in told}
    assert layers == {0, 1}
