"""Groups of `--help`: the fields that have flags, and the help of megatron-core's fields.

The help of a field is its docstring; of megatron-core's docstrings, it is the first sentence. Where this sentence does
not tell what giving the flag does, because the flag turns the field off or the values need an explanation, `HELP` has
the text.
"""

import re
from collections.abc import Callable, Mapping

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_balance.comm.codecs import CODECS
from megatron_balance.comm.registry import ALL_TO_ALLS
from megatron_balance.config import run_config as ours
from megatron_balance.config.flags import field_docs, with_values
from megatron_balance.config.log_config import LogConfig, ProfilingConfig
from megatron_balance.planning.policies import registered

MEGATRON_CLASSES = (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)

DIVIDED = (ours.ModelConfig, ours.LaunchConfig, *MEGATRON_CLASSES)
"""Dataclasses whose fields are divided among groups. The first one that has a field defines its flag."""

NAMED_VALUES: dict[str, Callable[[], Mapping[str, type]]] = {
    "balance_policy": registered,
    "moe_comm_alltoall": lambda: ALL_TO_ALLS,
    "moe_comm_codec": lambda: CODECS,
}
"""Fields whose value is the name of one of these classes; a line of the help is the summary of a class's docstring."""

OUR_GROUPS = {
    "expert balancing (megatron_balance)": ours.BalanceConfig,
    "expert communication (megatron_balance)": ours.CommConfig,
}
"""The groups that other programs can have, too (app/integrate.py)."""

GROUPS: dict[str, type | str] = {
    **OUR_GROUPS,
    "model": """
        num_layers hidden_size ffn_hidden_size seq_length swiglu quick_geglu squared_relu normalization
        layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias glu_linear_offset
        activation_func_clamp_value hidden_dropout untie_embeddings_and_output_weights make_vocab_size_divisible_by
        padded_vocab_size init_method_std embedding_init_method_std perform_initialization mtp_num_layers
        mtp_loss_scaling_factor calculate_per_token_loss""",
    "attention": """
        num_attention_heads group_query_attention num_query_groups kv_channels attention_dropout attention_backend
        softmax_type attention_output_gate qk_layernorm qk_layernorm_across_heads qk_l2_norm
        apply_query_key_layer_scaling position_embedding_type max_position_embeddings rotary_base rotary_percent
        rotary_interleaved use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor no_rope_freq
        window_size window_attn_skip_freq test_mode multi_latent_attention""",
    "mixture of experts": """
        num_moe_experts moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size
        moe_shared_expert_gate moe_shared_expert_overlap moe_router_topk moe_router_load_balancing_type
        moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_router_score_function moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_group_score_topk
        moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_dtype moe_router_force_load_balancing
        moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_token_dispatcher_type
        moe_flex_dispatcher_backend moe_enable_deepep moe_deepep_num_sms moe_hybridep_num_sms moe_grouped_gemm
        moe_use_legacy_grouped_gemm moe_apply_probs_on_input moe_permute_fusion moe_router_fusion
        moe_router_padding_for_quantization moe_router_padding_for_fp8 moe_layer_recompute moe_per_layer_logging""",
    "multi-latent attention": """
        q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor
        original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim mla_down_proj_fusion""",
    "parallelism": """
        tensor_model_parallel_size pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage
        num_virtual_stages_per_pipeline_rank expert_model_parallel_size expert_tensor_parallel_size
        context_parallel_size hierarchical_context_parallel_sizes cp_comm_type sequence_parallel
        clone_scatter_output_in_embedding overlap_p2p_comm overlap_p2p_comm_warmup_flush
        microbatch_group_size_per_vp_stage pipeline_model_parallel_layout num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        defer_embedding_wgrad_compute wgrad_deferral_limit""",
    "data parallelism": """
        use_distributed_optimizer overlap_grad_reduce overlap_param_gather align_grad_reduce align_param_gather
        grad_reduce_in_fp32 grad_reduce_in_bf16 bucket_size pad_buckets_for_high_nccl_busbw
        reduce_scatter_with_fp32_accumulation average_in_collective check_for_nan_in_grad check_for_large_grads""",
    "precision": """
        bf16 fp16 fp32_residual_connection attention_softmax_in_fp32 disable_bf16_reduced_precision_matmul
        deterministic_mode""",
    "recomputation": """
        recompute_granularity recompute_modules recompute_method recompute_num_layers distribute_saved_activations""",
    "training": ours.TrainConfig,
    "learning rate and weight decay": ours.SchedulerConfig,
    "optimizer": """
        optimizer lr min_lr decoupled_lr decoupled_min_lr weight_decay apply_wd_to_qk_layernorm clip_grad adam_beta1
        adam_beta2 adam_eps sgd_momentum loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
        use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
        log_num_zeros_in_grad""",
    "data": ours.DataConfig,
    "tokenizer": ours.TokenizerConfig,
    "checkpointing": ours.CheckpointConfig,
    "kernels": """
        transformer_impl bias_gelu_fusion bias_swiglu_fusion masked_softmax_fusion bias_dropout_fusion
        apply_rope_fusion persist_layer_norm gradient_accumulation_fusion cross_entropy_loss_fusion
        cross_entropy_fusion_impl use_te_activation_func use_fused_weighted_squared_relu""",
    "processes": """
        distributed_backend use_tp_pp_dp_mapping distributed_timeout_minutes dry_run cluster
        barrier_with_L1_time""",
    "logging": LogConfig,
    "profiling": ProfilingConfig,
}
"""Titles -> a dataclass whose fields the group shows, or names of fields of the divided dataclasses. Other fields of
megatron-core's have no flags: their flags are refused or have no effect, or they are internal to megatron-core. Fields
that only some versions have are left out of the others."""

