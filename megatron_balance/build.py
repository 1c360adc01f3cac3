"""Wires everything: RunConfig -> model, optimizer, schedule and data. The only file that imports all packages."""

import copy
import functools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_balance.build_balancer import build_balancer
from megatron_balance.comm.codecs import load_codec
from megatron_balance.comm.compressed import TokenExchange, token_exchange
from megatron_balance.comm.registry import load_all_to_all
from megatron_balance.config import BalanceConfig, RunConfig
from megatron_balance.device import groups as device_groups
from megatron_balance.device.layout import build_groups
from megatron_balance.device.norm import TorchNorm
from megatron_balance.flow.chunk_choice import ByMiniTasks, ByPrediction, ChunkChoice, Decide, find_degrees
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.flow.passes import codec_passes, expert_passes
from megatron_balance.flow.task_order import find_order
from megatron_balance.flow.task_times import TaskModel
from megatron_balance.observe.forced_routing import BatchPart, Workload, force_routing
from megatron_balance.placement.cost_model import CostModel
from megatron_balance.placement.policies import policy_options
from megatron_balance.placement.policies.demi import Demi
from megatron_balance.profile.cluster_profile import ClusterProfile, builtin, load
from megatron_balance.profile.measure import LARGE_SIZES, SIZES, measure, measured_once
from megatron_balance.training.data import build_data, padded_vocab_size
from megatron_balance.training.loop import Progress, Run
from megatron_balance.training.loss_guard import LossGuard
from megatron_balance.training.schedule import build_batch_schedule, build_param_scheduler, run_length
from megatron_balance.training.tokenizer import build_tokenizer

MINIMAL_LOAD = 64
"""Tokens per rank below which experts are not worth timing."""


def build_run(config: RunConfig) -> Run:
    """Build one training run in an initialised job; every rank calls it."""
    random.seed(config.train.seed)
    np.random.seed(config.train.seed)
    groups = build_groups(config.transformer, config.train.seed, config.launch.distributed_timeout_minutes)
    tokenizer = build_tokenizer(config.tokenizer)
    vocab_size = padded_vocab_size(
        tokenizer.vocab_size, config.model.make_vocab_size_divisible_by, config.transformer.tensor_model_parallel_size
    )
    profile = functools.cache(lambda: cluster_profile(config, groups))
    progress = Progress()
    exchange = build_exchange(config, groups, profile)
    chunks = build_chunk_choice(config, exchange, profile, lambda: progress.iteration)
    model = build_model(config, groups, vocab_size, exchange, chunks)
    optimizer = get_megatron_optimizer(config.optimizer, model, use_gloo_process_groups=False, pg_collection=groups)
    connect_hooks(config, model, optimizer)
    length = run_length(config.train, groups.dp.size())
    batches = build_batch_schedule(config.train, groups.dp.size())
    if config.balance.moe_router_force_workload != "none":
        part = BatchPart.of(config.transformer, groups, config.model.seq_length)
        workload = Workload(config.balance.moe_router_force_workload, config.train.seed)
        force_routing(model, workload, part, lambda: progress.iteration, batches.get)
    consumed = (lambda: progress.consumed_samples, lambda: progress.consumed_valid_samples)
    return Run(
        config=config,
        groups=groups,
        model=model,
        optimizer=optimizer,
        scheduler=build_param_scheduler(config, optimizer, length),
        batches=batches,
        length=length,
        data=build_data(config, tokenizer, groups, length, consumed),
        vocab_size=vocab_size,
        guard=LossGuard(config, model, groups),
        balancer=build_balancer(config, groups, model, optimizer, batches.get, profile),
        chunks=chunks,
        progress=progress,
    )


def build_exchange(
    config: RunConfig, groups: ProcessGroupCollection, profile: Callable[[], ClusterProfile]
) -> TokenExchange:
    """The all-to-alls of this rank's expert-parallel group, which all layers share; every rank of the job calls it."""
    wire = load_all_to_all(
        config.comm.moe_comm_alltoall,
        groups.ep,
        lambda: device_groups.new_node_groups(
            groups.ep, dist.group.WORLD, _node_size(config, groups), config.launch.distributed_timeout_minutes
        ),
        profile,
        functools.partial(print, flush=True) if dist.get_rank() == 0 else None,
    )
    return token_exchange(wire, load_codec(config.comm.moe_comm_codec), config.comm.moe_comm_codec_directions)


