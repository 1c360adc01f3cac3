"""The loss guard reports bad iterations, which change nothing, and ends the run after too many of them."""

import contextlib
import io
import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from megatron_balance.training import loop
from megatron_balance.training.logging import RunLog
from megatron_balance.training.loop import train, train_step
from megatron_balance.training.loss_guard import PoisonedRun
from megatron_balance.training.run import Run
from tests.distributed.runs import Curve, build, curve_of, modules
from tests.variants import variants

NAN = float("nan")
INF = float("inf")

Sabotage = Callable[[Run], Callable[[], object]]
"""Breaks something in a run on this rank; returns a function that undoes it."""

EP4 = "--expert-model-parallel-size 4"
OVERLAP = "--expert-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
PIPELINE = (
    "--num-layers 4 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --global-batch-size 8 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 0"
)
INTERLEAVED = f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1"
MEGATRON = "--moe-layer-impl megatron"


def on_rank(rank: int, sabotage: Sabotage) -> Sabotage:
    return lambda run: sabotage(run) if dist.get_rank() == rank else (lambda: None)


def filled(tensor: torch.Tensor, value: float) -> Callable[[], object]:
    """Fill a part of the weights."""
    saved = tensor.clone()
    tensor.fill_(value)
    return lambda: tensor.copy_(saved)


def one_weight(run: Run) -> Callable[[], object]:
    return filled(modules(run, ".experts")[-1].linear_fc1.weight.data[1, 0, :1], NAN)


def huge_weights(run: Run) -> Callable[[], object]:
    return filled(modules(run, ".experts")[0].linear_fc1.weight.data[0], 3e38)


