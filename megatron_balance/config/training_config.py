"""Settings of a training run apart from the model, as frozen dataclasses. A field's docstring is its `--help`."""

import enum
import signal
from dataclasses import dataclass, field
from typing import Literal

from megatron_balance.config.flags import enum_member, flag_field

TOKENIZERS = (
    *("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer"),
    *("GPT2BPETokenizer", "TikTokenizer", "NullTokenizer"),
)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Text <-> token ids, by megatron.core.tokenizers."""

    tokenizer_type: str | None = flag_field(None, choices=TOKENIZERS)
    """Kind of tokenizer; --vocab-file with --merge-file implies GPT2BPETokenizer."""

    tokenizer_model: str | None = flag_field(None, metavar="PATH")
    """Path of the SentencePiece model, the tiktoken file or the Hugging Face directory."""

    tokenizer_metadata: str | None = flag_field(None, metavar="FILE")
    """JSON file of tokenizer metadata. Default: derived from --tokenizer-type."""

    tokenizer_special_tokens: list[str] | None = flag_field(None, metavar="TOKEN")
    """Extra special tokens."""

    tokenizer_sentencepiece_legacy: bool = False
    """Use SentencePiece's legacy mode, which allows extra special tokens."""

    tokenizer_hf_use_fast: bool = False
    """Use the fast Hugging Face tokenizer."""

    tokenizer_hf_include_special_tokens: bool = False
    """Include the Hugging Face tokenizer's special tokens when encoding."""

    trust_remote_code: bool = False
    """Allow a Hugging Face tokenizer to run its own code."""

    tiktoken_pattern: str | None = flag_field(None, metavar="{v1,v2}")
    """Regular expression by which the tiktoken tokenizer splits text."""

    tiktoken_num_special_tokens: int = 1000
    """Number of special tokens in the tiktoken tokenizer."""

    vocab_file: str | None = None
    """Vocabulary file (GPT2BPETokenizer)."""

    merge_file: str | None = None
    """BPE merges file (GPT2BPETokenizer)."""

    vocab_size: int | None = None
    """Vocabulary size before padding (NullTokenizer, TikTokenizer); with other tokenizers, the minimum number of
    embeddings, for models whose embedding table is larger than their tokenizer's vocabulary."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Sources of samples and how they are read."""

    data_path: list[str] | None = flag_field(None, type=str, nargs="*", metavar="PREFIX")
    """Blend of data sets, divided by --split: one prefix, several prefixes, or `weight prefix weight prefix ...`."""

    train_data_path: list[str] | None = flag_field(None, type=str, nargs="*", metavar="PREFIX")
    """Blend for training only, written like --data-path."""

    valid_data_path: list[str] | None = flag_field(None, type=str, nargs="*", metavar="PREFIX")
    """Blend for validation only, written like --data-path."""

    test_data_path: list[str] | None = flag_field(None, type=str, nargs="*", metavar="PREFIX")
    """Blend for testing only, written like --data-path."""

    split: str | None = flag_field(None, metavar="SIZES")
    """Relative sizes of the training, validation and test sets, such as 969,30,1."""

    data_cache_path: str | None = flag_field(None, metavar="DIR")
    """Directory for the sample index caches. Default: next to the data."""

    mock_data: bool = False
    """Train on synthetic samples instead of --data-path."""

    num_workers: int = 2
    """Number of data loader worker processes per rank."""

    data_args_path: str | None = None
    """File with the words of --data-path, for blends that are too long for a command line."""

    per_split_data_args_path: str | None = None
    """JSON file with the blends of --train-data-path, --valid-data-path and --test-data-path under the keys train,
    valid and test, each a list or a text."""

    eod_mask_loss: bool = False
    """Exclude end-of-document tokens from the loss."""

    num_dataset_builder_threads: int = 1
    """Number of threads that build the data sets of a blend."""

    mid_level_dataset_surplus: float = flag_field(0.005, metavar="FRACTION")
    """Fraction of extra samples that each data set of a blend prepares."""

    mmap_bin_files: bool = flag_field(True, arg_names=["--no-mmap-bin-files"])
    """Read .bin files instead of mapping them into memory."""

    dataloader_fast_cache_load: bool = False
    """Assume that --data-cache-path contains every index, and load the indices without checking the data."""

    dataloader_defer_npy_index_mmap: bool = False
    """Map each index of --data-cache-path into memory only when one of its samples is read."""

    allow_ambiguous_pad_tokens: bool = False
    """Keep the loss on pad tokens that cannot be distinguished from real tokens, instead of masking them."""

    reset_position_ids: bool = False
    """Restart position ids after each end-of-document token."""

    reset_attention_mask: bool = False
    """Let tokens attend to their own document only; a document ends with an end-of-document token."""

    dataloader_inter_document_masking: bool = False
    """Let tokens attend to their own document of the data file only, and restart position ids there. This needs
    megatron-core 0.19 or newer."""

    sft: bool = False
    """Train on conversations: the files of --data-path are JSON lines with the key messages, and only tokens of the
    assistant have loss. Conversations share samples, in which tokens attend to their own conversation only."""

    @property
    def documents_apart(self) -> bool:
        """Whether tokens attend to their own document only; then all pipeline stages read samples."""
        return self.reset_attention_mask or self.dataloader_inter_document_masking or self.sft


