"""A resumed run equals the run that never stopped, bit for bit; on another layout, the weights are the same."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_balance.checkpoint import run_state
from megatron_balance.training.run import Run
from tests import features
from tests.distributed.checkpoints import (
    forget_placements,
    losses_of,
    patient,
    straight_against_resumed,
    straight_against_spoiled,
    unequal_tensors,
)
from tests.distributed.runs import build
from tests.distributed.test_models import LATENT
from tests.variants import variants

ITERATIONS = 8
"""Half of them come before the save, which thus falls inside an interval of three."""

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
GATHERED_LATE = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
# Further down, each feature is resumed
LAYOUTS = {
    "ep2 dp2 distributed bf16 async": (
        4,
        f"--expert-model-parallel-size 2 --use-distributed-optimizer --bf16 --async-save --decoupled-lr 4e-3 {DROPOUT}",
    ),
    "ep2 sgd": (2, f"--expert-model-parallel-size 2 --optimizer sgd {DROPOUT}"),
    "ep2 fp16": (
        2,
        f"--expert-model-parallel-size 2 --fp16 --initial-loss-scale 1e6 --hysteresis 1 --decoupled-lr 4e-3 {DROPOUT}",
    ),
    "pp2 interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --swiglu "
        f"--global-batch-size 8 --disable-bias-linear --moe-shared-expert-intermediate-size 32 {DROPOUT} "
        "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --moe-layer-freq [1,0,1,1]",
    ),
    "pp2 ep2 predictions": (
        4,
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --global-batch-size 8 --mtp-num-layers 1 "
        f"--position-embedding-type rope {GATHERED_LATE} {DROPOUT}",
    ),
    "tp2 ep2 latent attention": (
        2,
        f"{LATENT} --q-lora-rank 32 --tensor-model-parallel-size 2 --sequence-parallel {DROPOUT}",
    ),
}

QUICK = ("ep2 dp2 distributed bf16 async", "ep2 fp16", "pp2 interleaved")
"""Whole and sharded optimizers, main parameters, a loss scale, two learning rates, stages and dense layers."""


HOT = f"--moe-router-force-workload rotating_hotspot --global-batch-size 16 {DROPOUT}"
POLICIES = {
    "top2": f"--expert-model-parallel-size 4 --balance-policy top2 {HOT}",
    "top2 exact": f"--expert-model-parallel-size 4 --balance-policy top2 --balance-load exact {HOT}",
    "quota blockwise pp2": "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --balance-policy quota "
    f"--balance-overlap blockwise {HOT}",
    "quota exact dp2": "--expert-model-parallel-size 2 --balance-policy quota --balance-load exact "
    f"--use-distributed-optimizer {HOT}",
    "flexmoe and quota dp2": "--expert-model-parallel-size 2 --balance-policy flexmoe --balance-inner-policy quota "
    f"--balance-overlap blockwise --use-distributed-optimizer {HOT}",
    "paired, quota exact dp2": "--expert-model-parallel-size 2 --balance-policy quota --balance-load exact "
    f"--overlap-moe-expert-parallel-comm --balance-overlap blockwise --use-distributed-optimizer {HOT}",
    "paired, flexmoe and quota dp2": "--expert-model-parallel-size 2 --balance-policy flexmoe --balance-inner-policy "
    f"quota --overlap-moe-expert-parallel-comm --balance-overlap blockwise --use-distributed-optimizer {HOT}",
    "fastermoe ema dp2": "--expert-model-parallel-size 2 --balance-policy fastermoe --balance-predictor ema "
    f"--use-distributed-optimizer {HOT}",
    "top3 linear every third, pp2": "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --balance-policy "
    f"top3 --balance-guest-slots 3 --balance-predictor linear --balance-interval 3 {HOT} --global-batch-size 8",
}


FEW = 4

CHUNKS = (
    f"--expert-model-parallel-size 4 --moe-comm-chunks auto --moe-comm-order demi --moe-comm-refit-interval {FEW} {HOT}"
)


def forget_chunks(run: Run) -> None:
    """Force a new choice of chunks."""
    assert run.chunks is not None and run.chunks.chosen
    run.chunks.restore({})


def shown_while_saving() -> int:
    """Return how many tensors are formatted while a checkpoint's state is collected."""
    run = build("--num-layers 1 --expert-model-parallel-size 2")
    with mock.patch.object(torch.Tensor, "__repr__", return_value="") as shown:
        run_state.sharded_state(run, frozenset({"optimizer"}), is_loading=False)
    return shown.call_count


