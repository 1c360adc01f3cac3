"""A flag that changes between saving and resuming is refused by name, warned of, or accepted; nothing else happens.

tests/unit/test_comparison.py tests the consequence of each flag; here, runs are really saved and resumed.
"""

import re
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch.distributed as dist

from megatron_balance.build.run import build_run
from megatron_balance.checkpoint.loading import check_newest
from megatron_balance.cli.arguments import parse_args
from megatron_balance.device.machine import Machine
from megatron_balance.job.errors import CheckpointError
from megatron_balance.training.loop import train_step
from tests.distributed.checkpoints import Said, patient
from tests.distributed.runs import BASE, build

Outcome = Literal["refused", "warned", "accepted"]


class Context(NamedTuple):
    """Flags of a run that saves, and changes of single flags for runs that resume, by their outcome."""

    ranks: int
    flags: str
    refused: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()


EP2 = "--expert-model-parallel-size 2 --global-batch-size 4 --disable-bias-linear"
ROPE = "--position-embedding-type rope"
CONTEXTS = {
    "plain": Context(
        1,
        "",
        refused=(
            *("--num-layers 4", "--hidden-size 64", "--num-experts 4", "--swiglu", "--disable-bias-linear", "--bf16"),
            *("--normalization RMSNorm", "--kv-channels 16", "--position-embedding-type rope", "--optimizer sgd"),
            *("--untie-embeddings-and-output-weights", "--vocab-size 120", "--lr-decay-style cosine", "--lr 2e-3"),
        ),
        warned=(
            *("--moe-router-topk 3", "--norm-epsilon 1e-6", "--attention-dropout 0.1", "--moe-aux-loss-coeff 0.1"),
            *("--seed 77", "--global-batch-size 4", "--adam-beta1 0.8", "--clip-grad 0.5", "--seq-length 16"),
        ),
        accepted=(
            *("--moe-layer-impl balanced", "--recompute-granularity selective", "--use-distributed-optimizer"),
            *("--overlap-grad-reduce", "--log-throughput", "--exit-interval 5", "--ckpt-fully-parallel-load"),
        ),
    ),
    "latent": Context(
        1,
        f"{ROPE} --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
        "--v-head-dim 8",
        refused=("--q-lora-rank 8", "--kv-lora-rank 8", "--qk-head-dim 16", "--v-head-dim 16"),
        warned=("--rotary-scaling-factor 2",),
    ),
    "fp16": Context(1, "--fp16", accepted=("--initial-loss-scale 1024", "--loss-scale-window 10")),
    "layout": Context(
        2,
        f"{EP2} --balance-policy quota --balance-profile builtin",
        accepted=(
            *("--expert-model-parallel-size 1 --balance-policy none", "--balance-policy top2", "--balance-interval 2"),
            *("--pipeline-model-parallel-size 2 --expert-model-parallel-size 1 --balance-policy none",),
            *("--moe-comm-alltoall p2p", "--moe-comm-chunks 2", "--balance-overlap blockwise"),
            *("--balance-ownership transfer",),
        ),
    ),
}
CASES = [
    pytest.param(name, outcome, changes, id=f"{name} {outcome}: {changes}")
    for name, context in CONTEXTS.items()
    for outcome in ("refused", "warned", "accepted")
    for changes in getattr(context, outcome)
]


def save(flags: str, directory: str) -> None:
    """Train a step and save."""
    run = build(f"{flags} --save {directory}")
    checkpoints = patient(run)
    train_step(run)
    checkpoints.save()
    checkpoints.finish()


def resume(flags: str) -> tuple[Outcome, list[str]]:
    """Resume and train a step; return what became of it, and what was said."""
    config = parse_args(f"{BASE} {flags}".split(), Machine.here(dist.get_world_size())).config
    said = Said()
    try:
        run = build_run(config)
        check_newest(config, run.length)
        patient(run, said).load()
        train_step(run)
    except (ValueError, CheckpointError) as error:
        return "refused", [str(error)]
    warnings = [line for line in said.lines if line.startswith("WARNING")]
    return "warned" if warnings else "accepted", warnings


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expected", "changes"), CASES)
def test_a_changed_flag_has_its_consequence(ranks, saved: Path, name: str, expected: Outcome, changes: str) -> None:
    context = CONTEXTS[name]
    directory = saved / name
    if not directory.exists():
        ranks(context.ranks).run(save, context.flags, str(directory))
    (outcome, said), *others = ranks(context.ranks).run(resume, f"{context.flags} --load {directory} {changes}")
    assert outcome == expected, said
    assert all(other == outcome for other, _ in others)
    if outcome == "refused":
        assert re.search(r"--[a-z][\w-]+.*: ", said[0])