def build_chunk_choice(
    config: RunConfig, exchange: TokenExchange, profile: Callable[[], ClusterProfile], iteration: Callable[[], int]
) -> ChunkChoice | None:
    """What splits the tokens of all layers; None where they stay together."""
    comm, transformer = config.comm, config.transformer
    if comm.moe_comm_chunks == "1" or exchange.probs.group.size() == 1:
        return None
    decide: Decide
    if comm.moe_comm_order == "demi":
        token_bytes = transformer.hidden_size * transformer.params_dtype.itemsize
        # Weights of lent experts are there before the first chunk computes
        cost = CostModel(profile(), token_bytes, param_bytes=0.0, grad_bytes=0.0)
        decide = ByMiniTasks(Demi(**policy_options("demi", vars(config.balance))), cost)
    else:
        model = TaskModel(profile(), exchange, comm.moe_comm_codec, transformer.hidden_size, transformer.params_dtype)
        decide = ByPrediction(find_degrees(comm.moe_comm_chunks), find_order(comm.moe_comm_order), model)
    say = functools.partial(print, flush=True) if dist.get_rank() == 0 and config.balance.balance_explain else None
    return ChunkChoice(decide, iteration, comm.moe_comm_refit_interval, say)


def _node_size(config: RunConfig, groups: ProcessGroupCollection) -> int:
    """Expert-parallel ranks on one node."""
    node = config.comm.moe_comm_node_size or dist.get_world_size()
    return device_groups.expert_node_size(device_groups.Topology(dist.get_world_size(), node), groups.ep.size(), 1)


def build_model(
    config: RunConfig,
    groups: ProcessGroupCollection,
    vocab_size: int,
    exchange: TokenExchange,
    chunks: ChunkChoice | None = None,
) -> list[torch.nn.Module]:
    """This rank's model chunks (one, or one per virtual pipeline stage), in DDP."""
    pieces = config.transformer.virtual_pipeline_model_parallel_size
    stages = [None] if pieces is None else range(pieces)
    blocks = [build_block_spec(config, groups, exchange, stage, chunks) for stage in stages]
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
    groups: ProcessGroupCollection,
    exchange: TokenExchange,
    stage: int | None = None,
    chunks: ChunkChoice | None = None,
) -> TransformerBlockSubmodules:
    """megatron-core's GPT block of this pipeline stage, with our MoE layer unless `--moe-layer-impl megatron`."""
    block = get_gpt_decoder_block_spec(
        config.transformer,
        use_transformer_engine=config.transformer.transformer_impl == "transformer_engine",
        normalization=config.transformer.normalization,
        qk_l2_norm=config.transformer.qk_l2_norm,
        vp_stage=stage,
        pp_rank=groups.pp.rank(),
    )
    layers = [_with_torch_norm(spec) for spec in block.layer_specs]
    if config.balance.moe_layer_impl == "balanced":
        layers = [balanced_layer_spec(spec, groups, config.balance, exchange, chunks) for spec in layers]
    norm = TorchNorm if block.layer_norm is WrappedTorchNorm else block.layer_norm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def balanced_layer_spec(
    spec: ModuleSpec,
    groups: ProcessGroupCollection,
    balance: BalanceConfig,
    exchange: TokenExchange,
    chunks: ChunkChoice | None = None,
) -> ModuleSpec:
    """A transformer layer spec with BalancedMoELayer in place of megatron-core's MoELayer; dense layers unchanged."""
    module, submodules = parts(spec.submodules.mlp)
    if module is not MoELayer:
        return spec
    spec = copy.deepcopy(spec)
    submodules = copy.copy(submodules)
    submodules.experts = ModuleSpec(module=GroupedExperts)
    spec.submodules.mlp = ModuleSpec(
        module=BalancedMoELayer,
        submodules=submodules,
        params={"groups": groups, "balance": balance, "exchange": exchange, "chunks": chunks},
    )
    return spec


