"""Flags of Megatron's that have no effect or are refused, with the reasons: tables and one lookup.

Every other flag of Megatron's does what Megatron's documentation says. A reason completes the sentence `--flag: ...`.
"""

import functools
from collections.abc import Collection
from fnmatch import fnmatchcase

ACCEPTED = {
    **dict.fromkeys(
        ("--use-mcore-models", "--use-legacy-models", "--no-scatter-gather-tensors-in-pipeline",
         "--fp16-lm-cross-entropy", "--no-gradient-reduce-div-fusion", "--no-async-tensor-model-parallel-allreduce",
         "--disable-async-tensor-model-parallel-allreduce"),
        "has no effect on megatron-core's models, which are the only ones here",
    ),
    "--no-position-embedding": "has no effect with --position-embedding-type rope, which adds none to the embeddings",
    "--moe-extended-tp": "was removed from megatron-core; --expert-tensor-parallel-size sets how experts are split",
    "--use-flash-attn": "has no effect; --attention-backend selects the implementation",
    "--local-rank RANK": "has no effect; the launcher's LOCAL_RANK is used",
    **dict.fromkeys(
        ("--use-dist-ckpt", "--auto-detect-ckpt-format", "--dist-ckpt-format torch_dist"),
        "has no effect; checkpoints are always in --ckpt-format torch_dist",
    ),
    "--dist-ckpt-optim-fully-reshardable": "is always in effect: a checkpoint can be loaded in another layout",
    "--dist-ckpt-strictness assume_ok_unexpected|log_unexpected|log_all|raise_unexpected|ignore_all":
        "has no effect: loading stops at a tensor that the checkpoint lacks, and reads none that the run lacks",
    **dict.fromkeys(
        ("--no-use-tokenizer-model-from-checkpoint-args", "--disable-use-tokenizer-model-from-checkpoint-args"),
        "is always in effect: --tokenizer-model overrides the checkpoint's",
    ),
    "--ckpt-fully-parallel-save": "is the default; --no-ckpt-fully-parallel-save switches it off",
    **dict.fromkeys(
        ("--ckpt-assume-constant-structure", "--use-persistent-ckpt-worker", "--dist-ckpt-workers N",
         "--async-ckpt-cpu-priority N", "--async-ckpt-io-priority N", "--async-ckpt-use-cpu-shm"),
        "has no effect; how a checkpoint's plan and writers are reused is not adjustable",
    ),
    "--async-strategy mcore": "is always in effect with --async-save",
    **dict.fromkeys(
        ("--ckpt-fully-parallel-save-process-group GROUP", "--ckpt-fully-parallel-load-process-group GROUP",
         "--ckpt-fully-parallel-load-exchange-algo NAME"),
        "has no effect; how data-parallel ranks share a checkpoint is not adjustable",
    ),
    "--verify-integrity": "is always in effect: digests of the files are saved, and compared on loading",
    **dict.fromkeys(
        ("--no-ckpt-load-validate-sharding-integrity", "--disable-ckpt-load-validate-sharding-integrity"),
        "has no effect: loading always checks that all parts of a tensor are read",
    ),
    **dict.fromkeys(
        ("--no-stream-ckpt-dequant", "--disable-stream-ckpt-dequant"),
        "has no effect: no checkpoint has 8- or 4-bit weights",
    ),
    "--no-create-attention-mask-in-dataloader": "is always in effect: attention is causal by construction",
    "--dataloader-type single": "is always in effect: samples are read once, in order",
    "--disable-gloo-process-groups": "is always in effect: only --distributed-backend's groups are created",
    "--train-sync-interval N": "has no effect; host and device synchronize in every iteration",
    "--empty-unused-memory-level LEVEL": "has no effect: PyTorch keeps unused memory until it needs it for other sizes",
    "--te-rng-tracker": "has no effect without CUDA graphs, which are not supported",
    "--enable-experimental": "has no effect: the kernels that it allows are not used here",
    "--data-parallel-random-init": "has no effect: all data-parallel ranks start with the first one's weights",
    "--num-distributed-optimizer-instances N":
        "has no effect: one instance of the distributed optimizer spans all data-parallel ranks",
    **dict.fromkeys(
        ("--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute", "--ep-overlap-early-attn-memory-release",
         "--high-priority-a2a-comm-stream", "--overlap-dispatch-backward-with-experts-wgrad"),
        "has no effect: it splits megatron-core's own MoE layer; --moe-comm-chunks auto hides the exchange of tokens",
    ),
    **dict.fromkeys(
        ("--tp-comm-overlap", "--tp-comm-overlap-cfg FILE", "--tp-comm-overlap-rs-dgrad",
         "--tp-comm-bootstrap-backend BACKEND",
         *(f"--{no}-tp-comm-{what}" for no in ("no", "disable")
           for what in ("bulk-dgrad", "bulk-wgrad", "overlap-ag", "overlap-rs", "split-ag", "split-rs"))),
        "has no effect: Transformer Engine's user buffers are not set up, so tensor parallelism does not overlap",
    ),
    **dict.fromkeys(
        ("--straggler-minmax-count N", "--straggler-ctrlr-port PORT", "--disable-straggler-on-startup"),
        "has no effect without --log-straggler, which is refused",
    ),
    "--rerun-mode disabled": "is always in effect: no iteration is run twice",
    "--disable-msc": "is always in effect: files are plain files",
    "--tokenizer-hf-no-use-fast": "is the default; --tokenizer-hf-use-fast switches it off",
    "--tokenizer-hf-no-include-special-tokens": "is the default; --tokenizer-hf-include-special-tokens switches it off",
    **dict.fromkeys(
        ("--record-shapes", "--pytorch-profiler-collect-shapes", "--pytorch-profiler-collect-callstack"),
        "is always in effect with --profile",
    ),
    "--nvtx-ranges": "has no effect: --profile marks every operator with an NVTX range",
    "--no-one-logger": "is always in effect: nothing is sent to one-logger",
}  # fmt: skip
"""Flags without an effect: `--switch`, `--flag VALUE` (any value), or `--flag one|other` (these values only)."""