def test_a_save_formats_no_tensor(ranks) -> None:
    """On a device, formatting a tensor makes the host wait."""
    assert ranks(2).run(shown_while_saving) == [0, 0]


def written(flags: str, directory: str) -> int:
    """Save an untrained run; return the bytes that this rank has written."""
    run = build(f"{flags} --save {directory}")
    checkpoints = patient(run)
    checkpoints.prepare()
    checkpoints.save()
    return sum(path.stat().st_size for path in Path(directory).glob(f"*/__{torch.distributed.get_rank()}_*.distcp"))


def test_data_parallel_ranks_write_equal_parts(ranks, tmp_path) -> None:
    divided = ranks(4).run(written, "--expert-model-parallel-size 2", str(tmp_path / "divided"))
    assert max(divided) < 1.1 * min(divided)
    alone = ranks(4).run(
        written, "--expert-model-parallel-size 2 --no-ckpt-fully-parallel-save", str(tmp_path / "alone")
    )
    assert min(alone[:2]) > 10 * max(alone[2:]), "the first replica of each part writes"


@pytest.mark.slow
def test_a_resumed_run_keeps_its_chunks(ranks, tmp_path):
    outcomes = ranks(4).run(straight_against_spoiled, CHUNKS, str(tmp_path), FEW, forget_chunks)
    assert all(kept == [] and forgotten for kept, forgotten in outcomes)


NEEDED = ("top3 linear every third, pp2", "quota blockwise pp2", "fastermoe ema dp2")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in POLICIES if name not in NEEDED])
def test_a_resumed_run_keeps_its_placements(ranks, tmp_path, name: str):
    assert ranks(4).run(straight_against_resumed, POLICIES[name], str(tmp_path), ITERATIONS) == [[]] * 4


@pytest.mark.parametrize("name", variants(NEEDED, NEEDED[:1]))
def test_a_resumed_run_needs_and_keeps_its_placements(ranks, tmp_path, profiles, name: str):
    flags = f"{POLICIES[name]} --balance-profile {profiles[2]}"
    outcomes = ranks(4).run(straight_against_spoiled, flags, str(tmp_path), ITERATIONS, forget_placements)
    assert all(kept == [] and forgotten for kept, forgotten in outcomes)


@pytest.mark.parametrize(("world_size", "flags"), variants(LAYOUTS, QUICK))
def test_a_resumed_run_is_the_straight_run(ranks, tmp_path, world_size, flags):
    differing = ranks(world_size).run(straight_against_resumed, flags, str(tmp_path), FEW)
    assert differing == [[]] * world_size


@pytest.mark.slow
@pytest.mark.parametrize("feature", features.FEATURES)
def test_a_resumed_run_with_every_feature_is_the_straight_run(ranks, tmp_path, feature: str):
    refused = features.refusal(feature, "expert shards") is not None
    shards = "" if refused else features.FEATURES["expert shards"].flags
    flags = f"{features.flags_of(feature)} {shards} {DROPOUT}"
    world_size = 8 if "pipeline" in feature else 4
    assert ranks(world_size).run(straight_against_resumed, flags, str(tmp_path), FEW) == [[]] * world_size


