"""The collectives of every step order: their kinds, order and volumes."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

from megatron_balance.comm import sharded
from megatron_balance.comm.alltoall import Exchange, FlatAllToAll
from megatron_balance.flow.chunks import pipeline
from megatron_balance.flow.parallel_schedule import SCHEDULES, ParallelDispatch, Shape, volumes
from megatron_balance.job.layout import build_groups
from tests.distributed.layers import HIDDEN, QUICK_LAYOUTS, Layout, build_layer, moe_config, size_of

GOLDEN = Path(__file__).parents[1] / "golden" / "collectives"


class Log:
    """A rank's collectives, with the number of elements that each takes or gives."""

    def __init__(self, path: ParallelDispatch) -> None:
        groups = path.groups
        self.names = {groups.expt_tp: "ESP", groups.tp: "MP", groups.ep: "EP", groups.tp_ep: "EP&ESP"}
        self.lines: list[tuple[str, int]] = []

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Record collectives of rows, but not those of weights and counts."""
        start = FlatAllToAll.start
        gather_rows = sharded.all_gather_rows
        gather = mappings._gather_along_first_dim
        all_reduce = dist.all_reduce
        reduce_scatter = dist.reduce_scatter

        def starting(wire: FlatAllToAll, rows: torch.Tensor, splits: torch.Tensor) -> Exchange:
            self.add(rows, "AlltoAll", wire.group)
            return start(wire, rows, splits)

        def gathering_rows(group: dist.ProcessGroup, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
            gathered = gather_rows(group, rows, sizes)
            self.add(gathered, "AllGather", group)
            return gathered

        def gathering(tensor: torch.Tensor, group: dist.ProcessGroup, *args: object) -> torch.Tensor:
            gathered = gather(tensor, group, *args)
            self.add(gathered, "AllGather", group)
            return gathered

        def reducing(tensor: torch.Tensor, *args: object, group: dist.ProcessGroup, **kwargs: object) -> object:
            self.add(tensor, "AllReduce", group)
            return all_reduce(tensor, *args, group=group, **kwargs)

        def scattering(own: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup) -> object:
            self.add(torch.cat(parts), "ReduceScatter", group)
            return reduce_scatter(own, parts, group=group)

        patch.setattr(FlatAllToAll, "start", starting)
        for module in (sharded, pipeline):
            patch.setattr(module, "all_gather_rows", gathering_rows)
        patch.setattr(mappings, "_gather_along_first_dim", gathering)
        patch.setattr(dist, "all_reduce", reducing)
        patch.setattr(dist, "reduce_scatter", scattering)

    def add(self, tensor: torch.Tensor, collective: str, group: dist.ProcessGroup) -> None:
        # Every order has its all-to-all, even in a group of one rank; other collectives are left out there
        if tensor.ndim > 1 and tensor.shape[-1] == HIDDEN and (collective == "AlltoAll" or group.size() > 1):
            self.lines.append((f"{self.names[group]}-{collective}", tensor.numel()))


Passes = dict[str, list[tuple[str, int]]]
"""`forward` and `backward` -> the collectives of the pass."""


def collectives(layout: Layout, schedule: str, shapes: Sequence[tuple[int, int, float]]) -> list[Passes]:
    """Return the collectives of layers that pad to capacity, for each (tokens, top-k, capacity factor)."""
    tensor, expert, shards = layout
    config = moe_config(
        tensor_model_parallel_size=tensor,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=shards,
        add_bias_linear=False,
        moe_router_pre_softmax=True,
        moe_expert_capacity_factor=1.0,
        moe_pad_expert_input_to_capacity=True,
        moe_router_load_balancing_type="none",
    )
    groups = build_groups(config, seed=7)
    path = ParallelDispatch(SCHEDULES[schedule], groups, sequence_parallel=False)
    found = []
    for tokens, config.moe_router_topk, config.moe_expert_capacity_factor in shapes:
        layer = build_layer(config, groups, FlatAllToAll(path.exchange_group), path)
        log = Log(path)
        hidden = torch.randn(tokens, 1, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        passes = {}
        with pytest.MonkeyPatch.context() as patch:
            log.watch(patch)
            output, _ = layer(hidden.requires_grad_())
            passes["forward"] = log.lines
            log.lines = []
            output.sum().backward()
            passes["backward"] = log.lines
        found.append(passes)
    return found


@pytest.mark.parametrize("layout", QUICK_LAYOUTS)
def test_volumes_are_the_papers(ranks, layout: Layout) -> None:
    generator = random.Random(str(layout))
    # All parts of an expert's capacity are integers
    shapes = [
        (32 * generator.randint(1, 4), generator.choice((1, 2, 4)), generator.choice((1.0, 2.0))) for _ in range(2)
    ]
    for schedule in SCHEDULES:
        for found in ranks(size_of(layout)).run(collectives, layout, schedule, shapes):
            for passes, (tokens, topk, factor) in zip(found, shapes, strict=True):
                shape = Shape(tokens, HIDDEN, round(tokens * topk * factor), layout[0], layout[2])
                assert passes["forward"] == [(str(step), size) for step, size in volumes(schedule, shape)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_log_of_collectives_is_the_golden_one(ranks, schedule: str) -> None:
    every = ranks(4).run(collectives, (2, 2, 2), schedule, [(16, 2, 1.0)])
    assert all(found == every[0] for found in every)
    lines = [f"{name} {step} {size}" for name, steps in every[0][0].items() for step, size in steps]
    assert "\n".join(lines) + "\n" == (GOLDEN / f"{schedule}.txt").read_text()
