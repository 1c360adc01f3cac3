"""Groups of `--help` for the flags of models and megatron-core's dataclasses, with the help of the latter.

megatron-core's docstrings describe the values of fields in Python ("If True, ..."), which does not fit switches whose
flag turns the field off, and some are a page long. Each text here describes what giving the flag does.
"""

from collections.abc import Mapping

OURS = None
"""The help is the docstring of the field in our own dataclass."""

MODEL: dict[str, str | None] = {
    "num_layers": "Number of transformer layers.",
    "hidden_size": "Size of the hidden states.",
    "ffn_hidden_size": "Inner size of dense MLPs. Default: 4 times --hidden-size; with --swiglu, two thirds of that, "
    "rounded down to a multiple of 64.",
    **dict.fromkeys(("seq_length", "swiglu", "quick_geglu", "squared_relu"), OURS),
    "normalization": "Kind of normalization.",
    "layernorm_epsilon": "Epsilon of the normalizations.",
    "layernorm_zero_centered_gamma": "Store the weights of LayerNorms minus 1, for numerical stability.",
    "add_bias_linear": "Do not add biases in linear layers.",
    "add_qkv_bias": "Add a bias to queries, keys and values, also with --disable-bias-linear.",
    "glu_linear_offset": "Number that is added to the linear half of a gated activation.",
    "activation_func_clamp_value": "Clamp the inputs of --quick-geglu to this magnitude.",
    "hidden_dropout": "Dropout probability of hidden states.",
    **dict.fromkeys(("untie_embeddings_and_output_weights", "make_vocab_size_divisible_by", "padded_vocab_size"), OURS),
    "init_method_std": "Standard deviation of the initial weights.",
    "embedding_init_method_std": "Standard deviation of the initial embeddings. Default: --init-method-std.",
    "perform_initialization": "Do not initialize the weights, which a checkpoint will replace.",
    "mtp_num_layers": "Number of multi-token prediction layers, each of which predicts one more token.",
    "mtp_loss_scaling_factor": "Factor of the mean multi-token prediction loss in the total loss.",
    "calculate_per_token_loss": "Average the loss over the unmasked tokens of the global batch, instead of over its "
    "microbatches.",
}

ATTENTION: dict[str, str | None] = {
    "num_attention_heads": "Number of attention heads.",
    "group_query_attention": OURS,
    "num_query_groups": "Number of groups of query heads that share keys and values, with --group-query-attention.",
    "kv_channels": "Size of an attention head. Default: --hidden-size / --num-attention-heads.",
    "attention_dropout": "Dropout probability of attention weights.",
    "attention_backend": "Implementation of attention. auto: Transformer Engine's choice. local: megatron-core's own.",
    "softmax_type": "Softmax of attention. vanilla: the usual one. off-by-one: with 1 added to the denominator. "
    "learnable: with a learned number added per head.",
    "attention_output_gate": "Multiply the output of attention by a learned gate.",
    "qk_layernorm": "Normalize queries and keys by --normalization.",
    "qk_layernorm_across_heads": OURS,
    "qk_l2_norm": "Normalize queries and keys by their L2 norm, as Llama 4 does.",
    "apply_query_key_layer_scaling": "Divide attention scores by the layer's number, for stability in fp16; implies "
    "--attention-softmax-in-fp32.",
    **dict.fromkeys(("position_embedding_type", "max_position_embeddings", "rotary_base", "rotary_percent"), OURS),
    "rotary_interleaved": "Rotate pairs of neighboring dimensions (RoFormer), not pairs from both halves (Llama).",
    **dict.fromkeys(("use_rope_scaling", "rope_scaling_factor", "rotary_seq_len_interpolation_factor"), OURS),
    "no_rope_freq": "Layers without rotary embeddings. N: every N-th layer. Otherwise a list with 1 for such a layer "
    "and 0 for the others, such as [0,1,1,0].",
    "window_size": "Attend only to this many tokens on the left and on the right, such as 128,0; -1: without limit.",
    "window_attn_skip_freq": "Layers with full attention despite --window-size. N: every N-th layer. Otherwise a list "
    "with 0 for full attention and 1 for a window, such as [1,1,1,0].",
    "test_mode": "Check in each attention layer that all ranks normalize queries and keys with the same weights.",
    "multi_latent_attention": "Use multi-latent attention, as DeepSeek-V2 does.",
}