OTHER_LAYOUTS = {
    "ep2": (4, "--expert-model-parallel-size 2"),
    "ep2 distributed": (4, "--expert-model-parallel-size 2 --use-distributed-optimizer"),
    "ep1": (4, "--expert-model-parallel-size 1"),
    "one process": (1, "--expert-model-parallel-size 1"),
    "pp2 ep2": (4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
    "by stage": (
        4,
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 1 --pipeline-model-parallel-layout E|ttL",
    ),
}


AWAY = 2
"""Iterations on another layout."""


@dataclass(frozen=True)
class Home:
    """A run's checkpoint after `AWAY` iterations, and the losses of `AWAY` more on the same layout."""

    flags: str
    start: str
    stayed: list[float]


@pytest.fixture(scope="module")
def home(ranks, tmp_path_factory) -> Callable[[str], Home]:
    """`home(flags)`: a run with these extra flags; each is trained once."""

    @functools.cache
    def of(more: str) -> Home:
        flags = f"--expert-model-parallel-size 4 --global-batch-size 8 --train-iters 40 {more}"
        start, stayed = (str(tmp_path_factory.mktemp(name)) for name in ("start", "stayed"))
        ranks(4).run(losses_of, flags, None, start, AWAY)
        return Home(flags, start, ranks(4).run(losses_of, flags, start, stayed, AWAY)[0])

    return of


PRECISIONS = {"fp32": "", "bf16": "--bf16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        *itertools.product(OTHER_LAYOUTS, ["fp32"]),
        ("pp2 ep2", "bf16"),
        ("ep2 distributed", "bf16"),
    ],
)
def test_a_run_goes_on_in_another_layout_and_back(ranks, home, tmp_path, layout: str, precision: str):
    (world_size, other) = OTHER_LAYOUTS[layout]
    precision = PRECISIONS[precision]
    # 18 weights with two moments each; with bfloat16, main parameters too
    tensors, tolerance = (72, 2e-2) if precision else (54, 1e-5)
    check_there_and_back(ranks, home(precision), tmp_path, world_size, f"{other} {precision}", tensors, tolerance)


UNBIASED = "--disable-bias-linear --swiglu --make-vocab-size-divisible-by 64"
"""The padding of the vocabulary is the same for one and for two tensor-parallel ranks."""

TP_EP_ETP = "--tensor-model-parallel-size {} --expert-model-parallel-size {} --expert-tensor-parallel-size {}"
SHARDED = {
    "etp2 s1": f"{TP_EP_ETP.format(2, 2, 2)} --moe-parallel-schedule s1",
    "etp2 s2 distributed": f"{TP_EP_ETP.format(2, 2, 2)} --moe-parallel-schedule s2 --use-distributed-optimizer",
    "etp2 alone": TP_EP_ETP.format(1, 1, 2),
}
"""Layouts with two shards per expert; the checkpoints before and after hold whole experts."""


@pytest.mark.parametrize("flags", variants(SHARDED, quick=("etp2 alone",)))
def test_a_run_goes_on_with_sharded_experts_and_back(ranks, home, tmp_path, flags: str):
    # 13 weights with two moments each
    check_there_and_back(ranks, home(UNBIASED), tmp_path, 4, f"{flags} {UNBIASED}", 39, 1e-5)


def check_there_and_back(
    ranks, home: Home, directory: Path, world_size: int, other: str, tensors: int, tolerance: float
) -> None:
    other = f"{other} --global-batch-size 8 --train-iters 40"
    there = str(directory / "there")
    back = str(directory / "back")
    moved = ranks(world_size).run(losses_of, other, home.start, there, AWAY, f"{there} unchanged")[0]
    ranks(4).run(losses_of, home.flags, there, back, 1, f"{back} unchanged")

    for left, right in ((home.start, f"{there} unchanged"), (there, f"{back} unchanged")):
        count, unequal = ranks(1).run(unequal_tensors, left, right)[0]
        assert unequal == []
        assert count == tensors
    assert moved == pytest.approx(home.stayed, rel=tolerance)