REFUSED = {
    # Tasks other than training a GPT on text
    "this program trains; it does not serve": """
        --inference-* --no-inference-* --enable-chunked-prefill --disable-chunked-prefill --decode-only-cuda-graphs
        --nccl-all-reduce-for-prefill --use-legacy-static-engine --max-tokens-to-oom --flash-decode
        --mlp-chunks-for-prefill --symmetric-ar-type --batch-invariant-mode --cache-mla-latents
        --moe-pad-experts-for-cuda-graph-inference --onnx-safe --num-speculative-tokens
        --use-same-sampling-seed-across-dp-ranks""",
    "reinforcement learning is not supported": """
        --rl-* --no-rl-* --grpo-* --langrl-* --no-langrl-* --perform-rl-step --refit-method
        --moe-enable-routing-replay""",
    "supervised fine-tuning on conversations is not supported": "--sft --sft-* --chat-template",
    "distillation is not supported": "--logits-load-* --logits-save-*",
    "only GPT models with self-attention are supported": """
        --bert-* --biencoder-* --block-data-path --embedding-path --evidence-data-path --ict-* --indexer-*
        --query-in-block-prob --retriever-* --titles-data-path --use-one-sent-docs --output-bert-embeddings --mask-prob
        --short-seq-prob --relative-attention-* --mamba-* --disable-mamba-* --is-hybrid-model --hybrid-attention-ratio
        --hybrid-mlp-ratio --hybrid-override-pattern --linear-* --dsa-* --no-dsa-* --disable-dsa-*
        --hybrid-layer-pattern --mtp-hybrid-override-pattern --experimental-attention-variant
        --heterogeneous-* --spec --mrope-section""",
    "images are not supported; this program trains on text": """
        --classes-fraction --data-per-class-fraction --dino-* --head-lr-mult --img-h --img-w --iter-per-epoch
        --mask-factor --mask-type --no-data-sharding --num-channels --num-classes --patch-dim --swin-* --vision-*
        --sample-rate""",
    # Parts of megatron-core and of Megatron-LM that are not wired up
    "latent experts are not supported": "--moe-latent-size",
    "8- and 4-bit training is not supported; use --bf16": """
        --fp8-* --fp4-* --no-fp8-wgrad --disable-fp8-wgrad --first-last-layers-bf16 --num-layers-at-* --te-precision-*
        --reuse-grad-buf-for-mxfp8-param-ag --keep-fp8-transpose-cache --use-kitchen* --kitchen-*""",
    "CUDA graphs are not supported: the number of routed tokens changes from step to step": """
        --cuda-graph-* --enable-cuda-graph --external-cuda-graph --optimizer-cuda-graph""",
    "it is for samples of different lengths, and all samples have --seq-length tokens; use --context-parallel-size": """
        --hybrid-context-parallel --max-seqlen-per-dp-cp-rank""",
    "FSDP is not supported; use --use-distributed-optimizer": """
        --create-all-gather-group --use-megatron-fsdp --use-torch-fsdp2 --torch-fsdp2-* --fsdp-*
        --data-parallel-sharding-strategy --outer-dp-sharding-strategy --enable-full-sharding-in-hsdp
        --megatron-fsdp-* --suggested-communication-unit-size
        --init-model-with-meta-device --no-strict-fsdp-* --disable-strict-fsdp-*""",
    "the first parameters are not gathered inside the optimizer's step; use --overlap-param-gather":
        "--overlap-param-gather-with-optimizer-step",
    "offloading is not supported; use recomputation (--recompute-granularity)": """
        --cpu-offloading* --no-cpu-offloading-* --disable-cpu-offloading-* --fine-grained-activation-offloading
        --offload-modules --min-offloaded-tensor-size --activation-offload-fraction --delay-offload-until-cuda-graph
        --delta-offload-bytes-across-pp-ranks --fine-grained-offloading-max-inflight-offloads
        --optimizer-cpu-offload --optimizer-offload-fraction --use-torch-optimizer-for-cpu-offload
        --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-* --disable-pin-cpu-*""",
    "Transformer Engine's user buffers are not set up, so tensor parallelism does not overlap; leave it out":
        "--tp-comm-atomic-* --tp-comm-overlap-disable-*",
    "special NCCL communicators are not supported; NCCL's own environment variables work": """
        --use-nccl-ub --disable-symmetric-registration --use-sharp --sharp-* --nccl-communicator-config-path
        --high-priority-stream-groups --pipeline-model-parallel-comm-backend""",
    "it needs a build of PyTorch with ring exchange, which is not published": "--use-ring-exchange-p2p",
    "weights are not clipped by their attention logits": "--qk-clip --qk-clip-*",
    "megatron-core's transformer layer does not implement it": "--apply-residual-connection-post-layernorm",
    "use --optimizer adam or sgd": "--muon-* --lion-* --no-use-layer-wise-param-layout",
    "maximal update parametrization is not supported; set --init-method-std and --lr for the model's width":
        "--use-mup --mup-*",
    "weights are split among tensor-parallel ranks only; use --expert-tensor-parallel-size for those of experts": """
        --tensor-parallel-num-weight-shards --expert-tensor-parallel-num-weight-shards""",
    "Transformer Engine's fused operations are not set up; leave it out": """
        --fused-residual-rmsnorm --use-transformer-engine-op-fuser --use-grouped-gemm-for-dense-mlp
        --use-grouped-gemm-for-shared-expert --moe-single-grouped-bias --moe-single-grouped-weight
        --moe-mlp-glu-interleave-size --moe-shared-expert-glu-interleave-size""",
    "--attention-backend selects the implementation, whose version is the installed one": "--flash-attention-version",
    "use --recompute-granularity selective --recompute-modules mlp to save memory": "--mlp-chunks-for-training",
    "use --recompute-granularity selective --recompute-modules moe_act to save memory": "--moe-paged-stash*",
    "use --moe-deepep-num-sms or --moe-hybridep-num-sms": "--moe-flex-dispatcher-num-sms",
    "of HybridEP's settings, only --moe-hybridep-num-sms is adjustable; leave it out": """
        --moe-hybridep-num-blocks-* --moe-hybridep-num-sms-preprocessing --moe-hybridep-pad-uneven-dispatch-inputs
        --moe-permute-fusion-into-hybridep""",
    "NCCL EP is not supported; use --moe-flex-dispatcher-backend deepep or hybridep": "--moe-ncclep-*",
    "use --moe-expert-capacity-factor, which is the capacity of one expert": "--moe-expert-rank-capacity-factor",
    "quantile balancing is not supported; use --moe-router-enable-expert-bias, which has no auxiliary loss either":
        "--moe-router-quantile-balancing-ema",
    "the layers for multi-token prediction train the whole model; leave it out": "--mtp-detach-heads",
    "every layer for multi-token prediction has its own weights; leave it out": "--mtp-use-repeated-layer",
    "yarn needs latent attention here: --multi-latent-attention --rope-type yarn; otherwise use --use-rope-scaling":
        "--yarn-* --no-yarn-*",
    "gradients are accumulated in one precision; use --accumulate-allreduce-grads-in-fp32 for all of them":
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
    "all weights are trained; leave it out": "--freeze-all-layers",
    "upcycling is not supported": "--moe-use-upcycling --moe-upcycling-granularity",
    "fill-in-the-middle data is not supported": "--fim-*",
    "documents that share a sample are not masked from each other; leave it out":
        "--reset-attention-mask --dataloader-inter-document-masking",
    "the data files themselves are read; leave it out": "--per-dataset-sequences-path",
    "object storage is not supported; copy the data to a file system":
        "--object-storage-cache-path --enable-msc",
    "all validation data is one blend, from which --eval-iters batches are drawn": """
        --full-validation --multiple-validation-sets --validation-set-names""",
    "validation has the batch sizes of training (--micro-batch-size, --global-batch-size); leave it out":
        "--eval-global-batch-size --eval-micro-batch-size",
    "the first validation comes after --eval-interval iterations; leave it out": "--start-eval-at-iter",
    "only --rampup-batch-size changes batch sizes": """
        --phase-transition-iterations --decrease-batch-size-if-needed --step-batch-size-schedule""",
    "this program always trains; leave it out": "--skip-train",
    "iterations are neither skipped nor run again": """
        --iterations-to-skip --result-rejected-tracker-filename --error-injection-*""",
    "checkpoints are written to --save in --ckpt-format torch_dist, in the layout of megatron-core 0.14 and later": """
        --ckpt-convert-* --dist-ckpt-save-pre-mcore-014 --distrib-optim-fully-reshardable-mem-efficient
        --load-main-params-from-ckpt""",
    "use --ckpt-step for the iteration to resume from, or --finetune to start at iteration 0":
        "--override-ckpt-iteration",
    "every checkpoint in --save is permanent; use --async-save and --keep-last": """
        --non-persistent-* --replication --replication-*""",
    "parallel sizes come from the command line; give them there": "--use-mp-args-from-checkpoint-args",
    "jobs are restarted by the launcher (torchrun --max-restarts, sbatch --requeue) with --load": """
        --inprocess-* --enable-ft-package --calc-ft-timeouts --ft-* --adlr-autoresume --adlr-autoresume-interval""",
    "one-logger is not supported; use --tensorboard-dir": "--one-logger-* --app-tag-run-*",
    "not reported by a training run; use NVIDIA's own tools (Nsight Systems, nvidia-smi)": """
        --log-straggler --run-workload-inspector-server --log-energy --gpu-sniff-test-interval""",
    "PyTorch's own environment variables (TORCH_FR_*, TORCH_NCCL_*) set up the flight recorder; leave it out":
        "--flight-recorder-* --no-flight-recorder-* --disable-flight-recorder-*",
    "--use-pytorch-profiler writes PyTorch's own format; leave it out": "--pytorch-profiler-collect-chakra",
    "--moe-routing-trace-path writes the chosen experts of every iteration and no tensors; leave it out":
        "--moe-routing-trace-capture-* --moe-routing-trace-dump-weights --moe-routing-trace-max-training-iters",
    "use --balance-log-dir, which writes the tokens of each expert": "--save-tokens-per-expert-interval",
    "debugging aids of Megatron-LM are not supported": """
        --check-weight-hash-across-dp-replicas-interval --dump-param-to-param-group-map --save-dgrads-interval
        --save-wgrads-interval --save-activations-interval --save-params-interval --fault-injector-*
        --fake-process-group --disable-jit-fuser --config-logger-dir""",
    "multi-token prediction belongs to the last stage, where --pipeline-model-parallel-layout puts it with `m`":
        "--mtp-standalone",
    "process groups are created at the start, with one timeout: --distributed-timeout-minutes": """
        --lazy-mpu-init --distributed-timeout-seconds-after-init""",
    "use --exit-signal-handler, which also saves a checkpoint": "--exit-signal-handler-for-training",
    "workers of the data loader get no handler; send the signal to the launcher's children only":
        "--exit-signal-handler-for-dataloader",
    # Harmful
    "it gives every expert-parallel rank the same experts; leave it out": "--use-cpu-initialization",
    # Megatron has, or had, another flag for the same purpose
    "removed upstream; use --micro-batch-size": "--batch-size",
    "removed upstream; use --tensor-model-parallel-size": "--model-parallel-size",
    "removed upstream; use --lr-warmup-fraction": "--warmup",
    "removed upstream; use --recompute-granularity full --recompute-method uniform --recompute-num-layers 1":
        "--checkpoint-activations",
    "use --num-layers": "--encoder-num-layers --decoder-num-layers",
    "use --seq-length": "--encoder-seq-length --decoder-seq-length",
    "use --ddp-bucket-size": "--ddp-num-buckets",
    "use --init-method-std": "--init-method-xavier-uniform",
    "use --swiglu, --squared-relu or neither (GELU)": "--openai-gelu",
    "use --apply-wd-to-qk-layernorm": "--no-weight-decay-cond-type",
    "megatron-core's tokenizers are used; leave it out": "--legacy-tokenizer",
    "use --tokenizer-special-tokens": "--tiktoken-special-tokens --vocab-extra-ids",
    "use --make-vocab-size-divisible-by 1, or --padded-vocab-size": "--no-pad-vocab-size --disable-pad-vocab-size",
    "white space is encoded as the tokenizer's model says; leave it out": """
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces""",
    "a NullTokenizer ends documents with token --vocab-size and pads none; leave it out":
        "--null-tokenizer-eod-id --null-tokenizer-pad-id",
    # Planned
    "not available yet": "--moe-router-force-biased --log-max-attention-logit",
}  # fmt: skip
"""Reason -> the flags that are refused for this reason; `*` matches any ending."""