LATENT_ATTENTION = {
    "q_lora_rank": "Rank of the compressed queries. Default: queries are not compressed.",
    "kv_lora_rank": "Rank of the compressed keys and values.",
    "qk_head_dim": "Size of a query or key head without its rotary part.",
    "qk_pos_emb_head_dim": "Size of the rotary part of a query or key head.",
    "v_head_dim": "Size of a value head.",
    "rope_type": "Kind of rotary embeddings. Default: yarn.",
    "rotary_scaling_factor": "Factor by which yarn extends the context.",
    "original_max_position_embeddings": "Context length before the extension by yarn.",
    "beta_fast": "Number of rotations above which yarn leaves a dimension unchanged.",
    "beta_slow": "Number of rotations below which yarn interpolates a dimension fully.",
    "mscale": "Coefficient of yarn's scaling of rotary embeddings.",
    "mscale_all_dim": "Coefficient of yarn's scaling of attention scores.",
    "mla_down_proj_fusion": "Compute the down projections of queries, keys and values in one matrix product.",
}

EXPERTS: dict[str, str | None] = {
    "num_moe_experts": "Number of experts in an MoE layer. Default: the model is dense.",
    "moe_layer_freq": "Which layers are MoE layers. N: every N-th layer. Otherwise a list with 1 for an MoE layer and "
    "0 for a dense one, such as ([0]*1+[1]*3).",
    "moe_ffn_hidden_size": "Inner size of an expert. Default: --ffn-hidden-size.",
    "moe_shared_expert_intermediate_size": "Inner size of all shared experts together. Default: no shared expert.",
    "moe_shared_expert_gate": "Multiply the output of the shared experts by a learned gate.",
    "moe_shared_expert_overlap": "Compute the shared experts while tokens are exchanged.",
    "moe_router_topk": "Number of experts per token.",
    "moe_router_load_balancing_type": "How the router is trained to balance the load; several auxiliary losses may be "
    "combined.\n"
    "- aux_loss: auxiliary loss of each microbatch (GShard, Switch Transformer).\n"
    "- seq_aux_loss: auxiliary loss of each sample (DeepSeek-V2, DeepSeek-V3).\n"
    "- global_aux_loss: auxiliary loss of the global batch.\n"
    "- sinkhorn: Sinkhorn routing (S-BASE), without a loss.\n"
    "- none: no balancing.",
    "moe_aux_loss_coeff": "Factor of each auxiliary loss, in the order of --moe-router-load-balancing-type; 0.01 is a "
    "usual value.",
    "moe_z_loss_coeff": "Factor of the router's z-loss; 0.001 is a usual value. Default: no z-loss.",
    "moe_input_jitter_eps": "Multiply the router's input by random numbers from 1-X to 1+X.",
    "moe_router_score_function": "Function from the router's logits to scores.",
    "moe_router_pre_softmax": "Compute the scores before the experts are chosen, not over the chosen ones alone.",
    "moe_router_topk_scaling_factor": "Factor of the scores of the chosen experts. Default: scores are not scaled.",
    "moe_router_num_groups": "Number of groups of experts, in group-limited routing: a token first chooses "
    "--moe-router-group-topk groups, then experts in them. Default: routing is not group-limited.",
    "moe_router_group_topk": "Number of groups that a token chooses.",
    "moe_router_group_score_topk": OURS,
    "moe_router_enable_expert_bias": "Balance without auxiliary loss: choose experts by score plus a bias, which is "
    "adjusted in every iteration (https://arxiv.org/abs/2408.15664).",
    "moe_router_bias_update_rate": "Amount by which --moe-router-enable-expert-bias adjusts a bias.",
    "moe_router_dtype": "Precision of the router. Default: that of the model.",
    "moe_router_force_load_balancing": "Route by random logits instead of the router's, for benchmarks.",
    "moe_expert_capacity_factor": "Drop the tokens of an expert beyond this many times the mean. Default: drop none.",
    "moe_pad_expert_input_to_capacity": "Pad each expert's tokens to its capacity.",
    "moe_token_drop_policy": "Tokens that are dropped. probs: those with the lowest scores. position: the last ones.",
    "moe_token_dispatcher_type": "How tokens travel to experts; alltoall if a --moe-comm-* flag decides about it. "
    "allgather: every rank gets all tokens. alltoall: a rank gets the tokens of its experts. flex: as alltoall, by "
    "--moe-flex-dispatcher-backend.",
    "moe_flex_dispatcher_backend": "Library of --moe-token-dispatcher-type flex.",
    "moe_enable_deepep": "Use DeepEP; --moe-flex-dispatcher-backend deepep is the newer flag.",
    "moe_deepep_num_sms": "Number of a GPU's multiprocessors that DeepEP uses.",
    "moe_hybridep_num_sms": "Number of a GPU's multiprocessors that HybridEP uses.",
    "moe_grouped_gemm": "Compute a rank's experts in one grouped matrix product instead of one after the other.",
    "moe_use_legacy_grouped_gemm": "Use megatron-core's older grouped products instead of Transformer Engine's.",
    "moe_apply_probs_on_input": "Multiply the inputs of experts by the scores, not their activations; needs "
    "--moe-router-topk 1.",
    "moe_permute_fusion": "Use fused kernels to reorder tokens.",
    "moe_router_fusion": "Use Transformer Engine's fused kernels for routing and auxiliary losses.",
    "moe_router_padding_for_quantization": "Pad each expert's number of tokens to a multiple of 16 or 32, as 8-bit "
    "products need it.",
    "moe_router_padding_for_fp8": "Older name of --moe-router-padding-for-quantization.",
    "moe_layer_recompute": "Recompute whole MoE layers in the backward pass, to save memory.",
    "moe_per_layer_logging": "Log the auxiliary losses and the z-loss of each layer.",
}

