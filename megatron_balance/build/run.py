"""Wires everything: RunConfig -> model, optimizer, schedule and data. The only file that imports all packages."""

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_balance.build.balancer import build_balancer
from megatron_balance.build.tokens import build_chunk_choice, build_exchange, build_path, cluster_profile
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.config.run_config import BalanceConfig, RunConfig
from megatron_balance.device.attention import (
    LATENT_KEYS,
    AcrossHeadsSelfAttention,
    LatentDotProductAttention,
    PlainQuerySelfAttention,
)
from megatron_balance.device.norm import TorchNorm
from megatron_balance.flow.chunks.choice import ChunkChoice
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.job.layout import build_groups
from megatron_balance.placement.policies.interface import Policy
from megatron_balance.training.data import Data, build_data, padded_vocab_size
from megatron_balance.training.loss_guard import LossGuard
from megatron_balance.training.progress import Progress
from megatron_balance.training.run import Run
from megatron_balance.training.schedule import build_batch_schedule, build_param_scheduler, run_length
from megatron_balance.training.tokenizer import build_tokenizer, vocabulary
from megatron_balance.workloads.forced_routing import BatchPart, Workload, force_routing

MINIMAL_LOAD = 64
"""Tokens per rank below which experts are not worth timing."""


def build_run(
    config: RunConfig,
    with_data: bool = True,
    tokenizer: MegatronTokenizerBase | None = None,
    policy: Policy | None = None,
) -> Run:
    """Build one training run in an initialised job; every rank calls it. Without data, it cannot train.

    Args:
        tokenizer, policy: those of the flags, if they have been built or started before.
    """
    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    groups = build_groups(config.transformer, config.train.seed, config.launch.distributed_timeout_minutes)
    tokenizer = tokenizer or build_tokenizer(config.tokenizer)
    vocab_size = padded_vocab_size(
        vocabulary(tokenizer, config.tokenizer),
        config.model.make_vocab_size_divisible_by,
        config.transformer.tensor_model_parallel_size,
    )
    profile = functools.cache(lambda: cluster_profile(config, groups))
    progress = Progress()
    path = build_path(config, groups, profile)
    exchange = build_exchange(config, path, profile)
    chunks = build_chunk_choice(config, path, exchange, profile, lambda: progress.iteration)
    model = build_model(config, path, vocab_size, exchange, chunks)
    optimizer = get_megatron_optimizer(config.optimizer, model, use_gloo_process_groups=False, pg_collection=groups)
    connect_hooks(config, path, model, optimizer)
    length = run_length(config.train, groups.dp.size())
    batches = build_batch_schedule(config.train, groups.dp.size())
    force_workload(config, path, model, lambda: progress.iteration, batches.get)
    consumed = (lambda: progress.consumed_samples, lambda: progress.consumed_valid_samples)
    return Run(
        config=config,
        groups=groups,
        model=model,
        optimizer=optimizer,
        scheduler=build_param_scheduler(config, optimizer, length),
        batches=batches,
        length=length,
        data=build_data(config, tokenizer, groups, length, consumed=consumed) if with_data else Data([], None, None),
        vocab_size=vocab_size,
        guard=LossGuard(config, model, groups),
        balancer=build_balancer(config, groups, model, optimizer, batches.get, profile, policy),
        chunks=chunks,
        progress=progress,
    )


def force_workload(
    config: RunConfig,
    path: ParallelDispatch,
    model: list[torch.nn.Module],
    step: Callable[[], int],
    microbatches: Callable[[], int],
) -> None:
    """Let `--moe-router-force-workload` choose the experts, unless it is `none`; `step` and `microbatches` as there."""
    if config.balance.moe_router_force_workload == "none":
        return
    divided = path.splits_tokens or config.transformer.sequence_parallel
    part = BatchPart.of(path.groups, config.model.seq_length, divided)
    workload = Workload(config.balance.moe_router_force_workload, config.train.seed)
    force_routing(model, workload, part, step=step, microbatches=microbatches)


