"""Every setting of a run, as frozen dataclasses. A field's docstring is its `--help`.

megatron-core's own `TransformerConfig`, `OptimizerConfig` and `DistributedDataParallelConfig` are used as they are;
the classes here and in training_config.py hold the flags that Megatron users know from outside megatron-core, and our
own. `RunConfig` is all of them together: nothing below the entry point reads parsed arguments.
"""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.config.flags import flag_field
from megatron_balance.config.training_config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class BalanceConfig:
    """Expert placement: who computes which expert, and when its weights move."""

    moe_layer_impl: Literal["balanced", "megatron"] = "balanced"
    """balanced: our MoE layer. megatron: megatron-core's own MoELayer, the baseline of every comparison."""

    balance_policy: str = "none"
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

    balance_alpha: float = 0.5
    """Pro-Prophet's Eq. 7: loads are balanced once the heaviest and the lightest rank differ by less than this times
    the mean load of an expert."""

    balance_threshold: float = 1.1
    """flexmoe acts while the balance ratio (FlexMoE, Eq. 6) exceeds this."""

    balance_metric: Literal["max", "variance"] = "max"
    """flexmoe's balance ratio. max: the heaviest rank's load over the mean. variance: 1 plus the variance over the
    squared mean."""

    balance_vexperts_per_rank: int | None = None
    """flexmoe's vExperts per rank, which share an even part of their expert's tokens; default: one per slot."""

    balance_demi_slots: int = 5
    """T, the time slots of demi's linear program."""

    balance_demi_weights: Literal["pow2", "linear"] = "pow2"
    """Weights of demi's time slots. pow2: 2^t. linear: t + 1."""

    balance_capacities: tuple[float, ...] | None = None
    """demi: the relative computing capacity of each expert-parallel rank; default: equal."""

    balance_overlap: Literal["none", "blockwise"] = "none"
    """none: Plan, Trans and Agg where they are needed. blockwise: beside the computation of neighbouring blocks, and
    policies know that they are hidden there."""

    balance_ownership: Literal["fixed", "transfer"] = "fixed"
    """fixed: an expert's parameters and optimizer state stay where they are. transfer: they move to a rank that goes on
    computing the expert instead of its owner, once that has cost as much as moving."""

    balance_profile: str = "builtin"
    """Cluster profile of the cost model. builtin: constants, so that runs repeat. auto: measured once and kept in
    --save, or --load. Or a path: a profile that tools/profile_cluster.py wrote, or the data sheet of a cluster (.yaml,
    see configs/clusters)."""

    balance_explain: bool = False
    """Print each change of a placement with the layer's predicted times before and after."""

    moe_router_force_workload: Literal[
        "none",
        "balanced",
        "hot_experts",
        "hot_rank",
        "spread_hot_experts",
        "ragged_sources",
        "zero_load",
        "rotating_hotspot",
        "burst",
    ] = "none"
    """Let tokens choose experts by a synthetic workload instead of the router's scores, for benchmarks. It depends on
    the workload, --seed and the iteration only, not on the layout."""

    balance_log_dir: str | None = None
    """Directory for load matrices and placements (.npz)."""

    balance_timeline: str | None = None
    """Directory for a Chrome/Perfetto trace of each rank (.json): what happened when in the latest iterations."""


@dataclass(frozen=True)
class CommConfig:
    """How tokens travel between expert-parallel ranks."""

    moe_comm_alltoall: str = "default"
    """All-to-all of the token dispatcher: default (flat with NCCL, p2p with gloo), flat (the backend's own), p2p (all
    messages at once), 1dh, 2dh (hierarchical), pipe (messages inside nodes beside those between nodes), auto (by
    --balance-profile), or package.module:Class."""

    moe_comm_node_size: int | None = None
    """Ranks per node; default: LOCAL_WORLD_SIZE as the launcher set it."""

    moe_comm_codec: str = "none"
    """Lossy compression on the wire: none, bf16, fp16, fp8, int8, zfp, or package.module:Class."""

    moe_comm_codec_directions: Literal["dispatch", "combine", "forward", "all"] = "forward"
    """What --moe-comm-codec compresses. dispatch: tokens to their experts. combine: the experts' rows back.
    forward: both. all: both and their gradients."""

    moe_comm_chunks: str = "1"
    """Split a layer's tokens into N chunks, so that the exchange of one hides under the computation of others; auto: as
    many as are predicted to be the fastest, by --balance-profile."""

    moe_comm_order: str = "optsche"
    """In which order chunks are worked on. sequential: one after the other. interleaved: the next one travels while one
    computes. optsche: the fastest order by --balance-profile (ScheMoE, Theorem 1). Or package.module:function."""

    moe_comm_refit_interval: int = 100
    """Iterations between two choices of the number of chunks and their order."""

    moe_parallel_schedule: Literal["megatron", "baseline", "s1", "s2", "auto"] = "megatron"
    """Step order of a layer with tensor-parallel attention and expert tensor parallelism (Parm, section III). megatron:
    all-to-all, then all-gather among an expert's shards. baseline: the other way round, as DeepSpeed-MoE. s1: each
    tensor-parallel rank routes a part of the tokens. s2: each sends a part of the rows. auto: s1 or s2, by
    --balance-profile."""

    moe_parallel_saa: bool = flag_field(True, arg_names=["--no-moe-parallel-saa"])
    """With s2, gather results among tensor-parallel ranks when all are there, not while more are on their way."""


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

    use_rope_scaling: bool = False
    """Scale rotary frequencies as Llama 3.1 does."""

    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling."""

    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times the tensor-parallel size."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own."""

    group_query_attention: bool = False
    """Group-query attention with --num-query-groups groups."""

    qk_layernorm_across_heads: bool = False
    """Normalize queries and keys, each over all heads of a token together, where --qk-layernorm takes a head alone."""

    swiglu: bool = False
    """SwiGLU (gated SiLU) in place of GELU."""

    quick_geglu: bool = False
    """Gated quick GELU (x * sigmoid(1.702 x)) in place of GELU."""

    squared_relu: bool = False
    """Squared ReLU in place of GELU."""

    bias_gelu_fusion: bool = flag_field(True, arg_names=["--no-bias-gelu-fusion"])
    """Do not fuse bias and GELU."""

    bias_swiglu_fusion: bool = flag_field(True, arg_names=["--no-bias-swiglu-fusion"])
    """Do not fuse bias and SwiGLU."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers per virtual pipeline stage: the interleaved 1F1B schedule."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """Virtual pipeline stages per rank, instead of --num-layers-per-virtual-pipeline-stage."""


@dataclass(frozen=True)
class LaunchConfig:
    """Processes and their backend."""

    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    """Collective backend; without CUDA it is gloo."""

    distributed_timeout_minutes: float = 10
    """Minutes that a rank may wait in one collective; then every rank says which rank stalled, and ends."""

    align_grad_reduce: bool = flag_field(True, arg_names=["--no-align-grad-reduce"])
    """Let each pipeline stage start its gradient reductions when it is ready, not all stages together."""

    grad_reduce_in_bf16: bool = False
    """Accumulate and reduce gradients in bfloat16 with --bf16, instead of float32."""

    dry_run: bool = False
    """Check a layout of WORLD_SIZE processes in this one, without their devices: print groups, schedule and the memory
    of a rank of each pipeline stage, and exit. Nothing is allocated."""


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