IN_SOME_VERSIONS: dict[str, tuple[str, ...]] = {
    "--mla-down-proj-fusion": (),
    "--moe-use-legacy-grouped-gemm": (),
    "--moe-router-score-function": ("sqrtsoftplus",),
}
"""Flag that only some versions of megatron-core have -> (), or the values of it that only some versions accept."""

NOT_INSTALLED = "the installed megatron-core does not have it; leave it out, or install a version that has it"
"""Why such a flag or value is refused."""

REFUSED_VALUES = {
    "--ckpt-format": {
        **dict.fromkeys(
            ("torch", "torch_dcp"), "use torch_dist; Megatron-LM converts with --ckpt-convert-format torch_dist"
        ),
        "fsdp_dtensor": "FSDP is not supported; use torch_dist",
    },
    "--optimizer": dict.fromkeys(
        ("muon", "dist_muon", "adaptive_muon", "lion", "soap"), "not supported; use adam or sgd"
    ),
    "--moe-router-load-balancing-type": {
        "quantile_balancing": "not supported; use none with --moe-router-enable-expert-bias, or an auxiliary loss"
    },
    "--moe-flex-dispatcher-backend": {"ncclep": "not supported; use deepep or hybridep"},
    "--position-embedding-type": {
        **dict.fromkeys(("mrope", "relative"), "only GPT models are supported; use rope, learned_absolute or none"),
        "yarn": "yarn needs latent attention here: --multi-latent-attention --rope-type yarn; otherwise use rope with "
        "--use-rope-scaling",
    },
    "--transformer-impl": {"inference_optimized": "this program trains; use local or transformer_engine"},
    "--tokenizer-type": {
        **dict.fromkeys(
            ("BertWordPieceLowerCase", "BertWordPieceCase"), "only GPT models are supported; use SentencePieceTokenizer"
        ),
        **dict.fromkeys(
            ("MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer"),
            "images and conversations are not supported; use HuggingFaceTokenizer",
        ),
    },
}
"""Flag -> the choices of upstream's that are refused -> the reason."""