def build_model(
    config: RunConfig,
    path: ParallelDispatch,
    vocab_size: int,
    exchange: TokenExchange,
    chunks: ChunkChoice | None = None,
) -> list[torch.nn.Module]:
    """This rank's model chunks (one, or one per virtual pipeline stage), in DDP."""
    pieces, groups = config.transformer.virtual_pipeline_model_parallel_size, path.groups
    stages = [None] if pieces is None else range(pieces)
    blocks = [build_block_spec(config, path, exchange, stage, chunks) for stage in stages]
    return [
        DistributedDataParallel(
            config=config.transformer,
            ddp_config=config.ddp,
            module=_in_training_precision(_build_chunk(config, groups, vocab_size, block, stage), config),
            # Later chunks' gradients are ready first: buckets would only delay them
            disable_bucketing=bool(stage),
            pg_collection=groups,
        )
        for block, stage in zip(blocks, stages, strict=True)
    ]


def _build_chunk(
    config: RunConfig,
    groups: ProcessGroupCollection,
    vocab_size: int,
    block: TransformerBlockSubmodules,
    stage: int | None,
) -> GPTModel:
    chunks = config.transformer.virtual_pipeline_model_parallel_size
    first = is_pp_first_stage(groups.pp) and not stage
    last = is_pp_last_stage(groups.pp) and (stage is None or stage == chunks - 1)
    model = GPTModel(
        config=config.transformer,
        transformer_layer_spec=block,
        vocab_size=vocab_size,
        max_sequence_length=config.model.max_position_embeddings,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
        position_embedding_type=config.model.position_embedding_type,
        rotary_percent=config.model.rotary_percent,
        rotary_base=config.model.rotary_base,
        rope_scaling=config.model.use_rope_scaling,
        rope_scaling_factor=config.model.rope_scaling_factor,
        seq_len_interpolation_factor=config.model.rotary_seq_len_interpolation_factor,
        pg_collection=groups,
        vp_stage=stage,
    )
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model.cuda(torch.cuda.current_device())


def _in_training_precision(model: GPTModel, config: RunConfig) -> torch.nn.Module:
    half = config.transformer.bf16 or config.transformer.fp16
    return Float16Module(config.transformer, model) if half else model


def build_block_spec(
    config: RunConfig,
    path: ParallelDispatch,
    exchange: TokenExchange,
    stage: int | None = None,
    chunks: ChunkChoice | None = None,
) -> TransformerBlockSubmodules:
    """megatron-core's GPT block of this pipeline stage, with our MoE layer unless `--moe-layer-impl megatron`."""
    shape = config.transformer
    block = get_gpt_decoder_block_spec(
        shape,
        use_transformer_engine=shape.transformer_impl == "transformer_engine",
        normalization=shape.normalization,
        qk_l2_norm=shape.qk_l2_norm,
        vp_stage=stage,
        pp_rank=path.groups.pp.rank(),
    )
    layers = [_completed(spec, config) for spec in block.layer_specs]
    if config.balance.moe_layer_impl == "balanced":
        layers = [balanced_layer_spec(spec, path, config.balance, exchange, chunks) for spec in layers]
    # Where there is apex, megatron-core ends the block in its layer norm whatever the normalization is
    lacking = (WrappedTorchNorm,) if shape.normalization == "LayerNorm" else (WrappedTorchNorm, FusedLayerNorm)
    norm = TorchNorm if block.layer_norm in lacking else block.layer_norm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def balanced_layer_spec(
    spec: ModuleSpec,
    path: ParallelDispatch,
    balance: BalanceConfig,
    exchange: TokenExchange,
    chunks: ChunkChoice | None = None,
) -> ModuleSpec:
    """A transformer layer spec with BalancedMoELayer in place of megatron-core's MoELayer; dense layers unchanged."""
    module, submodules = parts(spec.submodules.mlp)
    if module is not MoELayer:
        return spec
    spec, submodules = copy.copy(spec), copy.copy(submodules)
    spec.submodules = copy.copy(spec.submodules)
    submodules.experts = ModuleSpec(module=GroupedExperts)
    spec.submodules.mlp = ModuleSpec(
        module=BalancedMoELayer,
        submodules=submodules,
        params={"parallel": path, "balance": balance, "exchange": exchange, "chunks": chunks},
    )
    return spec


