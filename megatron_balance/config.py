"""Every setting of a run, as frozen dataclasses. A field's docstring is its `--help`.

megatron-core's own `TransformerConfig`, `OptimizerConfig` and `DistributedDataParallelConfig` are used as they are;
the classes here hold the flags that Megatron users know from outside megatron-core, and our own. `RunConfig` is all
of them together: nothing below the entry point reads parsed arguments.
"""

import dataclasses
import signal
from dataclasses import dataclass
from typing import Literal

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.flags import flag_field

Policy = str  # a name in placement.policies' registry, or "package.module:Class"


@dataclass(frozen=True)
class BalanceConfig:
    """Expert placement: who computes which expert, and when its weights move."""

    moe_layer_impl: Literal["balanced", "megatron"] = "balanced"
    """balanced: our MoE layer. megatron: megatron-core's own MoELayer, the baseline of every comparison."""

    balance_policy: Policy = "none"
    """Placement policy. none: every expert is computed by its owner only."""

    balance_guest_slots: int = 2
    """Guest slots per rank and MoE layer; nothing is allocated with policy none."""

    balance_interval: int = 1
    """Plan every N iterations."""

    balance_load: Literal["predicted", "exact"] = "predicted"
    """predicted: plan iteration j+1 from iterations up to j. exact: plan on the load just routed."""

    balance_predictor: Literal["last", "ema", "linear"] = "last"
    """How the next iteration's load is predicted."""

    balance_token_split: Literal["policy", "local_first", "proportional"] = "policy"
    """How an expert's tokens are shared among its hosts; policy: as the policy's paper says."""

    balance_overlap: Literal["none", "blockwise"] = "none"
    """blockwise: hide Plan, Trans and Agg behind the computation of neighbouring blocks."""

    balance_ownership: Literal["fixed", "transfer"] = "fixed"
    """transfer: an expert's parameters and optimizer state may move to another owner."""

    balance_profile: str = "builtin"
    """Cluster profile of the cost model: builtin, auto, or a path."""

    balance_explain: bool = False
    """Print why each choice was made, with predicted times."""

    balance_log_dir: str | None = None
    """Directory for load matrices (.npz)."""

    balance_timeline: str | None = None
    """Directory for Chrome/Perfetto traces, one JSON per rank."""


@dataclass(frozen=True)
class CommConfig:
    """How tokens travel between expert-parallel ranks."""

    moe_comm_alltoall: str = "default"
    """All-to-all implementation: default, flat, p2p, 1dh, 2dh, pipe, auto, or package.module:Class."""

    moe_comm_node_size: int | None = None
    """Ranks per node; default: LOCAL_WORLD_SIZE as the launcher set it."""

    moe_comm_codec: str = "none"
    """Compression on the wire: none, bf16, fp16, fp8, int8, zfp, or package.module:Class. All but none are lossy."""

    moe_comm_chunks: str = "1"
    """Split a layer's tokens into N chunks whose exchange and computation overlap, or auto."""

    moe_parallel_schedule: Literal["megatron", "baseline", "s1", "s2", "auto"] = "megatron"
    """Step order of a layer with tensor-parallel attention and expert tensor parallelism (Parm, section III)."""


@dataclass(frozen=True)
class ModelConfig:
    """The GPT around the transformer: embeddings, positions, vocabulary, activation."""

    seq_length: int | None = None
    """Tokens per sample."""

    max_position_embeddings: int | None = None
    """Longest position; default: --seq-length."""

    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """Position embedding."""

    rotary_base: int = 10000
    """Base period of rotary position embeddings."""

    rotary_percent: float = 1.0
    """Share of each head's dimensions that is rotated."""

    rotary_seq_len_interpolation_factor: int | None = None
    """Sequence length interpolation factor of rotary embeddings."""

    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times the tensor-parallel size."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own."""

    group_query_attention: bool = False
    """Group-query attention with --num-query-groups groups."""

    swiglu: bool = False
    """SwiGLU (gated SiLU) in place of GELU."""

    squared_relu: bool = False
    """Squared ReLU in place of GELU."""

    bias_gelu_fusion: bool = flag_field(True, arg_names=["--no-bias-gelu-fusion"])
    """Do not fuse bias and GELU."""

    bias_swiglu_fusion: bool = flag_field(True, arg_names=["--no-bias-swiglu-fusion"])
    """Do not fuse bias and SwiGLU."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per virtual pipeline stage: the interleaved 1F1B schedule."""


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
    """Vocabulary size before padding (NullTokenizer, TikTokenizer)."""


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

    reset_position_ids: bool = False
    """Restart positions after end-of-document tokens."""


def _signal(text: str) -> signal.Signals:
    return signal.Signals(int(text)) if text.isdigit() else signal.Signals[text.upper()]


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

    exit_signal: signal.Signals = flag_field(
        signal.SIGTERM, type=lambda text: _signal(text), nargs=None, choices=None, metavar="SIGTERM"
    )
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

    start_weight_decay: float | None = None
    """Weight decay at the start; default: --weight-decay."""

    end_weight_decay: float | None = None
    """Weight decay at the end; default: --weight-decay."""

    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """How weight decay goes from start to end."""


@dataclass(frozen=True)
class LogConfig:
    """What is printed and recorded."""

    log_interval: int = 100
    """Iterations between log lines."""

    log_throughput: bool = False
    """Add TFLOP/s per GPU to the log line."""

    log_tokens_per_expert: bool = False
    """After training, print how many tokens each expert of each MoE layer computed in the last iteration."""

    tensorboard_dir: str | None = None
    """Directory for TensorBoard events."""

    tensorboard_log_interval: int = 1
    """Iterations between TensorBoard points."""

    tensorboard_queue_size: int = 1000
    """Events that TensorBoard holds before it writes."""


@dataclass(frozen=True)
class LaunchConfig:
    """Processes and their backend."""

    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    """Collective backend; without CUDA it is gloo."""

    distributed_timeout_minutes: int = 10
    """Minutes after which a collective counts as stalled."""


@dataclass(frozen=True)
class RunConfig:
    """One run: everything the entry point hands down."""

    transformer: TransformerConfig
    optimizer: OptimizerConfig
    ddp: DistributedDataParallelConfig
    balance: BalanceConfig
    comm: CommConfig
    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    scheduler: SchedulerConfig
    log: LogConfig
    launch: LaunchConfig

    def replace(self, **changes: object) -> "RunConfig":
        """A copy with some parts exchanged."""
        return dataclasses.replace(self, **changes)
