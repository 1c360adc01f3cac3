"""Batch size, learning rate and weight decay during a run, with megatron-core's schedulers."""

from dataclasses import dataclass
from typing import Any

from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator, NumMicroBatchesCalculator
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_balance.config.run_config import RunConfig, TrainConfig


def build_batch_schedule(train: TrainConfig, data_parallel_size: int) -> NumMicroBatchesCalculator:
    """Build the calculator of microbatches from consumed samples; ValueError if the ramp's batches do not divide."""
    if train.rampup_batch_size is None:
        # rank=1: the calculator would log on rank 0, but the log line shows the batch size anyway
        return ConstantNumMicroBatchesCalculator(
            train.global_batch_size, train.micro_batch_size, data_parallel_size, False, rank=1
        )
    start, increment, samples = train.rampup_batch_size
    step = train.micro_batch_size * data_parallel_size
    span = train.global_batch_size - start
    if min(start, increment, samples, span) < 1 or start % step or increment % step or span % increment:
        must = f"START and INCREMENT must be multiples of {step}, the samples of a microbatch of all ranks"
        end = f"lead to --global-batch-size {train.global_batch_size}"
        raise ValueError(f"--rampup-batch-size {start} {increment} {samples}: {must}, and {end}")
    return RampingBatches(train, data_parallel_size)


class RampingBatches(NumMicroBatchesCalculator):
    """Global batches that grow from START by INCREMENT, with an equal share of SAMPLES for each size.

    megatron-core 0.19 has only tables of thresholds.
    """

    def __init__(self, train: TrainConfig, data_parallel_size: int) -> None:
        super().__init__()
        assert train.rampup_batch_size is not None
        self.start, self.increment, self.samples = train.rampup_batch_size
        self.increments = (train.global_batch_size - self.start) // self.increment
        self.micro_batch_size = train.micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.update(0)

    def update(self, consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
        """Set the size of the batch that follows `consumed_samples`."""
        size = self.start + self._increments(consumed_samples) * self.increment
        self.current_global_batch_size = self.current_running_global_batch_size = size
        self.num_micro_batches = size // (self.micro_batch_size * self.data_parallel_size)

    def grows_at(self, consumed_samples: int) -> int | None:
        """Return the next number of consumed samples at which the batch grows; None if it does not grow any more."""
        done = self._increments(consumed_samples)
        return None if done == self.increments else -(-(done + 1) * self.samples // self.increments)

    def _increments(self, consumed_samples: int) -> int:
        return min(self.increments, consumed_samples * self.increments // self.samples)


@dataclass(frozen=True)
class Length:
    """Length of a run."""

    iterations: int
    samples: int


def run_length(train: TrainConfig, data_parallel_size: int) -> Length:
    """Return the number of whole global batches of the run, and of their samples; ValueError if there is none."""
    batches = build_batch_schedule(train, data_parallel_size)
    iterations = samples = 0
    while True:
        batches.update(samples, consistency_check=False)
        batch = batches.get_current_running_global_batch_size()
        # Count all iterations with this batch size at once, because counting one by one may take too long
        limits = [] if train.train_iters is None else [train.train_iters - iterations]
        if train.train_samples is not None:
            limits.append((train.train_samples - samples) // batch)
        if isinstance(batches, RampingBatches) and (grows_at := batches.grows_at(samples)) is not None:
            limits.append(-(-(grows_at - samples) // batch))
        if not (count := min(limits)):
            break
        iterations += count
        samples += count * batch
    if not iterations:
        raise ValueError(f"--train-samples {train.train_samples}: give at least one global batch, {batch}")
    return Length(iterations, samples)


def build_param_scheduler(config: RunConfig, optimizer: MegatronOptimizer, length: Length) -> OptimizerParamScheduler:
    """Build the schedule of learning rate and weight decay; see `scheduler_settings` for errors."""
    return OptimizerParamScheduler(optimizer, **scheduler_settings(config, length))


def scheduler_settings(config: RunConfig, length: Length) -> dict[str, Any]:
    """Return the settings of megatron-core's scheduler, whose steps are samples; ValueError if they contradict."""
    scheduler = config.scheduler
    batch = config.train.global_batch_size
    total = config.train.train_samples or length.samples
    decay = scheduler.lr_decay_samples or (scheduler.lr_decay_iters or 0) * batch or total
    warmup = scheduler.lr_warmup_samples or scheduler.lr_warmup_iters * batch
    if scheduler.lr_warmup_fraction is not None:
        warmup = int(scheduler.lr_warmup_fraction * decay)
    weight_decay = config.optimizer.weight_decay
    start_wd = weight_decay if scheduler.start_weight_decay is None else scheduler.start_weight_decay
    end_wd = weight_decay if scheduler.end_weight_decay is None else scheduler.end_weight_decay
    rate = config.optimizer.lr
    floor = config.optimizer.min_lr
    assert rate is not None and floor is not None, "--lr is required, and --min-lr has a default"
    if warmup >= decay:
        problem = f"a warmup of {warmup} samples must be shorter than the decay of {decay}"
        raise ValueError(f"--lr-warmup-iters, -samples or -fraction: {problem}; shorten it, or set --lr-decay-iters")
    if not 0 <= floor <= rate:
        raise ValueError(f"--min-lr {floor}: choose 0 to --lr {rate}")
    if scheduler.lr_warmup_init > rate:
        raise ValueError(f"--lr-warmup-init {scheduler.lr_warmup_init}: choose at most --lr {rate}")
    annealing = scheduler.lr_wsd_decay_samples or (scheduler.lr_wsd_decay_iters or 0) * batch
    if scheduler.lr_decay_style == "WSD" and not annealing:
        raise ValueError("--lr-decay-style WSD: also give --lr-wsd-decay-iters or --lr-wsd-decay-samples")
    if scheduler.lr_decay_style == "WSD" and annealing > decay - warmup:
        problem = f"{annealing} samples are more than the {decay - warmup} that follow the warmup; give at most as many"
        raise ValueError(f"--lr-wsd-decay-iters or -samples: {problem}")
    if scheduler.override_opt_param_scheduler and scheduler.use_checkpoint_opt_param_scheduler:
        both = "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler"
        raise ValueError(f"{both}: a resumed run's schedule comes from the flags or from the checkpoint; choose one")
    if not 0 <= start_wd <= end_wd:
        raise ValueError(f"--start-weight-decay {start_wd}: choose 0 to --end-weight-decay {end_wd}")
    if scheduler.weight_decay_incr_style == "constant" and start_wd != end_wd:
        ends = f"--start-weight-decay {start_wd} to --end-weight-decay {end_wd}"
        raise ValueError(f"--weight-decay-incr-style constant: does not lead from {ends}; use linear or cosine")
    return {
        "init_lr": scheduler.lr_warmup_init,
        "max_lr": config.optimizer.lr,
        "min_lr": config.optimizer.min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": scheduler.lr_decay_style,
        "start_wd": start_wd,
        "end_wd": end_wd,
        "wd_incr_steps": total,
        "wd_incr_style": scheduler.weight_decay_incr_style,
        "use_checkpoint_opt_param_scheduler": scheduler.use_checkpoint_opt_param_scheduler,
        "override_opt_param_scheduler": scheduler.override_opt_param_scheduler,
        "wsd_decay_steps": annealing or None,
        "lr_wsd_decay_style": scheduler.lr_wsd_decay_style,
    }