def parts(spec: ModuleSpec | functools.partial) -> tuple[Callable, object]:
    """What a spec builds, and from which submodules; since 0.19, megatron-core's own specs of MLPs are partials."""
    if isinstance(spec, functools.partial):
        return spec.func, spec.keywords["submodules"]
    return spec.module, spec.submodules


def _completed(spec: ModuleSpec, config: RunConfig) -> ModuleSpec:
    """The spec with the norms and the attention that megatron-core does not have: those of `device`."""
    spec, shape = copy.deepcopy(spec), config.transformer
    attention, keys = spec.submodules.self_attention.submodules, spec.submodules.sharded_state_dict_keys_map
    for submodules in (spec.submodules, attention):
        for name, value in vars(submodules).items():
            if value is WrappedTorchNorm:
                setattr(submodules, name, TorchNorm)
    if config.model.qk_layernorm_across_heads:
        spec.submodules.self_attention.module = AcrossHeadsSelfAttention
    if shape.multi_latent_attention and shape.q_lora_rank is None:
        spec.submodules.self_attention.module = PlainQuerySelfAttention
    if shape.multi_latent_attention and attention.core_attention is DotProductAttention:
        attention.core_attention = LatentDotProductAttention
        keys.update(LATENT_KEYS)
    if parts(spec.submodules.mlp)[0] is MoELayer:
        # Checkpoints call the norm before a mixture what it is called with Transformer Engine
        keys.pop("pre_mlp_layernorm.", None)
    return spec


def connect_hooks(
    config: RunConfig, path: ParallelDispatch, model: list[torch.nn.Module], optimizer: MegatronOptimizer
) -> None:
    """Give megatron-core's schedules the hooks that they read from the transformer config."""
    hooks = config.transformer
    hooks.grad_scale_func = optimizer.scale_loss
    hooks.finalize_model_grads_func = finalizer(path, finalize_model_grads)
    if config.ddp.overlap_grad_reduce:
        hooks.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
        if len(model) > 1 and config.launch.align_grad_reduce:
            hooks.grad_sync_func = [chunk.start_grad_sync for chunk in model]
    if config.ddp.overlap_param_gather and config.ddp.align_param_gather:
        hooks.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in model])


def finalizer(path: ParallelDispatch, finalize: Callable) -> Callable:
    """What finalizes gradients: megatron-core's `finalize`, and more where tokens travel as they never do there."""
    if path.splits_tokens or path.repeats > 1:
        return functools.partial(_finalize_copies, path, finalize)
    return finalize


def _finalize_copies(
    path: ParallelDispatch, finalize: Callable, model: list[torch.nn.Module], *args: Any, **kwargs: Any
) -> None:
    """megatron-core's `finalize_model_grads`; then copies of a parameter on tensor-parallel ranks get one gradient.

    megatron-core does that only where all ranks' tokens differ, under sequence parallelism. Here routers add up what
    each rank has from its part of the tokens. Ranks that all compute the same tokens have the same gradients but for
    rounding, as a collective adds up in another order for each: the mean keeps their copies from drifting apart.
    """
    finalize(model, *args, **kwargs)
    modules = [module for chunk in model for module in chunk.modules()]
    if path.splits_tokens:
        copied = [weight for one in modules if isinstance(one, BalancedMoELayer) for weight in one.router.parameters()]
    else:
        copied = [weight for chunk in model for weight in chunk.parameters() if _is_copied(weight)]
    if not copied:
        return
    gradients = [weight.main_grad for weight in copied]
    together = torch._utils._flatten_dense_tensors(gradients)
    dist.all_reduce(together, group=path.groups.tp)
    together /= path.repeats
    for gradient, reduced in zip(gradients, torch._utils._unflatten_dense_tensors(together, gradients), strict=True):
        gradient.copy_(reduced)


def _is_copied(weight: torch.nn.Parameter) -> bool:
    """Whether all tensor-parallel ranks have it; experts are not theirs."""
    return weight.requires_grad and not weight.tensor_model_parallel and getattr(weight, "allreduce", True)


def _one_or_all(functions: list) -> object:
    return functions[0] if len(functions) == 1 else functions
