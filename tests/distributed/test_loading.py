"""A run continues from the weights of a checkpoint, however little it loads: a step with lr 0 changes none."""

import dataclasses
import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_balance.checkpoint import run_state
from megatron_balance.training.loop import train_step
from megatron_balance.training.optimizer_state import optimizers
from megatron_balance.training.run import Run
from tests.distributed.checkpoints import patient
from tests.distributed.runs import build
from tests.variants import variants

BF16 = "--bf16 --num-layers 1 --num-experts 6 --expert-model-parallel-size 2"
WAYS = {
    "resumed": "--load {0}/own",
    "without the optimizer": "--load {0}/own --no-load-optim",
    "finetune": "--load {0}/own --finetune",
    "pretrained": "--load {0}/nothing --pretrained-checkpoint {0}/own",
    "imported": "--load {0}/imported",
}
OPTIMIZERS = {
    "whole": "",
    "distributed": "--use-distributed-optimizer",
    "gathered late": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}

Weights = dict[str, torch.Tensor]


def weights(run: Run) -> Weights:
    """Return the weights that the next forward pass uses."""
    (chunk,) = run.model
    if run.config.ddp.overlap_param_gather:
        chunk.start_param_sync(force_sync=True)
    return {name: value.detach().clone() for name, value in chunk.named_parameters()}


def save(directory: str) -> Weights:
    """Train one step, save everything, and save the weights alone, as a converted model; return the weights."""
    run = build(f"{BF16} --save {directory}/own")
    train_step(run)
    patient(run).save()
    settings = dataclasses.replace(
        run.config.checkpoint, save=f"{directory}/imported", no_save_optim=True, no_save_rng=True
    )
    bare = dataclasses.replace(run, config=run.config.replace(checkpoint=settings))
    nothing_else: dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0, "parts": []}
    with mock.patch.object(run_state, "common_state", lambda *_: nothing_else):
        patient(bare).save()
    return weights(run)


def after_a_step_of_no_length(flags: str) -> tuple[int, Weights, Weights]:
    """Load, train one step with lr 0; return the iteration, and the weights before and after the step."""
    run = build(f"{BF16} --seed 77 {flags}")
    patient(run).load()
    loaded = weights(run)
    for part in optimizers(run.optimizer):
        for group in part.optimizer.param_groups:
            group["lr"] = 0.0
    assert train_step(run).grad_norm > 0
    return run.progress.iteration, loaded, weights(run)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> tuple[str, list[Weights]]:
    directory = str(tmp_path_factory.mktemp("bf16"))
    return directory, ranks(2).run(save, directory)


SLOW = {"resumed", "pretrained", "gathered late"}
CASES = [*itertools.product(WAYS, OPTIMIZERS)]


@pytest.mark.parametrize(("way", "optimizer"), variants(CASES, [case for case in CASES if SLOW.isdisjoint(case)]))
def test_a_run_goes_on_from_the_weights_that_it_loaded(ranks, saved, way: str, optimizer: str) -> None:
    directory, expected = saved
    flags = f"{WAYS[way].format(directory)} {OPTIMIZERS[optimizer]}"
    for (iteration, *found), wanted in zip(ranks(2).run(after_a_step_of_no_length, flags), expected, strict=True):
        assert iteration == (2 if way in ("resumed", "without the optimizer") else 1)
        for weights_then in found:
            assert weights_then.keys() == wanted.keys()
            assert [name for name in wanted if not torch.equal(weights_then[name], wanted[name])] == []