NO_EFFECT_WITHOUT = {
    "mtp_num_layers": "mtp_loss_scaling_factor",
    "group_query_attention": "num_query_groups",
    "position_embedding_type rope": """
        rotary_base rotary_percent rotary_interleaved rotary_seq_len_interpolation_factor no_rope_freq
        use_rope_scaling""",
    "use_rope_scaling": "rope_scaling_factor",
    "window_size": "window_attn_skip_freq",
    "cross_entropy_loss_fusion": "cross_entropy_fusion_impl",
    "optimizer adam": "adam_beta1 adam_beta2 adam_eps",
    "optimizer sgd": "sgd_momentum",
    "decoupled_lr": "decoupled_min_lr",
    "fp16": "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    "lr_decay_style WSD": "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
    "recompute_granularity": "recompute_method recompute_num_layers recompute_modules",
    "multi_latent_attention": """
        q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_scaling_factor
        original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim""",
    "moe_router_enable_expert_bias": "moe_router_bias_update_rate",
    "moe_router_num_groups": "moe_router_group_score_topk",
    "moe_expert_capacity_factor": "moe_token_drop_policy",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_gate moe_shared_expert_overlap",
    "eval_interval": "eval_iters",
    "exit_signal_handler": "exit_signal",
    "manual_gc": "manual_gc_interval",
    "tensorboard_dir": "tensorboard_queue_size",
    "tensorboard_dir|wandb_project": """
        tensorboard_log_interval log_validation_ppl_to_tensorboard log_world_size_to_tensorboard
        log_memory_to_tensorboard moe_per_layer_logging""",
    "wandb_project": "wandb_exp_name wandb_save_dir wandb_entity",
    "timing_log_level": "log_timers_to_tensorboard timing_log_option",
    "profile": "use_pytorch_profiler profile_step_start profile_step_end profile_ranks",
    "record_memory_history": "memory_snapshot_path",
    "save": "save_interval keep_last save_retain_interval async_save no_save_optim no_save_rng log_progress",
    "load": "ckpt_step no_load_optim no_load_rng exit_on_missing_checkpoint ckpt_fully_parallel_load",
}
"""A field, a field and its value, or alternative fields -> the fields whose flags have no effect without it, which a
notice reports."""


@functools.cache
def refusal(flag: str) -> str | None:
    """Return the reason why a flag is refused, or None if it is accepted or unknown."""
    patterns = ((pattern, reason) for reason, names in REFUSED.items() for pattern in names.split())
    return next((reason for pattern, reason in patterns if fnmatchcase(flag, pattern)), None)


def why_unknown(flag: str) -> str | None:
    """Return the reason why a flag of Megatron's is not available; None if Megatron has no such flag."""
    return refusal(flag) or (NOT_INSTALLED if flag in IN_SOME_VERSIONS else None)


def refused_values(flag: str, choices: Collection[str]) -> dict[str, str]:
    """Return the values of a flag that are refused, with the reasons; `choices` are megatron-core's, as installed."""
    absent = (value for value in IN_SOME_VERSIONS.get(flag, ()) if value not in choices)
    return REFUSED_VALUES.get(flag, {}) | dict.fromkeys(absent, NOT_INSTALLED)
