"""training/schedule.py: the length of a run, its batch sizes, learning rate and weight decay."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_balance.config.run_config import SchedulerConfig, TrainConfig
from megatron_balance.training.schedule import Length, build_batch_schedule, build_param_scheduler, run_length

PEAK = 1.0
FLOOR = 0.1
DECAY = 0.05


def model_batch_sizes(train: TrainConfig) -> list[int]:
    """Return every iteration's batch size by the definition of the ramp: equal shares of its samples for each size."""
    final = train.global_batch_size
    ramp = train.rampup_batch_size
    sizes: list[int] = []
    while train.train_iters is None or len(sizes) < train.train_iters:
        consumed = sum(sizes)
        size = final
        if ramp is not None:
            start, increment, samples = ramp
            steps = (final - start) // increment
            size = min(final, start + consumed * steps // samples * increment)
        if train.train_samples is not None and consumed + size > train.train_samples:
            break
        sizes.append(size)
    return sizes


@st.composite
def trainings(draw: st.DrawFn) -> tuple[TrainConfig, int]:
    """Draw a training of a few dozen iterations and its data-parallel size."""
    micro = draw(st.integers(1, 3))
    ranks = draw(st.integers(1, 4))
    step = micro * ranks
    ramp = None
    batch = step * draw(st.integers(1, 6))
    if draw(st.booleans()):
        start = step * draw(st.integers(1, 3))
        increment = step * draw(st.integers(1, 2))
        batch = start + increment * draw(st.integers(1, 4))
        # Whole shares keep the ramp's thresholds exact
        ramp = [start, increment, (batch - start) // increment * draw(st.integers(1, 40))]
    by_samples = draw(st.booleans())
    train = TrainConfig(
        micro_batch_size=micro,
        global_batch_size=batch,
        rampup_batch_size=ramp,
        train_iters=None if by_samples else draw(st.integers(1, 40)),
        train_samples=draw(st.integers(batch, 40 * batch)) if by_samples else None,
    )
    return train, ranks


@given(trainings())
def test_length_and_batch_sizes_are_those_of_the_model(training: tuple[TrainConfig, int]) -> None:
    train, ranks = training
    sizes = model_batch_sizes(train)
    assert run_length(train, ranks) == Length(len(sizes), sum(sizes))
    batches = build_batch_schedule(train, ranks)
    consumed = 0
    for size in sizes:
        batches.update(consumed, consistency_check=True)
        assert batches.get_current_running_global_batch_size() == size
        assert batches.get() * train.micro_batch_size * ranks == size
        consumed += size


@pytest.mark.parametrize(
    ("train_iters", "train_samples", "ramp", "expected"),
    [
        (None, 87, None, Length(10, 80)),
        (None, 7, [4, 4, 8], Length(1, 4)),
        # Too many to count one by one
        (10**15, None, None, Length(10**15, 8 * 10**15)),
        (10**15, None, [4, 4, 8 * 10**12], Length(10**15, 8 * 10**15 - 8 * 10**12)),
    ],
)
def test_run_length_examples(
    train_iters: int | None, train_samples: int | None, ramp: list[int] | None, expected: Length
) -> None:
    length = {"train_iters": train_iters, "train_samples": train_samples}
    train = TrainConfig(micro_batch_size=2, global_batch_size=8, rampup_batch_size=ramp, **length)
    assert run_length(train, data_parallel_size=2) == expected


def test_less_than_one_batch() -> None:
    with pytest.raises(ValueError, match="--train-samples 7: give at least one global batch, 8"):
        run_length(TrainConfig(micro_batch_size=2, global_batch_size=8, train_samples=7), data_parallel_size=2)


@pytest.mark.parametrize(
    "ramp",
    [[2, 2, 10], [4, 2, 10], [4, 8, 10], [8, 4, 10], [12, 4, 10], [0, 4, 10], [4, 0, 10], [4, 4, 0], [4, -4, 10]],
    ids=["start", "increment", "step over", "no span", "downwards", "zero start", "zero step", "at once", "negative"],
)
def test_impossible_ramps(ramp: list[int]) -> None:
    train = TrainConfig(micro_batch_size=2, global_batch_size=8, rampup_batch_size=ramp, train_iters=1)
    with pytest.raises(
        ValueError, match=rf"--rampup-batch-size {ramp[0]} {ramp[1]} {ramp[2]}: .*multiples of 4, .*size 8"
    ):
        build_batch_schedule(train, data_parallel_size=2)


def scheduler(
    iterations: int = 10, train_samples: int | None = None, min_lr: float = FLOOR, **settings: object
) -> OptimizerParamScheduler:
    """Return the schedule of a run with global batches of 4 samples."""
    train = TrainConfig(
        micro_batch_size=2,
        global_batch_size=4,
        train_iters=None if train_samples else iterations,
        train_samples=train_samples,
    )
    config = SimpleNamespace(
        train=train,
        scheduler=dataclasses.replace(SchedulerConfig(), **settings),
        optimizer=SimpleNamespace(lr=PEAK, min_lr=min_lr, weight_decay=DECAY),
    )
    optimizer = SimpleNamespace(param_groups=[{"default_config": True}])
    return build_param_scheduler(config, optimizer, run_length(train, data_parallel_size=1))


def values(schedule: OptimizerParamScheduler, iterations: int, name: str) -> list[float]:
    """Return a parameter group's value before each iteration."""
    found = []
    for _ in range(iterations + 1):
        found.append(schedule.optimizer.param_groups[0][name])
        schedule.step(4)
    return found


def shape(style: str, share: float) -> float:
    """Return how much of the decay is left after a share of it."""
    return 1 - share if style == "linear" else (1 + math.cos(math.pi * share)) / 2


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize(
    ("settings", "warmup", "decay"),
    [
        ({}, 0, 10),
        ({"lr_warmup_iters": 2}, 2, 10),
        ({"lr_warmup_samples": 8}, 2, 10),
        ({"lr_warmup_fraction": 0.2}, 2, 10),
        ({"lr_decay_iters": 5}, 0, 5),
        ({"lr_decay_samples": 20, "lr_warmup_iters": 1}, 1, 5),
        ({"lr_decay_iters": 20, "lr_warmup_fraction": 0.1}, 2, 20),
    ],
    ids=str,
)
def test_learning_rate(style: str, settings: dict, warmup: int, decay: int) -> None:
    rates = values(scheduler(lr_decay_style=style, **settings), 10, "lr")
    rising = [PEAK * iteration / warmup for iteration in range(warmup)]
    shares = [min(1.0, (iteration - warmup) / (decay - warmup)) for iteration in range(warmup, 11)]
    assert rates == pytest.approx(rising + [FLOOR + (PEAK - FLOOR) * shape(style, share) for share in shares])


WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_decay_style": "constant", "lr_warmup_iters": 2, "lr_warmup_init": 0.5}, [0.5, 0.75] + [PEAK] * 9),
        (WSD | {"lr_wsd_decay_iters": 2}, [PEAK] * 9 + [0.55, FLOOR]),
        (WSD | {"lr_wsd_decay_samples": 8}, [PEAK] * 9 + [0.55, FLOOR]),
        ({"train_samples": 42}, [PEAK - (PEAK - FLOOR) * 4 * iteration / 42 for iteration in range(11)]),
    ],
    ids=str,
)
def test_other_learning_rates(settings: dict, expected: list[float]) -> None:
    assert values(scheduler(**settings), 10, "lr") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"override_opt_param_scheduler": True}, PEAK), ({"use_checkpoint_opt_param_scheduler": True}, 2 * PEAK)],
    ids=str,
)
def test_a_resumed_schedule_comes_from_the_side_asked_for(settings: dict, expected: float) -> None:
    saved = scheduler().state_dict() | {"max_lr": 2 * PEAK}
    resumed = scheduler(**settings)
    resumed.load_state_dict(saved)
    assert resumed.max_lr == expected
    with pytest.raises(AssertionError, match="do not match"):
        scheduler().load_state_dict(saved)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [DECAY] * 5),
        (
            {"start_weight_decay": 0.0, "end_weight_decay": 0.4, "weight_decay_incr_style": "linear"},
            [0, 0.1, 0.2, 0.3, 0.4],
        ),
        ({"start_weight_decay": 0.2, "end_weight_decay": 0.2}, [0.2] * 5),
    ],
    ids=["constant", "linear", "given"],
)
def test_weight_decay(settings: dict, expected: list[float]) -> None:
    assert values(scheduler(4, **settings), 4, "weight_decay") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr_warmup_iters": 10}, "--lr-warmup-iters.* 40 .*shorter than the decay of 40; .*--lr-decay-iters"),
        ({"lr_warmup_fraction": 1.0}, "-fraction.*shorter than the decay"),
        ({"lr_warmup_iters": 5, "lr_decay_iters": 5}, "--lr-warmup-iters.*shorter than the decay of 20"),
        ({"lr_warmup_init": 2.0}, "--lr-warmup-init 2.0: choose at most --lr 1.0"),
        ({"lr_decay_style": "WSD"}, "--lr-decay-style WSD: also give --lr-wsd-decay-iters or --lr-wsd-decay-samples"),
        (WSD | {"lr_warmup_iters": 2, "lr_wsd_decay_iters": 9}, "--lr-wsd-.*: 36 samples are more than the 32 that"),
        (
            {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True},
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler: .* choose one",
        ),
        ({"start_weight_decay": 0.1}, "--start-weight-decay 0.1: choose 0 to --end-weight-decay 0.05"),
        ({"end_weight_decay": 0.1}, "--weight-decay-incr-style constant: .*use linear or cosine"),
        ({"min_lr": -1.0}, "--min-lr -1.0: choose 0 to --lr 1.0"),
        ({"min_lr": 2.0}, "--min-lr 2.0: choose 0 to --lr 1.0"),
    ],
    ids=str,
)
def test_contradictions(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scheduler(**settings)
