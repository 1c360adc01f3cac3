"""Settings of a training run around the model, as frozen dataclasses. A field's docstring is its `--help`."""

import enum
import signal
from dataclasses import dataclass
from typing import Literal

from megatron_balance.config.flags import enum_member, flag_field


@dataclass(frozen=True)
class TokenizerConfig:
    """Text <-> token ids, by megatron.core.tokenizers."""

    tokenizer_type: (
        Literal[
            "GPTSentencePieceTokenizer",
            "SentencePieceTokenizer",
            "Llama2Tokenizer",
            "HuggingFaceTokenizer",
            "GPT2BPETokenizer",
            "TikTokenizer",
            "NullTokenizer",
        ]
        | None
    ) = None
    """Tokenizer."""

    tokenizer_model: str | None = None
    """SentencePiece model, tiktoken file, or Hugging Face directory."""

    tokenizer_metadata: str | None = None
    """Tokenizer metadata JSON; default: derived from --tokenizer-type."""

    tokenizer_special_tokens: list[str] | None = None
    """Extra special tokens."""

    tokenizer_sentencepiece_legacy: bool = False
    """SentencePiece legacy mode, which allows extra special tokens."""

    tokenizer_hf_use_fast: bool = False
    """Use the fast Hugging Face tokenizer."""

    tokenizer_hf_include_special_tokens: bool = False
    """Include the Hugging Face tokenizer's special tokens when encoding."""

    trust_remote_code: bool = False
    """Let a Hugging Face tokenizer run code of its own."""

    tiktoken_pattern: str | None = None
    """Regular expression of the tiktoken tokenizer: v1 or v2."""

    tiktoken_num_special_tokens: int = 1000
    """Special tokens in the tiktoken tokenizer."""

    vocab_file: str | None = None
    """Vocabulary file (GPT2BPETokenizer)."""

    merge_file: str | None = None
    """BPE merges file (GPT2BPETokenizer)."""

    vocab_size: int | None = None
    """Vocabulary size before padding (NullTokenizer, TikTokenizer); with other tokenizers, at least so many words have
    embeddings (models whose tables are larger than their tokenizer)."""


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from."""

    data_path: list[str] | None = flag_field(None, type=str, nargs="*")
    """One prefix, prefixes without weights, or `weight prefix weight prefix ...`: one blend split by --split."""

    train_data_path: list[str] | None = flag_field(None, type=str, nargs="*")
    """Blend for training only; like --data-path."""

    valid_data_path: list[str] | None = flag_field(None, type=str, nargs="*")
    """Blend for validation only; like --data-path."""

    test_data_path: list[str] | None = flag_field(None, type=str, nargs="*")
    """Blend for testing only; like --data-path."""

    split: str | None = None
    """Weights of training, validation and test, such as 969,30,1."""

    data_cache_path: str | None = None
    """Directory for the sample index caches; default: beside the data."""

    mock_data: bool = False
    """Synthetic samples instead of --data-path."""

    num_workers: int = 2
    """Data loader worker processes per rank."""

    eod_mask_loss: bool = False
    """No loss on end-of-document tokens."""

    num_dataset_builder_threads: int = 1
    """Threads that build the datasets of a blend."""

    mid_level_dataset_surplus: float = 0.005
    """Share of extra samples that each dataset of a blend prepares."""

    mmap_bin_files: bool = flag_field(True, arg_names=["--no-mmap-bin-files"])
    """Read .bin files instead of mapping them into memory."""

    dataloader_fast_cache_load: bool = False
    """Trust that --data-cache-path holds every index, and load them without looking at the data."""

    dataloader_defer_npy_index_mmap: bool = False
    """Map each index of --data-cache-path into memory only when a sample of it is read."""

    allow_ambiguous_pad_tokens: bool = False
    """Keep the loss on pad tokens that cannot be told from real ones, instead of masking them."""

    reset_position_ids: bool = False
    """Restart positions after end-of-document tokens."""


def _signal(text: str) -> enum.Enum:
    names = {str(member.value): name for name, member in signal.Signals.__members__.items()}
    return enum_member(signal.Signals, names.get(text, text.upper()))


@dataclass(frozen=True)
class TrainConfig:
    """How long, how much at a time, and from which seed."""

    micro_batch_size: int | None = None
    """Samples per rank and forward pass."""

    global_batch_size: int | None = None
    """Samples per iteration; default: --micro-batch-size times the data-parallel size."""

    rampup_batch_size: list[int] | None = flag_field(None, type=int, nargs=3)
    """START INCREMENT SAMPLES: grow the global batch size from START by INCREMENT over SAMPLES samples."""

    train_iters: int | None = None
    """Iterations to train for."""

    train_samples: int | None = None
    """Samples to train for, instead of --train-iters."""

    exit_interval: int | None = None
    """Save and stop after an iteration divisible by this."""

    exit_duration_in_mins: int | None = None
    """Save and stop after this many minutes."""

    exit_signal_handler: bool = False
    """Save and stop with exit status 0 when --exit-signal arrives."""

    exit_signal: signal.Signals = flag_field(signal.SIGTERM, type=_signal, nargs=None, choices=None, metavar="SIGTERM")
    """The signal of --exit-signal-handler, by name or number."""

    check_for_spiky_loss: bool = False
    """Report losses far above those of the iterations before."""

    max_consecutive_bad_iterations: int = 3
    """Exit after this many iterations in a row whose loss or gradient was NaN or infinite."""

    eval_interval: int | None = None
    """Iterations between validations; default: none."""

    eval_iters: int = 100
    """Iterations per validation."""

    seed: int = 1234
    """Seed of Python, NumPy, PyTorch and the data order."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run, how often, and from where it resumes."""

    save: str | None = None
    """Directory for checkpoints."""

    save_interval: int | None = flag_field(None, arg_names=["--save-interval", "--persistent-save-interval"])
    """Iterations between checkpoints; default: only when training ends."""

    keep_last: int | None = None
    """Delete all but the newest N checkpoints after each save."""

    save_retain_interval: int | None = None
    """Delete checkpoints after each save, but the newest and those at iterations divisible by this."""

    async_save: bool = False
    """Write in the background while training goes on."""

    ckpt_format: Literal["torch_dist"] = "torch_dist"
    """Checkpoint format."""

    ckpt_fully_parallel_save: bool = flag_field(
        True, arg_names=["--no-ckpt-fully-parallel-save", "--disable-ckpt-fully-parallel-save"]
    )
    """Let one data-parallel rank write what all of them hold, instead of a share each."""

    ckpt_fully_parallel_load: bool = False
    """Let each data-parallel rank read a share and exchange it, instead of reading everything."""

    no_save_optim: bool = False
    """Do not save the optimizer's state."""

    no_save_rng: bool = False
    """Do not save the random number generators' state."""

    load: str | None = None
    """Directory of checkpoints to resume from; nothing there: start afresh, with a warning."""

    ckpt_step: int | None = None
    """Iteration to resume from; default: the newest checkpoint."""

    pretrained_checkpoint: str | None = None
    """Directory of checkpoints to start from as by --finetune when --load holds none."""

    finetune: bool = False
    """Load the weights only and begin at iteration 0."""

    no_load_optim: bool = False
    """Do not load the optimizer's state."""

    no_load_rng: bool = False
    """Do not load the random number generators' state."""

    use_checkpoint_args: bool = False
    """Take the model's shape and the tokenizer from the checkpoint's flags; flags given here win."""

    exit_on_missing_checkpoint: bool = False
    """Exit with status 1 when --load holds no checkpoint."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Learning rate and weight decay over time, by megatron.core.optimizer_param_scheduler."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Decay function of the learning rate."""

    lr_decay_iters: int | None = None
    """Iterations to decay over; default: --train-iters."""

    lr_decay_samples: int | None = None
    """Samples to decay over; default: --train-samples."""

    lr_warmup_iters: int = 0
    """Iterations of linear warmup."""

    lr_warmup_samples: int = 0
    """Samples of linear warmup."""

    lr_warmup_fraction: float | None = None
    """Warmup as a share of the decay length, instead of --lr-warmup-iters."""

    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warmup."""

    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Decay function of WSD's annealing phase."""

    lr_wsd_decay_iters: int | None = None
    """Iterations of WSD's annealing phase."""

    lr_wsd_decay_samples: int | None = None
    """Samples of WSD's annealing phase."""

    start_weight_decay: float | None = None
    """Weight decay at the start; default: --weight-decay."""

    end_weight_decay: float | None = None
    """Weight decay at the end; default: --weight-decay."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start to end."""

    override_opt_param_scheduler: bool = flag_field(
        False, arg_names=["--override-opt_param-scheduler", "--override-opt-param-scheduler"]
    )
    """On resuming, let the flags win over the checkpoint's schedule."""

    use_checkpoint_opt_param_scheduler: bool = flag_field(
        False, arg_names=["--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"]
    )
    """On resuming, let the checkpoint's schedule win over the flags."""


@dataclass(frozen=True)
class LogConfig:
    """What is printed and recorded."""

    log_interval: int = 100
    """Iterations between log lines."""

    log_throughput: bool = False
    """Add TFLOP/s per GPU to the log line."""

    log_tokens_per_expert: bool = False
    """After training, print how many tokens each expert of each MoE layer computed in the last iteration."""

    moe_routing_trace_path: str | None = None
    """Directory for the experts that every token chose, as JSON lines: one file per rank."""

    tensorboard_dir: str | None = None
    """Directory for TensorBoard events."""

    tensorboard_log_interval: int = 1
    """Iterations between TensorBoard points."""

    tensorboard_queue_size: int = 1000
    """Events that TensorBoard holds before it writes."""

    log_loss_scale_to_tensorboard: bool = True
    """Do not write the loss scale to TensorBoard."""

    log_validation_ppl_to_tensorboard: bool = False
    """Write the validation perplexity to TensorBoard."""

    log_world_size_to_tensorboard: bool = False
    """Write the number of processes to TensorBoard."""