def expert_output(run: Run) -> Callable[[], object]:
    """Make the last layer's last expert of this rank return NaN for all its rows."""

    def spoil(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        spoiled = torch.ones(len(output), 1)
        spoiled[-int(args[1][-1]) :] = NAN
        return output * spoiled

    return modules(run, ".experts")[-1].register_forward_hook(spoil).remove


def expert_output_of_megatron(run: Run) -> Callable[[], object]:
    expert = modules(run, ".experts")[-1].local_experts[-1]
    return expert.linear_fc2.register_forward_hook(lambda module, args, output: (output[0] * INF, output[1])).remove


def dense_gradient(run: Run) -> Callable[[], object]:
    weight = modules(run, ".linear_qkv")[0].weight
    return weight.register_hook(lambda gradient: gradient * NAN).remove


def expert_gradient(run: Run) -> Callable[[], object]:
    """Spoil an expert's gradient where the experts add it up; autograd only sees a placeholder."""
    weight = modules(run, ".linear_fc2")[-1].weight

    def spoil(gradient: torch.Tensor) -> None:
        weight.main_grad[2, 0, 0] = INF

    return weight.register_hook(spoil).remove


def backward_of_an_expert(run: Run) -> Callable[[], object]:
    """Create NaN in the backward pass of the first layer's experts; it spreads to everything before them."""

    def spoil(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * NAN)

    return modules(run, ".experts")[0].register_forward_hook(spoil).remove


def loss_mask(run: Run) -> Callable[[], object]:
    """Give the next microbatches a bad mask."""
    source = run.data.train[0]
    run.data.train[0] = ({**batch, "loss_mask": batch["loss_mask"] * NAN} for batch in source)
    return lambda: operator.setitem(run.data.train, 0, source)


def passing_fault(run: Run) -> Callable[[], object]:
    """Make one forward pass, but not the next, return NaN."""
    spoiled: list[bool] = []

    def spoil(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
        spoiled.append(True)
        return None if spoiled[1:] else output * NAN

    return modules(run, ".experts")[-1].register_forward_hook(spoil).remove


FAULTS: dict[str, tuple[str, int, Sabotage, str]] = {
    "weight": (EP4, 2, one_weight, "rank 2: decoder.layers.1.mlp.experts.linear_fc1.weight, expert 5 holds NaN"),
    "overflow": (
        f"{EP4} --moe-router-dtype fp32",
        *(3, huge_weights, "rank 3: decoder.layers.0.mlp.experts, expert 6 turns finite inputs into "),
    ),
    "output-interleaved": (
        INTERLEAVED,
        *(0, expert_output, "rank 0: decoder.layers.2.mlp.experts, expert 3 turns finite inputs into NaN"),
    ),
    "output-megatron": (
        f"{OVERLAP} {MEGATRON} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        *(1, expert_output_of_megatron),
        "rank 1: decoder.layers.1.mlp.experts.local_experts.3.linear_fc2, expert 7 turns finite inputs into ",
    ),
    "gradient-expert": (
        f"{OVERLAP} --bf16",
        *(2, expert_gradient),
        "rank 2: the gradient of decoder.layers.1.mlp.experts.linear_fc2.weight, expert 2 is Inf",
    ),
    "gradient-backward": (
        INTERLEAVED,
        *(2, backward_of_an_expert),
        "rank 2: the gradient of decoder.layers.1.mlp.experts.linear_fc2.bias, experts 0, 1, 2, 3 is NaN",
    ),
    "loss": (
        EP4,
        *(3, loss_mask, "rank 3: the loss of microbatch 0 is NaN; the model's output is finite"),
    ),
    "passing": (
        f"{EP4} --global-batch-size 16",
        1,
        passing_fault,
        "ranks 0-3: the loss of microbatch 0 is NaN; it was finite when",
    ),
}


def state(run: Run) -> dict[str, Any]:
    """Return everything that a bad iteration must not change, bit for bit."""
    tensors = {}
    for index, chunk in enumerate(run.model):
        if chunk.use_forward_hook:
            # Otherwise the next forward pass would gather what the last step changed
            chunk.start_param_sync(force_sync=True)
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            tensors[f"{index} {name}"] = tensor
    for index, part in enumerate(run.optimizer.chained_optimizers):
        for group in part.optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                tensors[f"{index} main {number}"] = parameter
                for name, value in part.optimizer.state[parameter].items():
                    tensors[f"{index} {name} {number}"] = torch.as_tensor(value)
    plain = {"scheduler": run.scheduler.num_steps, "aux": get_moe_layer_wise_logging_tracker()}
    bits = {name: bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy()) for name, tensor in tensors.items()}
    return bits | {name: repr(value) for name, value in plain.items()}


def one_bad_iteration(fault: str) -> dict[str, Any]:
    """Train two good iterations, a bad one, and a good one again."""
    flags, rank, sabotage, _ = FAULTS[fault]
    run = build(flags)
    for _ in range(2):
        assert train_step(run).fault is None
    repair = on_rank(rank, sabotage)(run)
    before = state(run)
    bad = train_step(run)
    after = state(run)
    counts = (run.progress.iteration, run.progress.nan_iterations, run.progress.bad_in_a_row)
    repair()
    good = train_step(run)
    return {
        "fault": bad.fault,
        "skipped": bad.skipped,
        "counts": counts,
        "changed": [name for name in before if before[name] != after[name]],
        "compared": len(before),
        "good": (good.fault, good.skipped, good.grad_norm, run.progress.bad_in_a_row),
        "learned": before != state(run),
    }


@pytest.mark.parametrize(
    "fault", variants([*FAULTS], quick=("passing", "loss", "gradient-backward", "output-interleaved"))
)
def test_bad_iteration_is_named_and_changes_nothing(ranks, fault: str) -> None:
    outcomes = ranks(4).run(one_bad_iteration, fault)
    assert len({outcome["fault"] for outcome in outcomes}) == 1
    for outcome in outcomes:
        (line,) = outcome["fault"].splitlines()
        assert line.startswith(f"  {FAULTS[fault][3]}")
        assert outcome["changed"] == [] and outcome["compared"] > 20
        assert outcome["skipped"] and outcome["counts"] == (3, 1, 1)
        reason, skipped, norm, in_a_row = outcome["good"]
        assert (reason, skipped, in_a_row) == (None, False, 0) and 0 < norm < INF
        assert outcome["learned"]


def losses_after_a_bad_iteration(guarded: bool) -> list[float]:
    """Return the losses of the two iterations after one without a step, skipped by the guard or by hand."""
    flags = f"{EP4} --attention-dropout 0.1 --hidden-dropout 0.1"
    run = build(flags if guarded else f"{flags} --no-check-for-nan-in-loss-and-grad")
    train_step(run)
    if guarded:
        repair = on_rank(1, expert_output)(run)
        assert train_step(run).fault is not None
        repair()
    else:
        step = run.optimizer.step
        run.optimizer.step = lambda: (False, None, None)
        train_step(run)
        run.optimizer.step = step
    return [train_step(run).losses["lm loss"] for _ in range(2)]


def test_run_goes_on_as_if_only_the_step_were_missing(ranks) -> None:
    """Data, weights and dropout's random numbers equal those of a run that only skipped the step."""
    assert ranks(4).run(losses_after_a_bad_iteration, True) == ranks(4).run(losses_after_a_bad_iteration, False)


RECOMPUTED = {
    "uniform": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    "moe": "--recompute-granularity selective --recompute-modules moe",
}
PREDICTIONS = "--mtp-num-layers 1 --position-embedding-type rope"
SEARCHED = {
    "--balance-policy top2": ["uniform", "moe"],
    f"--balance-policy top2 --moe-comm-chunks 2 {PREDICTIONS}": ["uniform"],
    "--balance-policy top2 --num-layers 4 --pipeline-model-parallel-size 2": ["block"],
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1": ["uniform", "moe"],
}
"""Flags, and what is recomputed with them."""


def curve_after_a_bad_iteration(flags: str) -> Curve:
    """Return losses and gradient norms of iterations 4 to 7, after one in which the guard searched for a fault."""
    run = build(f"--expert-model-parallel-size 2 --global-batch-size 16 {flags}")
    for _ in range(2):
        train_step(run)
    repair = on_rank(1, expert_output)(run)
    assert train_step(run).fault is not None
    repair()
    return curve_of([train_step(run) for _ in range(4)])


@pytest.mark.slow
@pytest.mark.parametrize("flags", SEARCHED)
def test_recomputation_does_not_repeat_the_passes_of_a_search(ranks, flags: str) -> None:
    world_size = 4 if "pipeline" in flags else 2
    expected = ranks(world_size).run(curve_after_a_bad_iteration, flags)
    for what in SEARCHED[flags]:
        assert ranks(world_size).run(curve_after_a_bad_iteration, f"{flags} {RECOMPUTED[what]}") == expected, what


def repeated_losses(flags: str) -> list[list[float]]:
    """Return the losses of a bad iteration's microbatches, in the iteration itself and in the search's repetition."""
    run = build(f"{flags} --attention-dropout 0.1 --hidden-dropout 0.1")
    train_step(run)
    on_rank(1, dense_gradient)(run)
    seen: list[list[float]] = []
    forward_backward = loop._forward_backward

    def recorded(*args: Any, **kwargs: Any) -> Any:
        reports = forward_backward(*args, **kwargs)
        seen.append([report["lm loss"][0].item() for report in reports])
        return reports

    with mock.patch.object(loop, "_forward_backward", recorded):
        assert train_step(run).fault is not None
    return seen


@pytest.mark.parametrize(
    "flags", [pytest.param(OVERLAP, marks=pytest.mark.slow), INTERLEAVED], ids=["overlap", "interleaved"]
)
def test_search_repeats_the_iteration_exactly(ranks, flags: str) -> None:
    outcomes = ranks(4).run(repeated_losses, flags)
    for first, second in outcomes:
        assert first == second
    assert len(outcomes[-1][0]) > 0


def poisoned_training(good_after: int) -> dict[str, Any]:
    """Run `train` with a fault from the second iteration that lasts for `good_after` iterations."""
    run = build(f"{EP4} --train-iters 6 --log-interval 1 --max-consecutive-bad-iterations 3")
    repairs: list[Callable[[], object]] = []

    def after_step(report: loop.StepReport) -> None:
        if report.iteration == 1:
            repairs.append(on_rank(2, one_weight)(run))
        if report.iteration == 1 + good_after:
            repairs.pop()()

    error = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            train(run, RunLog(run.config, 6, run.vocab_size), after_step=after_step)
        except PoisonedRun as caught:
            error = str(caught)
    return {"error": error, "iteration": run.progress.iteration, "printed": printed.getvalue().splitlines()}


def test_three_bad_iterations_in_a_row_end_the_run_on_every_rank(ranks) -> None:
    outcomes = ranks(4).run(poisoned_training, 3)
    for outcome in outcomes:
        assert outcome["iteration"] == 4
        assert "--max-consecutive-bad-iterations 3" in outcome["error"]
        assert FAULTS["weight"][3] in outcome["error"]
    assert [outcome["printed"] == [] for outcome in outcomes] == [True, True, True, False]


def test_two_bad_iterations_in_a_row_do_not(ranks) -> None:
    outcomes = ranks(4).run(poisoned_training, 2)
    assert [(outcome["error"], outcome["iteration"]) for outcome in outcomes] == [(None, 6)] * 4
    lines = outcomes[-1]["printed"]
    bad = [line.split(" |")[0][-14:-8].strip() for line in lines if "number of nan iterations:   1 |" in line]
    assert bad == ["2/", "3/"]
    assert sum("its step is skipped" in line for line in lines) == 2
    assert sum(FAULTS["weight"][3] in line for line in lines) == 2
    assert not any("lm loss: NAN" in line for line in lines)


def unguarded_iteration() -> tuple[str | None, bool, bool]:
    run = build(f"{OVERLAP} --no-check-for-nan-in-loss-and-grad")
    on_rank(1, loss_mask)(run)
    report = train_step(run)
    run.model[0].start_param_sync(force_sync=True)
    finite = all(torch.isfinite(parameter).all() for parameter in run.model[0].parameters())
    return report.fault, report.skipped, finite


def test_guard_can_be_switched_off(ranks) -> None:
    assert ranks(4).run(unguarded_iteration) == [(None, False, False)] * 4


def half_precision(sabotage: Sabotage) -> tuple[str | None, bool, set[float]]:
    """Return the report of an iteration, and the loss scales of the optimizer's parts after it."""
    run = build(f"{EP4} --fp16 --initial-loss-scale 1024 --hysteresis 1")
    on_rank(1, sabotage)(run)
    report = train_step(run)
    whole: Any = run.optimizer
    return report.fault, report.skipped, {float(part.get_loss_scale()) for part in whole.chained_optimizers}


def test_with_fp16_infinite_gradients_are_left_to_the_loss_scaler(ranks) -> None:
    assert ranks(4).run(half_precision, dense_gradient) == [(None, True, {512.0})] * 4
    outcomes = ranks(4).run(half_precision, loss_mask)
    assert all("the loss of microbatch 0 is NaN" in fault for fault, _, _ in outcomes)
    assert all(scales == {1024.0} for _, _, scales in outcomes)
