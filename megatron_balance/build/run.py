"""Builds a run: RunConfig -> model, optimizer, hooks, schedule, data and balancer."""

import copy
import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.timers import Timers
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from megatron_balance.build.balancer import build_balancer
from megatron_balance.build.optimizer import build_optimizer
from megatron_balance.build.routing import batch_part, force_workload, replay
from megatron_balance.build.wiring import Wiring, build_wiring
from megatron_balance.config.run_config import RunConfig
from megatron_balance.device.attention import (
    LATENT_KEYS,
    AcrossHeadsSelfAttention,
    ContextParallelAttention,
    LatentDotProductAttention,
    LatentSelfAttention,
    PlainQuerySelfAttention,
    TorchNorm,
)
from megatron_balance.device.documents import DocumentAttention, packed_documents
from megatron_balance.device.shards import mark_experts, mark_shards
from megatron_balance.device.without_engine import skip_lone_sums
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.grouped_gemm import expert_gemm
from megatron_balance.flow.layer import BalancedMoELayer, moe_layers, remember
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.routers import bias_choices, define_losses, keep_precision, score_groups
from megatron_balance.job.layout import build_groups
from megatron_balance.planning.policies.interface import Policy
from megatron_balance.training.data import Data, build_data, padded_vocab_size
from megatron_balance.training.loss_guard import LossGuard
from megatron_balance.training.objective import Objective, PredictingModel
from megatron_balance.training.optimizer_state import fuse, tell_groups_apart
from megatron_balance.training.paired_passes import PairedPasses
from megatron_balance.training.progress import Progress
from megatron_balance.training.run import Run
from megatron_balance.training.schedule import build_batch_schedule, build_param_scheduler, run_length
from megatron_balance.training.tokenizer import build_tokenizer, vocabulary


def build_run(
    config: RunConfig,
    with_data: bool = True,
    tokenizer: MegatronTokenizerBase | None = None,
    policy: Policy | None = None,
) -> Run:
    """Build one training run in an initialized job; every rank calls it, and a ValueError is raised on every rank.

    `tokenizer` and `policy` are those of the flags if they exist already. A run without data cannot train.
    """
    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    order = "tp-cp-ep-pp-dp" if config.launch.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    groups = build_groups(config.transformer, config.train.seed, config.launch.distributed_timeout_minutes, order)
    tokenizer = tokenizer or build_tokenizer(config.tokenizer)
    vocab_size = padded_vocab_size(
        vocabulary(tokenizer, config.tokenizer),
        config.model.make_vocab_size_divisible_by,
        config.transformer.tensor_model_parallel_size,
        config.model.padded_vocab_size,
    )
    progress = Progress()
    wiring = build_wiring(config, groups, progress)
    model = build_model(wiring, vocab_size)
    optimizer = build_optimizer(config.optimizer, model, groups)
    fuse(optimizer)
    tell_groups_apart(optimizer)
    connect_hooks(wiring, model, optimizer)
    objective = Objective(config.transformer, groups, wiring.dispatch.router_groups())
    define_losses(model, objective.router_weight if config.transformer.calculate_per_token_loss else None)
    length = run_length(config.train, groups.dp.size())
    batches = build_batch_schedule(config.train, groups.dp.size())
    force_workload(wiring, model, batches.get)
    bias_choices(model)
    if config.model.moe_router_group_score_topk is not None:
        score_groups(model, config.model.moe_router_group_score_topk)
    recorded = replay(wiring, model, batches.get)
    pairs = config.transformer.overlap_moe_expert_parallel_comm
    consumed = (lambda: progress.consumed_samples, lambda: progress.consumed_valid_samples)
    return Run(
        config=config,
        groups=groups,
        model=model,
        optimizer=optimizer,
        scheduler=build_param_scheduler(config, optimizer, length),
        batches=batches,
        length=length,
        data=build_data(config, tokenizer, groups, length, consumed=consumed) if with_data else Data([], [], []),
        vocab_size=vocab_size,
        guard=LossGuard(config, model, groups),
        objective=objective,
        part=batch_part(wiring),
        recorded=recorded,
        balancer=build_balancer(wiring, model, optimizer, microbatches=batches.get, policy=policy),
        chunks=wiring.chunks,
        pairs=PairedPasses(groups, model) if pairs else None,
        progress=progress,
    )


def build_model(wiring: Wiring, vocab_size: int) -> list[DistributedDataParallel]:
    """Return this rank's model chunks (one, or one per virtual pipeline stage) in DDP."""
    config = wiring.config
    groups = wiring.groups
    pieces = config.transformer.virtual_pipeline_model_parallel_size
    model = [
        DistributedDataParallel(
            config=config.transformer,
            ddp_config=config.ddp,
            module=_build_chunk(wiring, vocab_size, stage),
            # Gradients of later chunks are ready first, so buckets would only delay them
            disable_bucketing=bool(stage),
            pg_collection=groups,
        )
        for stage in ([None] if pieces is None else range(pieces))
    ]
    remember(model)
    return model