def parts(spec: ModuleSpec | functools.partial) -> tuple[Callable, object]:
    """What a spec builds, and from which submodules; since 0.19, megatron-core's own specs of MLPs are partials."""
    if isinstance(spec, functools.partial):
        return spec.func, spec.keywords["submodules"]
    return spec.module, spec.submodules


def _with_torch_norm(spec: ModuleSpec) -> ModuleSpec:
    """The spec with norms that know sequence parallelism, where megatron-core fell back to plain torch."""
    spec = copy.deepcopy(spec)
    for submodules in (spec.submodules, spec.submodules.self_attention.submodules):
        for name, value in vars(submodules).items():
            if value is WrappedTorchNorm:
                setattr(submodules, name, TorchNorm)
    return spec


def connect_hooks(config: RunConfig, model: list[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """Give megatron-core's schedules the hooks that they read from the transformer config."""
    hooks = config.transformer
    hooks.grad_scale_func = optimizer.scale_loss
    hooks.finalize_model_grads_func = finalize_model_grads
    if config.ddp.overlap_grad_reduce:
        hooks.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
        if len(model) > 1 and config.launch.align_grad_reduce:
            hooks.grad_sync_func = [chunk.start_grad_sync for chunk in model]
    if config.ddp.overlap_param_gather and config.ddp.align_param_gather:
        hooks.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in model])


def cluster_profile(config: RunConfig, groups: ProcessGroupCollection) -> ClusterProfile:
    """The cost model's constants, as `--balance-profile` says; every rank of the job calls it.

    What `auto` measures is kept in `--save`, and looked for there and in `--load`, so that a resumed run plans alike.
    """
    wanted, transformer, num_ranks = config.balance.balance_profile, config.transformer, groups.ep.size()
    node_size = _node_size(config, groups)
    if wanted == "builtin":
        matrices = 3 if transformer.gated_linear_unit else 2
        inner = transformer.moe_ffn_hidden_size * matrices // 2
        return builtin(num_ranks, node_size, transformer.hidden_size, inner, transformer.params_dtype.itemsize)
    if wanted != "auto":
        return device_groups.on_first_rank(lambda: load(Path(wanted), num_ranks, node_size))
    say = functools.partial(print, flush=True) if dist.get_rank() == 0 else None
    measure_now = functools.partial(measure_cluster, config, groups, node_size, say)
    name = f"cluster_profile_{num_ranks}_in_nodes_of_{node_size}.json"
    paths = [Path(directory) / name for directory in (config.checkpoint.save, config.checkpoint.load) if directory]
    return measured_once(paths, num_ranks, node_size, measure_now)


def measure_cluster(
    config: RunConfig, groups: ProcessGroupCollection, node_size: int, say: Callable[[str], None] | None = None
) -> ClusterProfile:
    """Measure this job's cluster with experts of the run's shape and precision; every rank calls it.

    Experts compute an eighth of a microbatch's mean load per rank up to twice that. Random number generators are left
    as they are, so that a run with a profile measured before learns the same.

    Args:
        node_size: expert-parallel ranks on one node, `expert_node_size`.
        say: called with lines of progress, on the ranks that give it.
    """
    transformer = copy.copy(config.transformer)
    transformer.perform_initialization = False
    slots = transformer.num_moe_experts // groups.ep.size()
    experts = GroupedExperts(range(slots), transformer, groups)
    device = experts.linear_fc1.weight.device
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=transformer.init_method_std, generator=generator)
    sequence = config.model.seq_length // (groups.tp.size() if transformer.sequence_parallel else 1)
    codecs = {}
    if (name := config.comm.moe_comm_codec) != "none":
        sizes = load_codec(name), transformer.hidden_size, transformer.params_dtype, device
        codecs[name] = functools.partial(codec_passes, *sizes)
    load = max(MINIMAL_LOAD, config.train.micro_batch_size * sequence * transformer.moe_router_topk)
    return measure(
        groups.ep,
        dist.group.WORLD,
        node_size,
        functools.partial(expert_passes, experts),
        [load // 8, load // 4, load // 2, load, 2 * load],
        device,
        transformer.params_dtype,
        sizes_bytes=LARGE_SIZES if device.type == "cuda" else SIZES,
        codecs=codecs,
        say=say,
    )


def _one_or_all(functions: list) -> object:
    return functions[0] if len(functions) == 1 else functions