def _signal(text: str) -> enum.Enum:
    names = {str(member.value): name for name, member in signal.Signals.__members__.items()}
    return enum_member(signal.Signals, names.get(text, text.upper()))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run, batch sizes, stopping, evaluation and the seed."""

    micro_batch_size: int = flag_field(None)
    """Number of samples per rank and forward pass."""

    global_batch_size: int = flag_field(None)
    """Number of samples per iteration. Default: --micro-batch-size times the data-parallel size."""

    rampup_batch_size: list[int] | None = flag_field(None, type=int, nargs=3, metavar=("START", "INCREMENT", "SAMPLES"))
    """Grow the global batch size from START by INCREMENT over SAMPLES samples."""

    train_iters: int | None = None
    """Number of iterations to train for."""

    train_samples: int | None = None
    """Number of samples to train for, instead of --train-iters."""

    exit_interval: int | None = None
    """Save and stop after an iteration whose number is divisible by this."""

    exit_duration_in_mins: int | None = None
    """Save and stop after this many minutes."""

    exit_signal_handler: bool = False
    """Save and stop with exit status 0 when --exit-signal arrives."""

    exit_signal: signal.Signals = flag_field(signal.SIGTERM, type=_signal, nargs=None, choices=None, metavar="SIGNAL")
    """Signal that --exit-signal-handler waits for, by name or number."""

    check_for_spiky_loss: bool = False
    """Report losses far above those of the preceding iterations."""

    max_consecutive_bad_iterations: int = 3
    """Exit after this many consecutive iterations whose loss or gradient was NaN or infinite."""

    manual_gc: bool = False
    """Collect Python's garbage only at the start, every --manual-gc-interval iterations and around evaluations, on all
    ranks at once."""

    manual_gc_interval: int = 0
    """Number of iterations between garbage collections with --manual-gc; 0: none."""

    manual_gc_eval: bool = True
    """With --manual-gc, do not collect garbage before and after each evaluation."""

    eval_interval: int | None = None
    """Number of iterations between validations. Default: no validation."""

    eval_iters: int = 100
    """Number of iterations per validation."""

    seed: int = 1234
    """Seed for Python, NumPy, PyTorch and the order of the data."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a run saves, how often, and where it resumes from."""

    save: str | None = None
    """Directory that checkpoints are written to."""

    save_interval: int | None = flag_field(None, arg_names=["--save-interval", "--persistent-save-interval"])
    """Number of iterations between checkpoints. Default: save only when training ends."""

    keep_last: int | None = None
    """Delete all but the newest N checkpoints after each save."""

    save_retain_interval: int | None = None
    """After each save, delete all checkpoints except the newest and those at iterations divisible by this."""

    async_save: bool = False
    """Write checkpoints in the background while training continues."""

    ckpt_format: Literal["torch_dist"] = "torch_dist"
    """Format of the checkpoints."""

    ckpt_fully_parallel_save: bool = flag_field(
        True, arg_names=["--no-ckpt-fully-parallel-save", "--disable-ckpt-fully-parallel-save"]
    )
    """Let one data-parallel rank write the state that all of them hold, instead of a part each."""

    ckpt_fully_parallel_load: bool = False
    """Let each data-parallel rank read a part of the state and exchange it with the others, instead of reading all."""

    no_save_optim: bool = False
    """Do not save the optimizer's state."""

    no_save_rng: bool = False
    """Do not save the random number generators' state."""

    load: str | None = None
    """Directory of checkpoints to resume from; if it contains none, start a new run, with a warning."""

    ckpt_step: int | None = None
    """Iteration to resume from. Default: the newest checkpoint."""

    pretrained_checkpoint: str | None = None
    """Directory of checkpoints to start from, as with --finetune, if --load contains none."""

    finetune: bool = False
    """Load only the weights, and start at iteration 0."""

    no_load_optim: bool = False
    """Do not load the optimizer's state, and start the schedule of the learning rate afresh."""

    no_load_rng: bool = False
    """Do not load the random number generators' state."""

    use_checkpoint_args: bool = False
    """Take the model's shape and the tokenizer from the checkpoint's flags; the command line overrides them."""

    exit_on_missing_checkpoint: bool = False
    """Exit with status 1 if --load contains no checkpoint."""


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Learning rate and weight decay over time, by megatron.core.optimizer_param_scheduler."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Decay function of the learning rate."""

    lr_decay_iters: int | None = None
    """Number of iterations over which the learning rate decays. Default: --train-iters."""

    lr_decay_samples: int | None = None
    """Number of samples over which the learning rate decays. Default: --train-samples."""

    lr_warmup_iters: int = 0
    """Number of iterations of linear warmup."""

    lr_warmup_samples: int = 0
    """Number of samples of linear warmup."""

    lr_warmup_fraction: float | None = None
    """Warmup as a fraction of the decay length, instead of --lr-warmup-iters."""

    lr_warmup_init: float = flag_field(0.0, metavar="RATE")
    """Learning rate at the start of the warmup."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Decay function of WSD's annealing phase."""

    lr_wsd_decay_iters: int | None = None
    """Number of iterations of WSD's annealing phase."""

    lr_wsd_decay_samples: int | None = None
    """Number of samples of WSD's annealing phase."""

    start_weight_decay: float | None = None
    """Weight decay at the start. Default: --weight-decay."""

    end_weight_decay: float | None = None
    """Weight decay at the end. Default: --weight-decay."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Function by which weight decay changes from its start to its end value."""

    override_opt_param_scheduler: bool = flag_field(
        False, arg_names=["--override-opt_param-scheduler", "--override-opt-param-scheduler"]
    )
    """When resuming, take the schedule from the flags instead of the checkpoint."""

    use_checkpoint_opt_param_scheduler: bool = flag_field(
        False, arg_names=["--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"]
    )
    """When resuming, take the schedule from the checkpoint instead of the flags."""


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