def _build_chunk(wiring: Wiring, vocab_size: int, stage: int | None) -> torch.nn.Module:
    """Return a model chunk in the training precision; `stage` is its virtual pipeline stage, if any."""
    config = wiring.config
    block = build_block_spec(wiring, stage)
    groups = wiring.groups
    chunks = config.transformer.virtual_pipeline_model_parallel_size
    first = is_pp_first_stage(groups.pp) and not stage
    last = is_pp_last_stage(groups.pp) and (stage is None or chunks is None or stage == chunks - 1)
    model = (GPTModel if config.transformer.mtp_num_layers is None else PredictingModel)(
        config=config.transformer,
        # GPTModel also takes the submodules of a block, although its annotation does not list them
        transformer_layer_spec=cast(ModuleSpec, block),
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
        mtp_block_spec=_prediction_spec(wiring, block, stage),
        seq_len_interpolation_factor=config.model.rotary_seq_len_interpolation_factor,
        pg_collection=groups,
        vp_stage=stage,
    )
    if config.model.position_embedding_type == "yarn":
        # megatron-core passes it to the other rotary embeddings only
        model.rotary_pos_emb.cp_group = groups.cp
    if model.mtp_process and model.share_embeddings_and_output_weights and not first:
        # The head uses the copy of the embedding that predictions need. The head's own weight would never have a
        # gradient, so an overlapped reduction would wait for it, and megatron-core refuses to save it
        model.output_layer.weight = None
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            experts = cast(torch.nn.Module, layer.experts)
            skip_lone_sums(experts)
            mark_experts(experts, groups)
    mark_shards(model, groups)
    model.cuda(torch.cuda.current_device())
    if not config.transformer.bf16 and not config.transformer.fp16:
        return model
    converted = Float16Module(config.transformer, model)
    keep_precision([converted])
    return converted


def build_block_spec(wiring: Wiring, stage: int | None = None) -> TransformerBlockSubmodules:
    """Return megatron-core's GPT block of this (virtual) stage, with our layer unless `--moe-layer-impl megatron`."""
    shape = wiring.config.transformer
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        shape,
        use_transformer_engine=shape.transformer_impl == "transformer_engine",
        normalization=shape.normalization,
        qk_l2_norm=shape.qk_l2_norm,
        vp_stage=stage,
        pp_rank=wiring.groups.pp.rank(),
    )
    layers = _own_layers(block.layer_specs or (), wiring)
    # With apex, megatron-core ends the block with apex's layer norm, whatever the normalization
    lacking = (WrappedTorchNorm,) if shape.normalization == "LayerNorm" else (WrappedTorchNorm, FusedLayerNorm)
    norm: Any = TorchNorm if block.layer_norm in lacking else block.layer_norm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _own_layers(specs: Sequence[ModuleSpec], wiring: Wiring) -> list[ModuleSpec]:
    layers = [_completed(spec, wiring.config) for spec in specs]
    if wiring.config.balance.moe_layer_impl == "balanced":
        layers = [balanced_layer_spec(spec, wiring) for spec in layers]
    return layers


def _prediction_spec(wiring: Wiring, block: TransformerBlockSubmodules, stage: int | None) -> ModuleSpec | None:
    """Return megatron-core's spec of multi-token prediction, whose layers are like the model's last layer.

    None except in the last pipeline stage of a run with `--mtp-num-layers`. `block` has the stage's own layers.
    """
    config = wiring.config.transformer
    if config.mtp_num_layers is None:
        return None
    engine = config.transformer_impl == "transformer_engine"
    if not block.layer_specs:
        layers: Any = gpt_layer_specs.get_gpt_decoder_layer_specs(
            config, engine, config.normalization, config.qk_l2_norm
        )
        block = TransformerBlockSubmodules(_own_layers(layers[-1:], wiring), block.layer_norm)
    rank = wiring.groups.pp.rank()
    spec: Any = gpt_layer_specs.get_gpt_mtp_block_spec(config, block, engine, vp_stage=stage, pp_rank=rank)
    for layer in () if spec is None or engine else spec.layer_specs:
        for name in ("enorm", "hnorm", "layer_norm"):
            setattr(layer.submodules, name, block.layer_norm)
    return spec


def balanced_layer_spec(spec: ModuleSpec, wiring: Wiring) -> ModuleSpec:
    """Return a transformer layer's spec with BalancedMoELayer instead of MoELayer; a dense layer's spec unchanged."""
    layer: Any = spec.submodules
    module, submodules = parts(layer.mlp)
    if module is not MoELayer:
        return spec
    gemm = expert_gemm(wiring.config.balance.moe_expert_gemm)
    experts = ModuleSpec(module=GroupedExperts, params={"gemm": gemm})
    mlp = ModuleSpec(
        module=BalancedMoELayer,
        submodules=dataclasses.replace(submodules, experts=experts),
        params={
            "parallel": wiring.dispatch,
            "balance": wiring.config.balance,
            "exchange": wiring.exchange,
            "reader": wiring.reader,
            "chunks": wiring.chunks,
        },
    )
    return dataclasses.replace(spec, submodules=dataclasses.replace(layer, mlp=mlp))