PARALLELISM: dict[str, str | None] = {
    "tensor_model_parallel_size": "Number of ranks that share each layer's matrices.",
    "pipeline_model_parallel_size": "Number of pipeline stages, which share the layers.",
    **dict.fromkeys(("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"), OURS),
    "expert_model_parallel_size": "Number of ranks that share the experts of an MoE layer.",
    "expert_tensor_parallel_size": "Number of ranks that share an expert's matrices. Default: "
    "--tensor-model-parallel-size.",
    "context_parallel_size": "Number of ranks that share each sample's tokens.",
    "hierarchical_context_parallel_sizes": "With --cp-comm-type a2a+p2p, the number of ranks in an a2a group, and the "
    "number of groups.",
    "cp_comm_type": "How context-parallel ranks communicate.\n"
    "- p2p: pass keys and values around a ring, overlapped with attention.\n"
    "- all_gather: gather all keys and values before attention.\n"
    "- a2a: exchange tokens for heads, as DeepSpeed-Ulysses does.\n"
    "- a2a+p2p: a2a within groups of ranks, p2p between groups.",
    "sequence_parallel": "With tensor parallelism, split the tokens of normalizations and dropout among the ranks.",
    "clone_scatter_output_in_embedding": "With --sequence-parallel, do not copy a rank's part of the embeddings, so "
    "that all of them stay in memory.",
    "overlap_p2p_comm": "Do not overlap messages between pipeline stages with computation.",
    "overlap_p2p_comm_warmup_flush": "Also overlap messages between pipeline stages in the warm-up and flush phases.",
    "microbatch_group_size_per_vp_stage": "Number of consecutive microbatches that a virtual pipeline stage processes. "
    "Default: --pipeline-model-parallel-size.",
    "pipeline_model_parallel_layout": "Layers of each pipeline stage, such as Et|(tt|)*3tmL. E is the embedding, t a "
    "transformer layer, m a layer for multi-token prediction, L the loss, and | the end of a stage.",
    "num_layers_in_first_pipeline_stage": "Number of layers in the first pipeline stage. Default: as many as in the "
    "others.",
    "num_layers_in_last_pipeline_stage": "Number of layers in the last pipeline stage. Default: as many as in the "
    "others.",
    "account_for_embedding_in_pipeline_split": "Count the embedding as a layer when layers are divided among stages.",
    "account_for_loss_in_pipeline_split": "Count the output layer as a layer when layers are divided among stages.",
    "defer_embedding_wgrad_compute": "Compute the weight gradients of the output layer while the pipeline drains.",
    "wgrad_deferral_limit": "Number of microbatches that --defer-embedding-wgrad-compute defers; 0: all.",
}

