"""Runs that repeat the routing of another run (`--moe-routing-replay-path`): the same losses, in any layout."""

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from megatron_balance.flow.routers import routers_of
from megatron_balance.observe.routing import RouterOutput, RoutingTrace
from megatron_balance.training.loop import evaluate, train_step
from tests.distributed import runs
from tests.distributed.checkpoints import losses_of, patient, train_and_save

FLAG = "--moe-routing-replay-path"
COMMON = (
    "--global-batch-size 8 --train-iters 40 --moe-router-topk 5 --disable-bias-linear --swiglu "
    "--make-vocab-size-divisible-by 64"
)
"""The padding of the vocabulary is the same for one and for two tensor-parallel ranks."""
HOT = "--moe-router-force-workload hot_experts"


class Recorded(NamedTuple):
    """What a rank saw in two iterations."""

    curve: runs.Curve
    hosts: runs.Hosts
    maps: list[torch.Tensor]
    """The routing map [T, E] of every training call, in order."""
    evaluated: list[dict[str, float]]
    """Losses of the evaluations after each iteration."""


def recorded(flags: str, directory: Path, load: Path | None = None) -> Recorded:
    """Train two iterations, resuming from `load` if given, write a trace, and evaluate if flags request it."""
    run = runs.build(f"{COMMON} {flags}" + (f" --load {load}" if load else ""))
    patient(run).load()
    maps: list[torch.Tensor] = []

    def note(router: TopKRouter, inputs: object, output: RouterOutput) -> None:
        if router.training and torch.is_grad_enabled():
            maps.append(output[1].clone())

    for router in routers_of(run.model):
        router.register_forward_hook(note)
    trace = RoutingTrace(
        run.model,
        directory,
        dist.get_rank(),
        run.part,
        step=lambda: run.progress.iteration,
        consumed=lambda: run.progress.consumed_samples,
    )
    reports = []
    evaluated = []
    for _ in range(2):
        reports.append(train_step(run))
        trace.flush()
        if "--eval-iters" in flags:
            evaluated.append(evaluate(run, run.data.valid))
    hosts = [sum(layer.hosts_added for layer in report.balance.values()) for report in reports]
    return Recorded(runs.curve_of(reports), hosts, maps, evaluated)


def choices(directory: Path) -> dict[tuple[int, int, int, int], list[int]]:
    """Return the experts of every token in a directory of traces, by step, layer, sample and position."""
    found = {}
    for path in directory.iterdir():
        for record in map(json.loads, path.read_text().splitlines()):
            positions = [position for run in record["positions"] for position in range(*run)]
            places = itertools.product(positions, range(*record["samples"]))
            for (position, sample), experts in zip(places, record["top_indices"], strict=True):
                found[record["step"], record["layer"], sample, position] = experts
    return found


BIASED = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-1"


def test_a_replay_in_the_same_layout_is_equal_to_the_bit(ranks, tmp_path: Path) -> None:
    flags = f"--recompute-granularity selective --recompute-modules moe --eval-interval 5 --eval-iters 1 {BIASED}"
    trace = tmp_path / "trace"
    again = tmp_path / "again"
    (first,) = ranks(1).run(recorded, flags, trace)
    (replay,) = ranks(1).run(recorded, f"{flags} {FLAG} {trace}", again)
    assert replay.curve == first.curve
    assert replay.evaluated == first.evaluated and len(first.evaluated) == 2
    assert len(first.maps) == 2 * 2 * 4 and all(map(torch.equal, replay.maps, first.maps))
    assert choices(again) == choices(trace)


class Layout(NamedTuple):
    world_size: int
    flags: str
    model: str = ""


TP2 = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"
LAYOUTS = {
    "EP2 with a policy": Layout(2, "--expert-model-parallel-size 2 --balance-policy top2 --balance-profile builtin"),
    "TP2": Layout(2, f"{TP2} --sequence-parallel"),
    "CP2": Layout(2, "--context-parallel-size 2"),
    "PP2": Layout(2, "--pipeline-model-parallel-size 2"),
    "interleaved": Layout(
        2,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1",
        model="--num-layers 4 --moe-aux-loss-coeff 0",
    ),
    "s1, full recomputation": Layout(
        4,
        f"{TP2} --expert-model-parallel-size 2 --moe-parallel-schedule s1 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "paired passes, predictions": Layout(
        2,
        "--expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm",
        model="--mtp-num-layers 1 --position-embedding-type rope",
    ),
    "policy for exact loads": Layout(
        2, "--expert-model-parallel-size 2 --balance-policy top2 --balance-load exact --balance-profile builtin"
    ),
    "megatron's layer": Layout(2, "--expert-model-parallel-size 2 --moe-layer-impl megatron"),
}
QUICK = ("EP2 with a policy",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_replay_in_another_layout(ranks, tmp_path: Path, name: str) -> None:
    """The trace is that of a workload, so that routers would choose other experts without it."""
    layout = LAYOUTS[name]
    start, trace, again = (tmp_path / part for part in ("start", "trace", "again"))
    ranks(1).run(losses_of, f"{COMMON} {layout.model}", None, str(start), 1)
    (first,) = ranks(1).run(recorded, f"{HOT} {layout.model}", trace, start)
    flags = f"{layout.model} {layout.flags} {FLAG} {trace}"
    replay = ranks(layout.world_size).run(recorded, flags, again, start)[0]
    assert choices(again) == choices(trace)
    for pair in zip(replay.curve, first.curve, strict=True):
        assert pair[0] == pytest.approx(pair[1], rel=1e-5)
    if "policy" in layout.flags:
        assert sum(replay.hosts) > 0


def test_an_expert_bias_may_be_switched_on_later(ranks, tmp_path: Path) -> None:
    flags = f"{COMMON} --moe-router-score-function sigmoid"
    ranks(1).run(train_and_save, flags, tmp_path, 1, 1)
    later = f"{flags} --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-1"
    (biased,) = ranks(1).run(train_and_save, later, tmp_path, 2)
    (plain,) = ranks(1).run(train_and_save, flags, tmp_path, 2)
    # The bias starts at zero, so it first matters after one step
    assert biased.losses[0] == plain.losses[0] and biased.losses[1] != plain.losses[1]
    moved = [value for name, value in biased.weights.items() if name.endswith("expert_bias")]
    assert len(moved) == 2 and any((bias != 0).any() for bias in moved)
