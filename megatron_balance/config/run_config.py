"""Every setting of a run, as frozen dataclasses. A field's docstring is its `--help`.

megatron-core's `TransformerConfig`, `OptimizerConfig` and `DistributedDataParallelConfig` are used unchanged. The
classes here and in training_config.py hold our own flags and those that Megatron-LM defines outside megatron-core.
`RunConfig` contains all of them: nothing below the entry point reads parsed arguments.

A field of `flag_field(None)` whose type excludes None is required, or derived by cli/checks.py: it has a value in every
RunConfig.
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
    ProfilingConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
)

WORKLOADS = (
    *("none", "balanced", "hot_experts", "hot_rank", "spread_hot_experts", "ragged_sources", "zero_load"),
    *("rotating_hotspot", "burst", "W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7"),
)


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Expert placement: which ranks compute each expert, and when its weights move."""

    moe_layer_impl: Literal["balanced", "megatron"] = "balanced"
    """Implementation of MoE layers. balanced: ours. megatron: megatron-core's MoELayer, the baseline of comparisons."""

    moe_expert_gemm: Literal["default", "te"] = "default"
    """Matrix products of the experts. default: torch's. te: Transformer Engine's grouped products."""

    moe_flex_rows: Literal["counted", "bound"] = "counted"
    """Memory for the rows that HybridEP delivers (--moe-token-dispatcher-type flex). counted: exactly enough, for which
    the host waits. bound: enough for the most rows that a rank could get, so that the host waits for nothing."""

    balance_policy: str = "none"
    """Placement policy: one of these names, or a class of your own as package.module:Class."""

    balance_guest_slots: int = 2
    """Guest slots per rank and MoE layer; nothing is allocated with policy none."""

    balance_interval: int = 1
    """Plan every N iterations."""

    balance_load: Literal["predicted", "exact"] = "predicted"
    """Load that a plan is for. predicted: the next iteration's load, predicted from earlier iterations. exact: the load
    of one microbatch, which gets its own plan, copies and gradients of copies."""

    balance_inner_policy: str = "none"
    """Policy that adds guests for the exact load of each microbatch to the placement that --balance-policy has planned
    for the predicted load."""

    balance_guest_ring: int = 2
    """Number of layers of a pipeline stage that can have guests for a microbatch at the same time (--balance-load
    exact, --balance-inner-policy). All layers share these guest slots; with --overlap-moe-expert-parallel-comm, forward
    passes have as many others."""

    balance_certify: float | None = flag_field(None, metavar="EPS")
    """Give the rows of a pass memory of constant size, 1 + EPS times their mean over ranks, if its plan proves that no
    rank gets more (--balance-load exact, --balance-inner-policy). Other passes get exactly enough, as all passes do
    without this flag."""

    balance_predictor: Literal["last", "ema", "linear"] = "last"
    """How the next iteration's load is predicted."""

    balance_token_split: Literal["policy", "local_first", "proportional"] = "policy"
    """How an expert's tokens are shared among its hosts; policy: as the policy prefers."""

    balance_alpha: float = 0.5
    """Pro-Prophet's alpha (Eq. 7): loads are balanced once the heaviest and the lightest rank differ by less than alpha
    times the mean load of an expert."""

    balance_threshold: float = 1.1
    """flexmoe acts while the balance ratio (FlexMoE, Eq. 6) exceeds this value."""

    balance_metric: Literal["max", "variance"] = "max"
    """flexmoe's balance ratio. max: the heaviest rank's load over the mean. variance: 1 plus the standard
    deviation of the ranks' loads over the mean."""

    balance_vexperts_per_rank: int | None = None
    """Number of flexmoe's vExperts per rank, which share the tokens of their expert evenly. Default: one per slot."""

    balance_demi_slots: int = 5
    """T, the number of time slots in demi's linear program."""

    balance_demi_weights: Literal["pow2", "linear"] = "pow2"
    """Weights of demi's time slots. pow2: 2^t. linear: t + 1."""

    balance_demi_hosts: int = 16
    """Maximum number of ranks on which demi computes an expert. 1: a single one, as in the paper."""

    balance_capacities: tuple[float, ...] | None = None
    """Relative speed of each expert-parallel rank's computation. Default: that of the cluster's profile."""

    balance_overlap: Literal["none", "blockwise"] = "none"
    """When Plan, Trans and Agg run. none: when their results are needed. blockwise: overlapped with the computation of
    neighboring blocks, which policies take into account."""

    balance_ownership: Literal["fixed", "transfer"] = "fixed"
    """Ownership of experts. fixed: an expert's parameters and optimizer state never move. transfer: they move to a rank
    that keeps computing the expert in place of its owner, once the copies have cost as much as the move."""

    balance_profile: str = flag_field("builtin", metavar="{builtin,auto,FILE}")
    """Cluster profile for the cost model. builtin: constants, so that runs are reproducible. auto: measured once and
    stored in --save, or read from --load. Otherwise the path of a profile from tools/profile_cluster.py, or of a
    cluster's data sheet (.yaml, see configs/clusters)."""

    balance_calibrate: str = flag_field("off", metavar="{off,on,FILE}")
    """Whether plans depend on what the run measures. off: only on --balance-profile. on: its times are multiplied by
    measured over predicted ones, which are recorded in --balance-log-dir. Otherwise the path of such a record
    (calibration.jsonl), with which a run makes the same plans again."""

    balance_explain: bool = False
    """Print each change of a placement, with the layer's predicted times before and after it, and how far any other
    placement with the same owners and slots could be below the latter at most."""

    moe_router_force_workload: str = flag_field("none", choices=WORKLOADS)
    """Route tokens by a synthetic workload instead of the router's scores, for benchmarks. The choices depend only on
    the workload, --seed and the iteration, not on the layout. W0 to W7 are those of Megatron-LM's imbalance benchmark.
    - W0: all experts in turn.
    - W1: three of four tokens choose from the first quarter of the experts.
    - W2: as W1, with other random numbers.
    - W3: three of four tokens choose from every other expert.
    - W4: uniform.
    - W5: only the upper half of the experts.
    - W6: as W1, with another quarter every 3 iterations.
    - W7: uniform; in every fourth iteration, half of the tokens choose from the first quarter."""

    moe_routing_replay_path: str | None = flag_field(None, metavar="DIR")
    """Directory of a trace by --moe-routing-trace-path, whose choices of experts training repeats; the layout may be
    another one."""

    balance_log_dir: str | None = None
    """Directory for the load matrices and placements of every iteration (.npz)."""

    balance_timeline: str | None = flag_field(None, metavar="DIR")
    """Directory for a Chrome/Perfetto trace of the latest iterations, one file per rank (.json)."""


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """How tokens travel between expert-parallel ranks."""

    moe_comm_alltoall: str = "default"
    """All-to-all of tokens: one of these names, or a class of your own as package.module:Class.
    - default: flat with NCCL, p2p with gloo."""

    moe_comm_node_size: int | None = None
    """Number of ranks per node. Default: the launcher's LOCAL_WORLD_SIZE."""

    moe_comm_codec: str = "none"
    """Compression of the exchanged rows: one of these names, or a class of your own as package.module:Class."""

    moe_comm_codec_directions: Literal["dispatch", "combine", "forward", "all"] = "forward"
    """Exchanges that --moe-comm-codec compresses. dispatch: tokens on the way to their experts. combine: the experts'
    outputs on the way back. forward: both. all: both and their gradients."""

    moe_comm_chunks: str = flag_field("1", metavar="{N,auto}")
    """Number of chunks that a layer's tokens are split into, so that the exchange of one chunk overlaps the computation
    of others; auto: the number with the shortest predicted time, by --balance-profile."""

    moe_comm_order: str = "optsche"
    """Order of the chunks' tasks: one of these names, or a function of your own as package.module:function.
    - sequential: one chunk after the other.
    - interleaved: one chunk is exchanged while another computes.
    - optsche: the fastest for equal chunks (ScheMoE, Theorem 1).
    - demi: DEMI's schedule."""

    moe_comm_refit_interval: int = 100
    """Number of iterations between two choices of the number of chunks and their order."""

    moe_parallel_schedule: Literal["megatron", "baseline", "s1", "s2", "auto"] = "megatron"
    """Communication schedule of a layer with tensor-parallel attention and expert tensor parallelism (Parm, section
    III).
    - megatron: all-to-all, then all-gather among an expert's shards.
    - baseline: the reverse, as in DeepSpeed-MoE.
    - s1: each tensor-parallel rank routes its part of the tokens.
    - s2: each tensor-parallel rank sends its part of the rows.
    - auto: the fastest of megatron, s1 and s2 by --balance-profile."""

    moe_parallel_saa: bool = flag_field(True, arg_names=["--no-moe-parallel-saa"])
    """With s2, gather results among tensor-parallel ranks after the all-to-all instead of overlapping the two (SAA)."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The GPT around the transformer: embeddings, positions, vocabulary, activation."""

    seq_length: int = flag_field(None)
    """Number of tokens per sample."""

    max_position_embeddings: int = flag_field(None)
    """Number of positions that have embeddings. Default: --seq-length."""

    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    """Kind of position embedding. yarn: rope with frequencies scaled as in YaRN; latent attention has --rope-type."""

    rotary_base: int = 10000
    """Base period of rotary position embeddings."""

    rotary_percent: float = 1.0
    """Fraction of each head's dimensions that are rotated."""

    rotary_seq_len_interpolation_factor: int | None = None
    """Factor by which rotary embeddings interpolate positions to longer sequences."""

    use_rope_scaling: bool = False
    """Scale rotary frequencies as Llama 3.1 does."""

    rope_scaling_factor: float = 8.0
    """Scaling factor of --use-rope-scaling."""

    yarn_rotary_scaling_factor: float | None = None
    """YaRN's scaling factor (--position-embedding-type yarn)."""

    yarn_original_max_position_embeddings: int | None = None
    """Number of positions that a model had before YaRN extended it."""

    yarn_beta_fast: float | None = None
    """Rotations over the original positions beyond which YaRN does not scale a frequency. Default: 32."""

    yarn_beta_slow: float | None = None
    """Rotations over the original positions below which YaRN scales a frequency fully. Default: 1."""

    yarn_mscale: float | None = None
    """Factor of YaRN's logarithm in the scale of queries and keys. Default: 1."""

    yarn_mscale_all_dim: float | None = None
    """Factor of YaRN's logarithm by which the scale of queries and keys is divided. Default: 0."""

    yarn_correction_range_round_to_int: bool = True
    """Do not round the range of frequencies that YaRN scales partly."""

    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this number times the tensor-parallel size."""

    padded_vocab_size: int | None = None
    """Size of the vocabulary with padding. Default: as --make-vocab-size-divisible-by says."""

    untie_embeddings_and_output_weights: bool = False
    """Do not share weights between the embedding and the output layer."""

    group_query_attention: bool = False
    """Use group-query attention with --num-query-groups groups."""

    qk_layernorm_across_heads: bool = False
    """Normalize queries and keys over all heads of a token together; --qk-layernorm normalizes each head separately."""

    moe_router_group_score_topk: int | None = None
    """Number of a group's best experts whose scores add up to the group's score, in group-limited routing: 1 in
    DeepSeek-V2, 2 in DeepSeek-V3. Default: --moe-router-topk / --moe-router-group-topk, rounded down."""

    swiglu: bool = False
    """Use SwiGLU (gated SiLU) instead of GELU."""

    quick_geglu: bool = False
    """Use gated quick GELU (x * sigmoid(1.702 x)) instead of GELU."""

    squared_relu: bool = False
    """Use squared ReLU instead of GELU."""

    bias_gelu_fusion: bool = flag_field(True, arg_names=["--no-bias-gelu-fusion"])
    """Do not fuse bias and GELU."""

    bias_swiglu_fusion: bool = flag_field(True, arg_names=["--no-bias-swiglu-fusion"])
    """Do not fuse bias and SwiGLU."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Number of layers per virtual pipeline stage; enables the interleaved 1F1B schedule."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """Number of virtual pipeline stages per rank, instead of --num-layers-per-virtual-pipeline-stage."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Processes and the backend that connects them."""

    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    """Backend of the process groups; always gloo on a machine without CUDA."""

    use_tp_pp_dp_mapping: bool = False
    """Number the ranks of pipeline stages before those of data parallelism: tensor, expert, pipeline, data."""

    distributed_timeout_minutes: float = 10
    """Minutes that a rank may wait in one collective; after that, every rank reports which rank stalled, and exits."""

    align_grad_reduce: bool = flag_field(True, arg_names=["--no-align-grad-reduce", "--disable-align-grad-reduce"])
    """Let each pipeline stage start its gradient reductions as soon as it is ready, not at the same time as the
    others."""

    grad_reduce_in_bf16: bool = False
    """With --bf16, accumulate and reduce gradients in bfloat16 instead of float32."""

    dry_run: bool = False
    """Check a layout of WORLD_SIZE processes in a single process, without their devices: print the groups, the schedule
    and the memory of one rank of each pipeline stage, then exit. Nothing is allocated."""

    cluster: str | None = flag_field(None, metavar="FILE")
    """Description of the cluster (YAML, see configs/clusters) into which the layout must fit: --dry-run compares its
    number of nodes and a GPU's memory with what the job needs. Default: --balance-profile, if it is such a file."""

    @property
    def patience(self) -> float:
        """Seconds to wait for a helper, such as a policy: half of the timeout, so that a stalled helper is named before
        the ranks that wait for it are."""
        return self.distributed_timeout_minutes * 60 / 2


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run, which the entry point passes on."""

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
    profiling: ProfilingConfig
    launch: LaunchConfig

    def replace(self, **changes: object) -> "RunConfig":
        """Return a copy with some parts replaced."""
        return dataclasses.replace(self, **changes)