DATA_PARALLELISM: dict[str, str | None] = {
    "use_distributed_optimizer": "Split the optimizer's state among data-parallel ranks.",
    "overlap_grad_reduce": "Overlap the reduction of gradients with the backward pass.",
    "overlap_param_gather": "With --use-distributed-optimizer, overlap the gathering of weights with the forward pass.",
    "align_grad_reduce": OURS,
    "align_param_gather": "Let each pipeline stage gather weights when it needs them, not at the same time as the "
    "others.",
    "grad_reduce_in_fp32": "Accumulate and reduce gradients in float32, as --bf16 does anyway.",
    "grad_reduce_in_bf16": OURS,
    "bucket_size": "Maximum number of parameters in a bucket, whose gradients are reduced together. Default: "
    "1,000,000 times the data-parallel size, at least 40,000,000.",
    "pad_buckets_for_high_nccl_busbw": "Pad buckets to a multiple of 2^16 parameters, for NCCL's bandwidth on many "
    "ranks.",
    "reduce_scatter_with_fp32_accumulation": "Send gradients in low precision but add them in float32.",
    "average_in_collective": "Let the collective average gradients, instead of dividing them before it sums.",
    "check_for_nan_in_grad": "Do not check losses and gradients for NaN and infinity before a step.",
    "check_for_large_grads": "Check for unexpectedly large gradients before they are reduced.",
}

PRECISION = {
    "bf16": "Compute in bfloat16, with float32 main weights.",
    "fp16": "Compute in float16, with float32 main weights and loss scaling.",
    "fp32_residual_connection": "Keep residual connections in float32.",
    "attention_softmax_in_fp32": "Compute attention's softmax in float32.",
    "disable_bf16_reduced_precision_matmul": "Do not let bfloat16 matrix products add up in reduced precision.",
    "deterministic_mode": "Use only deterministic kernels, which are slower.",
}

RECOMPUTATION = {
    "recompute_granularity": "What the backward pass recomputes to save memory. selective: --recompute-modules. full: "
    "whole layers, by --recompute-method. Default: nothing.",
    "recompute_modules": "Parts of a layer that --recompute-granularity selective recomputes: core_attn, layernorm, "
    "mla_up_proj, mlp, moe, moe_act, shared_experts. Default: core_attn.",
    "recompute_method": "Layers that --recompute-granularity full recomputes. uniform: all of them, in units of "
    "--recompute-num-layers. block: the first --recompute-num-layers of each pipeline stage.",
    "recompute_num_layers": "Number of layers of --recompute-method: per unit or per pipeline stage.",
    "distribute_saved_activations": "Split the saved inputs of recomputed layers among tensor-parallel ranks.",
}

