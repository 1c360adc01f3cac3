"""Every supported flag, changed once between the run that saves a checkpoint and the run that resumes from it."""

import argparse
from typing import NamedTuple

from megatron_balance.cli.arguments import build_parser
from tests.distributed.runs import BASE


class Context(NamedTuple):
    """Flags of a run that saves, and changes of single flags for runs that resume."""

    ranks: int
    flags: str
    changes: str
    """One change a line; a flag that is given twice has its last value."""


EP = "--mock-data --expert-model-parallel-size 2 --global-batch-size 4 --disable-bias-linear"
ROPE = "--mock-data --position-embedding-type rope"
LATENT = (
    f"{ROPE} --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 8"
)

CONTEXTS = {
    "plain": Context(
        1,
        "--mock-data",
        """
        --moe-router-force-workload hot_experts
        --no-initialization
        --num-layers 4
        --hidden-size 64
        --ffn-hidden-size 96
        --hidden-dropout 0.1
        --norm-epsilon 1e-6
        --apply-layernorm-1p
        --disable-bias-linear
        --add-qkv-bias
        --swiglu
        --quick-geglu
        --squared-relu
        --activation-func-clamp-value 5
        --normalization RMSNorm
        --calculate-per-token-loss
        --init-method-std 0.01
        --embedding-init-method-std 0.01
        --num-attention-heads 2
        --attention-backend local
        --softmax-type learnable
        --group-query-attention
        --kv-channels 16
        --attention-dropout 0.1
        --window-size 8,0
        --qk-layernorm
        --qk-l2-norm
        --attention-output-gate
        --test-mode
        --apply-query-key-layer-scaling
        --num-experts 4
        --moe-shared-expert-intermediate-size 32 --disable-bias-linear
        --moe-layer-freq 2
        --moe-ffn-hidden-size 32
        --moe-router-load-balancing-type global_aux_loss
        --moe-router-topk 3
        --moe-router-num-groups 4
        --moe-router-pre-softmax
        --moe-router-topk-scaling-factor 2
        --moe-router-score-function sigmoid
        --moe-router-dtype fp64
        --moe-router-force-load-balancing
        --moe-grouped-gemm
        --moe-use-legacy-grouped-gemm
        --moe-aux-loss-coeff 0.1
        --moe-z-loss-coeff 0.1
        --moe-input-jitter-eps 0.1
        --moe-token-dispatcher-type allgather
        --moe-expert-capacity-factor 1.5
        --moe-deepep-num-sms 24
        --moe-hybridep-num-sms 24
        --moe-flex-dispatcher-backend hybridep
        --moe-layer-recompute
        --position-embedding-type rope
        --max-position-embeddings 64
        --seq-length 16
        --make-vocab-size-divisible-by 64
        --padded-vocab-size 256
        --vocab-size 120
        --untie-embeddings-and-output-weights
        --deterministic-mode
        --fp32-residual-connection
        --attention-softmax-in-fp32
        --disable-bf16-reduced-precision-matmul
        --recompute-granularity selective
        --no-gradient-accumulation-fusion
        --cross-entropy-loss-fusion
        --no-masked-softmax-fusion
        --no-persist-layer-norm
        --no-bias-dropout-fusion
        --no-rope-fusion
        --no-bias-gelu-fusion
        --no-bias-swiglu-fusion
        --use-fused-weighted-squared-relu
        --transformer-impl local
        --no-clone-scatter-output-in-embedding
        --accumulate-allreduce-grads-in-fp32
        --overlap-grad-reduce
        --use-distributed-optimizer
        --no-check-for-nan-in-loss-and-grad
        --check-for-large-grads
        --ddp-bucket-size 1000
        --ddp-pad-buckets-for-high-nccl-busbw
        --ddp-reduce-scatter-with-fp32-accumulation
        --no-align-param-gather
        --no-align-grad-reduce
        --distributed-backend gloo
        --use-tp-pp-dp-mapping
        --distributed-timeout-minutes 9
        --cluster configs/clusters/dgx_h100.yaml
        --fp16
        --bf16
        --no-barrier-with-level-1-timing
        --micro-batch-size 1
        --global-batch-size 4
        --rampup-batch-size 2 2 8 --global-batch-size 4
        --train-iters 30
        --exit-interval 5
        --exit-duration-in-mins 5
        --exit-signal-handler
        --exit-signal SIGUSR1
        --check-for-spiky-loss
        --max-consecutive-bad-iterations 4
        --manual-gc
        --manual-gc-interval 3
        --no-manual-gc-eval
        --eval-interval 2 --eval-iters 1 --split 8,1,1
        --eval-iters 3
        --seed 77
        --lr-decay-style cosine
        --lr-decay-iters 10
        --lr-decay-samples 30
        --lr-warmup-iters 3
        --lr-warmup-samples 3
        --lr-warmup-fraction 0.1
        --lr-warmup-init 1e-4
        --start-weight-decay 0.005 --weight-decay-incr-style linear
        --end-weight-decay 0.02 --weight-decay-incr-style linear
        --weight-decay-incr-style cosine
        --override-opt_param-scheduler
        --use-checkpoint-opt_param-scheduler
        --lr 2e-3
        --min-lr 1e-4
        --decoupled-lr 2e-3
        --decoupled-min-lr 1e-4
        --weight-decay 0.1
        --apply-wd-to-qk-layernorm
        --optimizer sgd
        --loss-scale 64
        --adam-beta1 0.8
        --adam-beta2 0.9
        --adam-eps 1e-6
        --clip-grad 0.5
        --log-num-zeros-in-grad
        --num-workers 1
        --num-dataset-builder-threads 2
        --no-mmap-bin-files
        --eod-mask-loss
        --allow-ambiguous-pad-tokens
        --reset-position-ids
        --tokenizer-hf-use-fast
        --tokenizer-hf-include-special-tokens
        --tokenizer-sentencepiece-legacy
        --tokenizer-special-tokens <a>
        --trust-remote-code
        --tiktoken-pattern v2
        --tiktoken-num-special-tokens 900
        --save {other}
        --save {other} --save-interval 2
        --save {other} --keep-last 1
        --save {other} --save-retain-interval 2
        --save {other} --async-save
        --save {other} --no-ckpt-fully-parallel-save
        --save {other} --no-save-optim
        --save {other} --no-save-rng
        --ckpt-format torch_dist
        --ckpt-fully-parallel-load
        --ckpt-step 1
        --pretrained-checkpoint {other}
        --finetune
        --no-load-optim
        --no-load-rng
        --use-checkpoint-args
        --exit-on-missing-checkpoint
        --log-interval 1
        --log-throughput
        --log-progress
        --log-params-norm
        --log-memory-interval 100
        --log-device-memory-used
        --logging-level 20
        --timing-log-level 2
        --timing-log-option max
        --log-tokens-per-expert
        --moe-routing-trace-path {other}
        --moe-per-layer-logging
        --tensorboard-dir {other}
        --tensorboard-log-interval 2
        --tensorboard-queue-size 2
        --no-log-loss-scale-to-tensorboard
        --log-validation-ppl-to-tensorboard
        --log-world-size-to-tensorboard
        --log-timers-to-tensorboard
        --log-memory-to-tensorboard
        --wandb-exp-name a
        --wandb-save-dir {other}
        --wandb-entity a
        --profile --use-pytorch-profiler --tensorboard-dir {other}
        --use-pytorch-profiler
        --profile-step-start 11
        --profile-step-end 13
        --profile-ranks 1
        --memory-snapshot-path a
        """,
    ),
    "samples": Context(1, "--mock-data --train-samples 40", "--train-samples 60"),
    "wsd": Context(
        1,
        "--mock-data --lr-decay-style WSD --lr-wsd-decay-iters 5",
        """
        --lr-wsd-decay-iters 6
        --lr-wsd-decay-samples 12
        --lr-wsd-decay-style linear
        """,
    ),
    "sgd": Context(1, "--mock-data --optimizer sgd", "--optimizer adam\n--sgd-momentum 0.8\n--sgd-momentum 0"),
    "plain sgd": Context(1, "--mock-data --optimizer sgd --sgd-momentum 0", "--sgd-momentum 0.9"),
    "gated": Context(1, "--mock-data --swiglu", "--glu-linear-offset 1"),
    "grouped queries": Context(1, "--mock-data --group-query-attention --num-query-groups 2", "--num-query-groups 4"),
    "shared": Context(
        1,
        "--mock-data --disable-bias-linear --moe-shared-expert-intermediate-size 32",
        "--moe-shared-expert-gate\n--moe-shared-expert-overlap",
    ),
    "capacity": Context(
        1,
        "--mock-data --disable-bias-linear --moe-expert-capacity-factor 1.5 --moe-layer-impl megatron",
        "--moe-token-drop-policy position\n--moe-pad-expert-input-to-capacity",
    ),
    "groups": Context(
        1,
        "--mock-data --moe-router-num-groups 4 --moe-router-group-topk 2",
        "--moe-router-group-topk 3\n--moe-router-group-score-topk 2\n--moe-router-num-groups 2",
    ),
    "top 1": Context(1, "--mock-data --moe-router-topk 1 --moe-router-pre-softmax", "--moe-apply-probs-on-input"),
    "sigmoid": Context(1, "--mock-data --moe-router-score-function sigmoid", "--moe-router-enable-expert-bias"),
    "biased": Context(
        1,
        "--mock-data --moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate 0.01",
    ),
    "megatron": Context(
        1,
        "--mock-data --disable-bias-linear --moe-layer-impl megatron",
        """
        --moe-layer-impl balanced
        --cross-entropy-fusion-impl te
        """,
    ),
    "window": Context(1, "--mock-data --window-size 8,0", "--window-attn-skip-freq 2"),
    "rope": Context(
        1,
        ROPE,
        """
        --seq-length 64
        --max-position-embeddings 64
        --rotary-interleaved
        --rotary-base 20000
        --rotary-percent 0.5
        --rotary-seq-len-interpolation-factor 2
        --use-rope-scaling
        --no-rope-freq 2
        --mtp-num-layers 1
        --multi-latent-attention
        --qk-layernorm-across-heads --normalization RMSNorm
        """,
    ),
    "scaled rope": Context(1, f"{ROPE} --use-rope-scaling", "--rope-scaling-factor 4"),
    "rms": Context(1, f"{ROPE} --normalization RMSNorm", "--qk-layernorm-across-heads"),
    "prediction": Context(1, f"{ROPE} --mtp-num-layers 1", "--mtp-loss-scaling-factor 0.2"),
    "latent": Context(
        1,
        LATENT,
        """
        --q-lora-rank 8
        --kv-lora-rank 8
        --qk-head-dim 16
        --qk-pos-emb-head-dim 4
        --v-head-dim 16
        --rope-type rope
        --rotary-scaling-factor 2
        --original-max-position-embeddings 2048
        --beta-fast 16
        --beta-slow 2
        --mscale 0.5
        --mscale-all-dim 0.5
        """,
    ),
    "recompute": Context(
        1,
        "--mock-data --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        """
        --recompute-method block
        --recompute-num-layers 2
        """,
    ),
    "selective": Context(1, "--mock-data --recompute-granularity selective", "--recompute-modules moe core_attn"),
    "bf16": Context(1, "--mock-data --bf16", "--grad-reduce-in-bf16\n--accumulate-allreduce-grads-in-fp32"),
    "fp16": Context(
        1,
        "--mock-data --fp16",
        """
        --loss-scale 64
        --initial-loss-scale 1024
        --min-loss-scale 2
        --loss-scale-window 10
        --hysteresis 3
        """,
    ),
    "fixed scale": Context(1, "--mock-data --fp16 --loss-scale 64", "--loss-scale 128"),
    "distributed": Context(
        1,
        "--mock-data --use-distributed-optimizer --overlap-grad-reduce",
        "--overlap-param-gather",
    ),
    "fused": Context(
        1,
        "--mock-data --use-distributed-optimizer --bf16",
        """
        --use-precision-aware-optimizer
        --use-precision-aware-optimizer --main-grads-dtype bf16
        --use-precision-aware-optimizer --exp-avg-dtype bf16
        --use-precision-aware-optimizer --exp-avg-sq-dtype bf16
        """,
    ),
    "fused bf16": Context(
        1,
        "--mock-data --use-distributed-optimizer --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16",
        "--exp-avg-dtype fp32\n--exp-avg-sq-dtype bf16",
    ),
    "corpus": Context(
        1,
        "--data-path {data}/corpus --split 8,1,1",
        """
        --data-path {data}/text_text_document
        --data-path 1 {data}/corpus 2 {data}/text_text_document
        --split 9,1,0
        --data-cache-path {other}
        --data-cache-path {other} --dataloader-defer-npy-index-mmap
        --mid-level-dataset-surplus 0.1
        --mock-data --data-path
        """,
    ),
    "corpora": Context(
        1,
        "--train-data-path {data}/corpus --valid-data-path {data}/corpus --test-data-path {data}/corpus",
        """
        --train-data-path {data}/text_text_document
        --valid-data-path {data}/text_text_document
        --test-data-path {data}/text_text_document
        --data-cache-path {other} --dataloader-fast-cache-load
        """,
    ),
    "expert parallel": Context(
        2,
        EP,
        """
        --expert-model-parallel-size 1
        --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1
        --tensor-model-parallel-size 2 --expert-model-parallel-size 1 --expert-tensor-parallel-size 2
        --context-parallel-size 2
        --pipeline-model-parallel-size 2 --expert-model-parallel-size 1
        --pipeline-model-parallel-size 2 --expert-model-parallel-size 1 --pipeline-model-parallel-layout Et|tL
        --moe-comm-alltoall p2p
        --moe-comm-node-size 1
        --moe-comm-codec int8
        --moe-comm-chunks 2
        --moe-parallel-schedule s1
        --balance-policy top2
        --use-tp-pp-dp-mapping
        """,
    ),
    "sequence parallel": Context(
        2,
        f"{EP} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel",
        "--moe-parallel-schedule s1",
    ),
    "s2": Context(
        2,
        "--mock-data --tensor-model-parallel-size 2 --disable-bias-linear --moe-parallel-schedule s2",
        "--no-moe-parallel-saa",
    ),
    "context parallel": Context(2, "--mock-data --context-parallel-size 2", "--cp-comm-type all_gather"),
    "codec": Context(2, f"{EP} --moe-comm-codec int8", "--moe-comm-codec-directions all"),
    "chunks": Context(2, f"{EP} --moe-comm-chunks 2", "--moe-comm-order sequential\n--moe-comm-refit-interval 50"),
    "stages": Context(
        2,
        "--mock-data --num-layers 4 --pipeline-model-parallel-size 2 --global-batch-size 4",
        """
        --no-overlap-p2p-communication
        --num-layers-per-virtual-pipeline-stage 1
        --num-virtual-stages-per-pipeline-rank 2
        --decoder-first-pipeline-num-layers 1
        --decoder-last-pipeline-num-layers 1
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
        --wgrad-deferral-limit 1
        """,
    ),
    "interleaved": Context(
        2,
        "--mock-data --num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--global-batch-size 8",
        "--microbatch-group-size-per-virtual-pipeline-stage 4\n--overlap-p2p-communication-warmup-flush",
    ),
    "full recompute": Context(
        2,
        "--mock-data --tensor-model-parallel-size 2 --disable-bias-linear --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
        "--distribute-saved-activations",
    ),
    "policy": Context(
        2,
        f"{EP} --balance-policy quota",
        """
        --balance-policy top2
        --balance-guest-slots 3
        --balance-interval 2
        --balance-load exact
        --balance-predictor ema
        --balance-capacities 1 2
        --balance-overlap blockwise
        --balance-ownership transfer
        --balance-profile auto
        --balance-calibrate on --balance-log-dir {other}
        --balance-explain
        --balance-log-dir {other}
        --balance-timeline {other}
        """,
    ),
    "pro_prophet": Context(
        2, f"{EP} --balance-policy pro_prophet", "--balance-alpha 0.4\n--balance-token-split local_first"
    ),
    "flexmoe": Context(
        2,
        f"{EP} --balance-policy flexmoe",
        "--balance-threshold 1.2\n--balance-metric variance\n--balance-vexperts-per-rank 8",
    ),
    "demi": Context(
        2,
        f"{EP} --balance-policy demi",
        "--balance-demi-slots 4\n--balance-demi-weights linear\n--balance-demi-hosts 2",
    ),
}

UNTRIED = {
    "a file that only sets other flags, or names the data": "yaml_cfg data_args_path per_split_data_args_path",
    "another tokenizer needs its files": "tokenizer_type tokenizer_model tokenizer_metadata vocab_file merge_file",
    "a service outside of this machine": "wandb_project",
    "another program than training": "dry_run",
    "CUDA, NCCL or Transformer Engine": """
        moe_expert_gemm moe_flex_rows moe_enable_deepep moe_permute_fusion moe_router_fusion record_memory_history
        use_te_activation_func defer_embedding_wgrad_compute average_in_collective""",
    "the stand-in for FusedAdam has no state in 16 bits other than bfloat16": "main_params_dtype",
    "8-bit training, which is not supported": "moe_router_padding_for_quantization moe_router_padding_for_fp8",
    "four ranks and two kinds of links": "hierarchical_context_parallel_sizes",
    "where the checkpoint is": "load",
}
"""Reason -> the fields whose flags are not changed in a run; their comparison is tested."""


def tried() -> set[str]:
    """Return the fields whose flags are in CONTEXTS, if this version of megatron-core has them."""
    actions = build_parser()._option_string_actions
    words = [word for context in CONTEXTS.values() for word in context.changes.split()]
    return {actions[word].dest for word in words if word in actions}


def fields() -> set[str]:
    """Return the fields of all supported flags."""
    shown = [action for action in build_parser()._actions if action.help is not argparse.SUPPRESS]
    return {action.dest for action in shown} - {"help"}


def base_of(context: Context) -> str:
    """Return the flags of the run that saves; files are in {data}, and {other} is a directory for output."""
    model = BASE.replace("--mock-data", "")
    if "--train-samples" in context.flags:
        model = model.replace("--train-iters 20", "")
    return f"{model} {context.flags}"