def parts(spec: ModuleSpec | functools.partial) -> tuple[Any, Any]:
    """Return a spec's module and its submodules; since megatron-core 0.19, the specs of MLPs are partials."""
    if isinstance(spec, functools.partial):
        return spec.func, spec.keywords["submodules"]
    return spec.module, spec.submodules


def _completed(spec: ModuleSpec, config: RunConfig) -> ModuleSpec:
    """Return a copy of `spec` with the norms and attention of `device/` where megatron-core has no suitable one."""
    spec = copy.deepcopy(spec)
    shape = config.transformer
    layer: Any = spec.submodules
    attention = layer.self_attention.submodules
    keys = layer.sharded_state_dict_keys_map
    for submodules in (layer, attention):
        for name, value in vars(submodules).items():
            if value is WrappedTorchNorm:
                setattr(submodules, name, TorchNorm)
    if config.model.qk_layernorm_across_heads:
        layer.self_attention.module = AcrossHeadsSelfAttention
    latent = isinstance(shape, MLATransformerConfig)
    if latent and shape.q_lora_rank is None:
        layer.self_attention.module = PlainQuerySelfAttention
    if attention.core_attention is DotProductAttention:
        if latent:
            if shape.q_lora_rank is not None:
                layer.self_attention.module = LatentSelfAttention
            attention.core_attention = LatentDotProductAttention
            keys.update(LATENT_KEYS)
        if shape.context_parallel_size > 1:
            attention.core_attention = ContextParallelAttention
        if config.data.documents_apart:
            attention.core_attention = DocumentAttention
    elif config.data.documents_apart:
        attention.core_attention = packed_documents(attention.core_attention)
    if parts(layer.mlp)[0] is MoELayer:
        # The norm before an MoE layer keeps the checkpoint name that it has with Transformer Engine
        keys.pop("pre_mlp_layernorm.", None)
    return spec


def connect_hooks(wiring: Wiring, model: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Set the hooks that megatron-core's schedules read from the transformer config."""
    config = wiring.config
    hooks = config.transformer
    hooks.grad_scale_func = optimizer.scale_loss
    if config.log.timing_log_level:
        hooks.timers = config.optimizer.timers = Timers(config.log.timing_log_level, config.log.timing_log_option)
    hooks.finalize_model_grads_func = finalizer(wiring.dispatch, finalize_model_grads)
    if config.ddp.overlap_grad_reduce:
        hooks.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
        if len(model) > 1 and config.launch.align_grad_reduce:
            hooks.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in model])
    if config.ddp.overlap_param_gather and config.ddp.align_param_gather:
        hooks.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in model])


def finalizer(dispatch: ParallelDispatch, finalize: Callable) -> Callable:
    """Return a function that finalizes gradients: `finalize`, extended if the dispatch needs it."""
    if dispatch.splits_tokens or dispatch.repeats > 1:
        return functools.partial(_finalize_copies, dispatch, finalize)
    return finalize


def _finalize_copies(
    dispatch: ParallelDispatch, finalize: Callable, model: list[torch.nn.Module], *args: Any, **kwargs: Any
) -> None:
    """Finalize gradients, then give all tensor-parallel copies of a parameter the same gradient.

    megatron-core does the latter only under sequence parallelism, where the ranks' tokens differ. If the dispatch
    splits tokens, each rank's router has the gradient of its share of the tokens, and the sum is the whole gradient. If
    ranks compute the same tokens, their gradients differ only by rounding, because collectives sum in a different order
    on each rank. Their mean keeps the copies from drifting apart.
    """
    finalize(model, *args, **kwargs)
    if dispatch.splits_tokens:
        routers = [cast(torch.nn.Module, layer.router) for layer in moe_layers(model).values()]
        copied: list[Any] = [weight for router in routers for weight in router.parameters()]
    else:
        copied = [weight for chunk in model for weight in chunk.parameters() if _is_copied(weight)]
    if not copied:
        return
    gradients = [weight.main_grad for weight in copied]
    flat = _flatten_dense_tensors(gradients)
    dist.all_reduce(flat, group=dispatch.groups.tp)
    flat /= dispatch.repeats
    for gradient, reduced in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(reduced)


def _is_copied(weight: Any) -> bool:
    """Return whether all tensor-parallel ranks have the parameter; parameters of experts have `allreduce` False."""
    return weight.requires_grad and not weight.tensor_model_parallel and getattr(weight, "allreduce", True)


def _one_or_all(functions: list[Callable]) -> Any:
    """Return hooks in the form that megatron-core's schedules take: a function, or a list with one per model chunk."""
    return functions[0] if len(functions) == 1 else functions
