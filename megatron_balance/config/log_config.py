"""What a run prints, records and profiles, as frozen dataclasses. A field's docstring is its `--help`."""

from dataclasses import dataclass, field
from typing import Literal

from megatron_balance.config.flags import flag_field


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What a run prints and records."""

    log_interval: int = 100
    """Number of iterations between log lines."""

    log_throughput: bool = False
    """Add the throughput in TFLOP/s per GPU to the log line."""

    log_progress: bool = False
    """Add a line to progress.txt in --save when the job starts and after each checkpoint: iteration, throughput,
    floating-point operations and tokens."""

    log_params_norm: bool = False
    """Log the norm of all parameters."""

    log_memory_interval: int | None = None
    """Number of iterations between reports of each rank's memory, a multiple of --log-interval. Default: only after
    the first iteration and at the next log line."""

    log_device_memory_used: bool = False
    """Add the memory of the device that is in use, by all processes, to reports of memory."""

    logging_level: int | None = None
    """Level of Python's loggers, such as 20 for INFO, and their messages on standard output. Default: warnings
    only."""

    timing_log_level: Literal[0, 1, 2] = 0
    """What to time besides whole iterations. 0: nothing. 1: steps that happen about once per iteration. 2: also those
    of each microbatch. To take a time, the host waits for the device and, at level 1, for all ranks."""

    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    """Ranks whose times --timing-log-level logs. max: the slowest. minmax: the fastest and the slowest. all: all."""

    log_tokens_per_expert: bool = False
    """After training, print how many tokens each expert of each MoE layer computed in the last iteration."""

    moe_routing_trace_path: str | None = flag_field(None, metavar="DIR")
    """Directory for the experts chosen by every token, as JSON lines, one file per rank."""

    tensorboard_dir: str | None = None
    """Directory for TensorBoard events."""

    tensorboard_log_interval: int = 1
    """Number of iterations between TensorBoard points."""

    tensorboard_queue_size: int = 1000
    """Number of TensorBoard events that are kept in memory before they are written."""

    log_loss_scale_to_tensorboard: bool = True
    """Do not write the loss scale to TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = False
    """Write the validation perplexity to TensorBoard."""

    log_world_size_to_tensorboard: bool = False
    """Write the number of processes to TensorBoard."""

    log_timers_to_tensorboard: bool = False
    """Write the times of --timing-log-level to TensorBoard, those of the slowest rank."""

    log_memory_to_tensorboard: bool = False
    """Write the memory of the last rank to TensorBoard."""

    wandb_project: str | None = None
    """Project in Weights & Biases that gets the numbers that TensorBoard gets."""

    wandb_exp_name: str | None = None
    """Name of the run in Weights & Biases. Default: chosen there."""

    wandb_save_dir: str | None = None
    """Directory for the local files of Weights & Biases. Default: wandb in --save."""

    wandb_entity: str | None = None
    """User or team that owns --wandb-project. Default: that of the login."""

    @property
    def record_interval(self) -> int | None:
        """Number of iterations between points in TensorBoard or Weights & Biases; None: neither is in use."""
        used = self.tensorboard_dir is not None or self.wandb_project is not None
        return self.tensorboard_log_interval if used else None


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Which iterations of which ranks are profiled, and by what."""

    profile: bool = False
    """Profile some iterations. On CUDA, start and stop the profiler that the process runs under, such as nsys profile
    --capture-range=cudaProfilerApi, and mark operators with NVTX ranges."""

    use_pytorch_profiler: bool = False
    """With --profile, use PyTorch's profiler, which writes a trace to --tensorboard-dir for each rank."""

    profile_step_start: int = 10
    """First iteration of the trace of --use-pytorch-profiler; without it, the last iteration before profiling."""

    profile_step_end: int = 12
    """First iteration after the trace of --use-pytorch-profiler; without it, the last iteration to profile."""

    profile_ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks to profile."""

    record_memory_history: bool = False
    """Record allocations of device memory, and write those of the last rank to --memory-snapshot-path with each log
    line; a rank that runs out of memory writes its own to oom_rank-RANK_NAME in the same directory."""

    memory_snapshot_path: str = "snapshot.pickle"
    """File that --record-memory-history writes, for https://pytorch.org/memory_viz."""