HELP = {
    "ffn_hidden_size": "Inner size of dense MLPs. Default: 4 times --hidden-size; with --swiglu, two thirds of that, "
    "rounded down to a multiple of 64.",
    "normalization": "Kind of normalization.",
    "add_bias_linear": "Do not add biases in linear layers.",
    "activation_func_clamp_value": "Clamp the inputs of --quick-geglu to this magnitude.",
    "init_method_std": "Standard deviation of the initial weights.",
    "embedding_init_method_std": "Standard deviation of the initial embeddings. Default: --init-method-std.",
    "perform_initialization": "Do not initialize the weights, which a checkpoint will replace.",
    "calculate_per_token_loss": "Average the loss over the unmasked tokens of the global batch, instead of over its "
    "microbatches.",
    "kv_channels": "Size of an attention head. Default: --hidden-size / --num-attention-heads.",
    "attention_backend": "Implementation of attention. auto: Transformer Engine's choice. local: megatron-core's own.",
    "softmax_type": "Softmax of attention. vanilla: the usual one. off-by-one: with 1 added to the denominator. "
    "learnable: with a learned number added per head.",
    "apply_query_key_layer_scaling": "Divide attention scores by the layer's number, for stability in fp16; implies "
    "--attention-softmax-in-fp32.",
    "rotary_interleaved": "Rotate pairs of neighboring dimensions (RoFormer), not pairs from both halves (Llama).",
    "no_rope_freq": "Layers without rotary embeddings. N: every N-th layer. Otherwise a list with 1 for such a layer "
    "and 0 for the others, such as [0,1,1,0].",
    "window_size": "Attend only to this many tokens on the left and on the right, such as 128,0; -1: without limit.",
    "window_attn_skip_freq": "Layers with full attention despite --window-size. N: every N-th layer. Otherwise a "
    "list with 0 for full attention and 1 for a window, such as [1,1,1,0].",
    "test_mode": "Check in each attention layer that all ranks normalize queries and keys with the same weights.",
    "q_lora_rank": "Rank of the compressed queries. Default: queries are not compressed.",
    "rope_type": "Kind of rotary embeddings. Default: yarn.",
    "mla_down_proj_fusion": "Compute the down projections of queries, keys and values in one matrix product.",
    "num_moe_experts": "Number of experts in an MoE layer. Default: the model is dense.",
    "moe_layer_freq": "Which layers are MoE layers. N: every N-th layer. Otherwise a list with 1 for an MoE layer "
    "and 0 for a dense one, such as ([0]*1+[1]*3).",
    "moe_ffn_hidden_size": "Inner size of an expert. Default: --ffn-hidden-size.",
    "moe_shared_expert_intermediate_size": "Inner size of all shared experts together. Default: no shared expert.",
    "moe_shared_expert_gate": "Multiply the output of the shared experts by a learned gate.",
    "moe_shared_expert_overlap": "Compute the shared experts while tokens are exchanged.",
    "moe_router_load_balancing_type": "How the router is trained to balance the load; several auxiliary losses may "
    "be combined.\n"
    "- aux_loss: auxiliary loss of each microbatch (GShard, Switch Transformer).\n"
    "- seq_aux_loss: auxiliary loss of each sample (DeepSeek-V2, DeepSeek-V3).\n"
    "- global_aux_loss: auxiliary loss of the global batch.\n"
    "- sinkhorn: Sinkhorn routing (S-BASE), without a loss.\n"
    "- none: no balancing.",
    "moe_z_loss_coeff": "Factor of the router's z-loss; 0.001 is a usual value. Default: no z-loss.",
    "moe_router_pre_softmax": "Compute the scores before the experts are chosen, not over the chosen ones alone.",
    "moe_router_topk_scaling_factor": "Factor of the scores of the chosen experts. Default: scores are not scaled.",
    "moe_router_num_groups": "Number of groups of experts, in group-limited routing: a token first chooses "
    "--moe-router-group-topk groups, then experts in them. Default: routing is not group-limited.",
    "moe_router_enable_expert_bias": "Balance without auxiliary loss: choose experts by score plus a bias, which is "
    "adjusted in every iteration (https://arxiv.org/abs/2408.15664).",
    "moe_router_bias_update_rate": "Amount by which --moe-router-enable-expert-bias adjusts a bias.",
    "moe_router_dtype": "Precision of the router. Default: that of the model.",
    "moe_expert_capacity_factor": "Drop the tokens of an expert beyond this many times the mean. Default: drop none.",
    "moe_pad_expert_input_to_capacity": "Pad each expert's tokens to its capacity.",
    "moe_token_drop_policy": "Tokens that are dropped. probs: those with the lowest scores. position: the last ones.",
    "moe_token_dispatcher_type": "How tokens travel to experts; alltoall if a --moe-comm-* flag decides about it. "
    "allgather: every rank gets all tokens. alltoall: a rank gets the tokens of its experts. flex: as alltoall, by "
    "--moe-flex-dispatcher-backend.",
    "moe_enable_deepep": "Use DeepEP; --moe-flex-dispatcher-backend deepep is the newer flag.",
    "moe_grouped_gemm": "Compute a rank's experts in one grouped matrix product instead of one after the other.",
    "moe_router_fusion": "Use Transformer Engine's fused kernels for routing and auxiliary losses.",
    "moe_router_padding_for_quantization": "Pad each expert's number of tokens to a multiple of 16 or 32, as 8-bit "
    "products need it.",
    "moe_router_padding_for_fp8": "Older name of --moe-router-padding-for-quantization.",
    "moe_layer_recompute": "Recompute whole MoE layers in the backward pass, to save memory.",
    "moe_per_layer_logging": "Log the auxiliary losses and the z-loss of each layer.",
    "tensor_model_parallel_size": "Number of ranks that share each layer's matrices.",
    "pipeline_model_parallel_size": "Number of pipeline stages, which share the layers.",
    "expert_model_parallel_size": "Number of ranks that share the experts of an MoE layer.",
    "expert_tensor_parallel_size": "Number of ranks that share an expert's matrices. Default: "
    "--tensor-model-parallel-size.",
    "hierarchical_context_parallel_sizes": "With --cp-comm-type a2a+p2p, the number of ranks in an a2a group, and "
    "the number of groups.",
    "cp_comm_type": "How context-parallel ranks communicate.\n"
    "- p2p: pass keys and values around a ring, overlapped with attention.\n"
    "- all_gather: gather all keys and values before attention.\n"
    "- a2a: exchange tokens for heads, as DeepSpeed-Ulysses does.\n"
    "- a2a+p2p: a2a within groups of ranks, p2p between groups.",
    "sequence_parallel": "With tensor parallelism, split the tokens of normalizations and dropout among the ranks.",
    "clone_scatter_output_in_embedding": "With --sequence-parallel, do not copy a rank's part of the embeddings, so "
    "that all of them stay in memory.",
    "overlap_p2p_comm": "Do not overlap messages between pipeline stages with computation.",
    "microbatch_group_size_per_vp_stage": "Number of consecutive microbatches that a virtual pipeline stage "
    "processes. Default: --pipeline-model-parallel-size.",
    "pipeline_model_parallel_layout": "Layers of each pipeline stage, such as Et|(tt|)*3tmL. E is the embedding, t a "
    "transformer layer, m a layer for multi-token prediction, L the loss, and | the end of a stage.",
    "defer_embedding_wgrad_compute": "Compute the weight gradients of the output layer while the pipeline drains.",
    "wgrad_deferral_limit": "Number of microbatches that --defer-embedding-wgrad-compute defers; 0: all.",
    "use_distributed_optimizer": "Split the optimizer's state among data-parallel ranks.",
    "align_param_gather": "Let each pipeline stage gather weights when it needs them, not at the same time as the "
    "others.",
    "bucket_size": "Maximum number of parameters in a bucket, whose gradients are reduced together. Default: "
    "1,000,000 times the data-parallel size, at least 40,000,000.",
    "pad_buckets_for_high_nccl_busbw": "Pad buckets to a multiple of 2^16 parameters, for NCCL's bandwidth on many "
    "ranks.",
    "reduce_scatter_with_fp32_accumulation": "Send gradients in low precision but add them in float32.",
    "average_in_collective": "Let the collective average gradients, instead of dividing them before it sums.",
    "check_for_nan_in_grad": "Do not check losses and gradients for NaN and infinity before a step.",
    "disable_bf16_reduced_precision_matmul": "Do not let bfloat16 matrix products add up in reduced precision.",
    "deterministic_mode": "Use only deterministic kernels, which are slower.",
    "recompute_granularity": "What the backward pass recomputes to save memory. selective: --recompute-modules. "
    "full: whole layers, by --recompute-method. Default: nothing.",
    "recompute_modules": "Parts of a layer that --recompute-granularity selective recomputes: core_attn, layernorm, "
    "mla_up_proj, mlp, moe, moe_act, shared_experts. Default: core_attn.",
    "recompute_method": "Layers that --recompute-granularity full recomputes. uniform: all of them, in units of "
    "--recompute-num-layers. block: the first --recompute-num-layers of each pipeline stage.",
    "recompute_num_layers": "Number of layers of --recompute-method: per unit or per pipeline stage.",
    "optimizer": "Kind of optimizer.",
    "lr": "Maximum learning rate, which is reached at the end of the warmup.",
    "use_precision_aware_optimizer": "Let the optimizer keep gradients, main weights and its state in the precisions "
    "of --main-grads-dtype, --main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype.",
    "transformer_impl": "Implementation of layers. local: megatron-core's own. transformer_engine: NVIDIA's, where "
    "it is installed.",
    "masked_softmax_fusion": "Do not fuse attention's scaling, mask and softmax.",
    "bias_dropout_fusion": "Do not fuse bias, dropout and residual connection.",
    "apply_rope_fusion": "Do not use a fused kernel for rotary embeddings.",
    "persist_layer_norm": "Do not use Apex's persistent LayerNorm kernel, which has only some hidden sizes.",
    "gradient_accumulation_fusion": "Do not add weight gradients in the matrix product itself, for which Apex is "
    "needed.",
    "cross_entropy_loss_fusion": "Use a fused kernel for the loss.",
    "cross_entropy_fusion_impl": "Kernel of --cross-entropy-loss-fusion. native: megatron-core's. te: Transformer "
    "Engine's.",
    "barrier_with_L1_time": "Do not let ranks wait for each other before and after what --timing-log-level 1 times.",
}
"""Help of fields whose docstring does not tell what giving the flag does."""


def field_help(cls: type) -> dict[str, str]:
    """Return the help of a dataclass's fields, by name."""
    docs = field_docs(cls)
    if cls in MEGATRON_CLASSES:
        return {name: HELP.get(name) or _first_sentence(doc) for name, doc in docs.items()} | HELP
    named = {name: with_values(docs[name], known()) for name, known in NAMED_VALUES.items() if name in docs}
    return docs | named


def _first_sentence(doc: str) -> str:
    """Return the first sentence of one of megatron-core's docstrings, which may begin with "If true, "."""
    text = re.sub(r"^(If set to True|If true|If set|Whether to),? ", "", doc, flags=re.IGNORECASE)
    sentence = re.split(r"(?<=\.)\s", text, maxsplit=1)[0].rstrip(".")
    return f"{sentence[:1].upper()}{sentence[1:]}."