OPTIMIZER = {
    "optimizer": "Kind of optimizer.",
    "lr": "Maximum learning rate, which is reached at the end of the warmup.",
    "min_lr": "Minimum learning rate, at which the decay ends.",
    "decoupled_lr": "Maximum learning rate of the embedding and of the output layer. Default: --lr.",
    "decoupled_min_lr": "Minimum learning rate of the embedding and of the output layer. Default: --min-lr.",
    "weight_decay": "Coefficient of weight decay.",
    "apply_wd_to_qk_layernorm": "Also apply weight decay to the normalizations of queries and keys.",
    "clip_grad": "Maximum L2 norm of all gradients, to which larger ones are scaled down; 0: no limit.",
    "adam_beta1": "Decay rate of Adam's mean of gradients.",
    "adam_beta2": "Decay rate of Adam's mean of squared gradients.",
    "adam_eps": "Number that Adam adds to the denominator.",
    "sgd_momentum": "Momentum of SGD.",
    "loss_scale": "Constant loss scale for --fp16. Default: it is adjusted to the gradients.",
    "initial_loss_scale": "Loss scale at the start, where it is adjusted.",
    "min_loss_scale": "Minimum of an adjusted loss scale.",
    "loss_scale_window": "Number of iterations without overflow after which the loss scale is raised.",
    "hysteresis": "Number of iterations with overflow after which the loss scale is lowered.",
    "use_precision_aware_optimizer": "Let the optimizer keep gradients, main weights and its state in the "
    "precisions of --main-grads-dtype, --main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype.",
    "main_grads_dtype": "Precision of gradients, with --use-precision-aware-optimizer.",
    "main_params_dtype": "Precision of main weights, with --use-precision-aware-optimizer.",
    "exp_avg_dtype": "Precision of Adam's mean of gradients, with --use-precision-aware-optimizer.",
    "exp_avg_sq_dtype": "Precision of Adam's mean of squared gradients, with --use-precision-aware-optimizer.",
    "log_num_zeros_in_grad": "Log how many gradients are zero.",
}

KERNELS: dict[str, str | None] = {
    "transformer_impl": "Implementation of layers. local: megatron-core's own. transformer_engine: NVIDIA's, where it "
    "is installed.",
    **dict.fromkeys(("bias_gelu_fusion", "bias_swiglu_fusion"), OURS),
    "masked_softmax_fusion": "Do not fuse attention's scaling, mask and softmax.",
    "bias_dropout_fusion": "Do not fuse bias, dropout and residual connection.",
    "apply_rope_fusion": "Do not use a fused kernel for rotary embeddings.",
    "persist_layer_norm": "Do not use Apex's persistent LayerNorm kernel, which has only some hidden sizes.",
    "gradient_accumulation_fusion": "Do not add weight gradients in the matrix product itself, for which Apex is "
    "needed.",
    "cross_entropy_loss_fusion": "Use a fused kernel for the loss.",
    "cross_entropy_fusion_impl": "Kernel of --cross-entropy-loss-fusion. native: megatron-core's. te: Transformer "
    "Engine's.",
    "use_te_activation_func": "Use Transformer Engine's activation functions.",
    "use_fused_weighted_squared_relu": "Use a fused kernel for squared ReLU times scores in MoE layers.",
}

TIMING = {
    "barrier_with_L1_time": "Do not let ranks wait for each other before and after what --timing-log-level 1 times."
}

TEXTS: Mapping[str, Mapping[str, str | None]] = {
    "model": MODEL,
    "attention": ATTENTION,
    "multi-latent attention": LATENT_ATTENTION,
    "mixture of experts": EXPERTS,
    "parallelism": PARALLELISM,
    "data parallelism": DATA_PARALLELISM,
    "precision": PRECISION,
    "recomputation": RECOMPUTATION,
    "optimizer": OPTIMIZER,
    "kernels": KERNELS,
    "logging": TIMING,
}
"""Title of a group -> field -> help, in the order of `--help`."""
