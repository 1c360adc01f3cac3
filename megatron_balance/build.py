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
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_balance.comm.alltoall import connect
from megatron_balance.comm.codecs import load_codec
from megatron_balance.comm.compressed import TokenExchange, token_exchange
from megatron_balance.comm.registry import load_all_to_all
from megatron_balance.comm.transfer import ExpertTransfer
from megatron_balance.config import BalanceConfig, RunConfig
from megatron_balance.device import groups as device_groups
from megatron_balance.device.layout import build_groups
from megatron_balance.device.norm import TorchNorm
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.flow.passes import expert_passes
from megatron_balance.observe.forced_routing import BatchPart, Workload, force_routing
from megatron_balance.placement.cost_model import CostModel, Overlap
from megatron_balance.placement.manager import Manager
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.policies import load_policy
from megatron_balance.placement.predictor import Predictor
from megatron_balance.profile.cluster_profile import ClusterProfile, builtin, load
from megatron_balance.profile.flops import non_expert_seconds
from megatron_balance.profile.measure import LARGE_SIZES, SIZES, measure, measured_once
from megatron_balance.timeline import hooks
from megatron_balance.timeline.actions import Schedule
from megatron_balance.timeline.layer_state import LayerState
from megatron_balance.timeline.lower import lower
from megatron_balance.timeline.runtime import Balancer
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
    model = build_model(config, groups, vocab_size, build_exchange(config, groups, profile))
    optimizer = get_megatron_optimizer(config.optimizer, model, use_gloo_process_groups=False, pg_collection=groups)
    connect_hooks(config, model, optimizer)
    length = run_length(config.train, groups.dp.size())
    batches = build_batch_schedule(config.train, groups.dp.size())
    progress = Progress()
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
        balancer=build_balancer(config, groups, model, batches.get, profile),
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


def _node_size(config: RunConfig, groups: ProcessGroupCollection) -> int:
    """Expert-parallel ranks on one node."""
    node = config.comm.moe_comm_node_size or dist.get_world_size()
    return device_groups.expert_node_size(device_groups.Topology(dist.get_world_size(), node), groups.ep.size(), 1)


def build_model(
    config: RunConfig, groups: ProcessGroupCollection, vocab_size: int, exchange: TokenExchange
) -> list[torch.nn.Module]:
    """This rank's model chunks (one, or one per virtual pipeline stage), in DDP."""
    chunks = config.transformer.virtual_pipeline_model_parallel_size
    stages = [None] if chunks is None else range(chunks)
    return [
        DistributedDataParallel(
            config=config.transformer,
            ddp_config=config.ddp,
            module=_in_training_precision(_build_chunk(config, groups, vocab_size, exchange, stage), config),
            # Later chunks' gradients are ready first: buckets would only delay them
            disable_bucketing=bool(stage),
            pg_collection=groups,
        )
        for stage in stages
    ]


def _build_chunk(
    config: RunConfig, groups: ProcessGroupCollection, vocab_size: int, exchange: TokenExchange, stage: int | None
) -> GPTModel:
    chunks = config.transformer.virtual_pipeline_model_parallel_size
    first = is_pp_first_stage(groups.pp) and not stage
    last = is_pp_last_stage(groups.pp) and (stage is None or stage == chunks - 1)
    model = GPTModel(
        config=config.transformer,
        transformer_layer_spec=build_block_spec(config, groups, exchange, stage),
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
    config: RunConfig, groups: ProcessGroupCollection, exchange: TokenExchange, stage: int | None = None
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
        layers = [balanced_layer_spec(spec, groups, config.balance, exchange) for spec in layers]
    norm = TorchNorm if block.layer_norm is WrappedTorchNorm else block.layer_norm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def balanced_layer_spec(
    spec: ModuleSpec, groups: ProcessGroupCollection, balance: BalanceConfig, exchange: TokenExchange
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
        params={"groups": groups, "balance": balance, "exchange": exchange},
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


def build_balancer(
    config: RunConfig,
    groups: ProcessGroupCollection,
    model: list[torch.nn.Module],
    microbatches: Callable[[], int],
    profile: Callable[[], ClusterProfile],
) -> Balancer | None:
    """What keeps this rank's experts where `--balance-policy` wants them; None without a policy.

    Allocates the guest slots. `connect_hooks` comes before: gradients are aggregated before they are finalized.
    """
    settings, transformer = config.balance, config.transformer
    if settings.balance_policy == "none":
        return None
    options = {"alpha": settings.balance_alpha} if settings.balance_policy == "pro_prophet" else {}
    policy = load_policy(settings.balance_policy, **options)
    split = getattr(policy, "split", "local_first")
    if settings.balance_token_split != "policy":
        split = settings.balance_token_split
    by_chunk = [_moe_layers(chunk) for chunk in model]
    layers = {number: layer for chunk in by_chunk for number, layer in chunk.items()}
    num_ranks, num_experts = groups.ep.size(), transformer.num_moe_experts
    slots = min(settings.balance_guest_slots, num_experts - num_experts // num_ranks)
    owners = Placement.identity(num_experts, num_ranks, slots)
    guest_bytes = sum(layer.experts.allocate_guests(slots) for layer in layers.values())
    states = {}
    for number, layer in layers.items():
        layer.split = split
        parameters = list(layer.experts.parameters())
        beside = _beside(config, profile(), model, number)
        cost = CostModel(
            profile(),
            token_bytes=transformer.hidden_size * transformer.params_dtype.itemsize,
            param_bytes=sum(parameter.nbytes for parameter in parameters) / owners.home_slots,
            grad_bytes=sum(parameter.main_grad.nbytes for parameter in parameters) / owners.home_slots,
            split=split,
            overlap=beside if settings.balance_overlap == "blockwise" else None,
        )
        manager = Manager(policy, cost, Predictor(settings.balance_predictor), owners, settings.balance_interval)
        states[number] = LayerState(manager, layer.experts, beside)
    twin = device_groups.new_twin(groups.ep, dist.group.WORLD, config.launch.distributed_timeout_minutes)
    connect(twin)

    @functools.cache
    def schedule(microbatches: int) -> Schedule:
        return lower(
            hooks.stage_passes(transformer, groups.pp.rank(), microbatches),
            [list(chunk) for chunk in by_chunk],
            settings.balance_overlap,
            exact=settings.balance_load == "exact",
            reduce_early=config.ddp.overlap_grad_reduce,
        )

    transfer = ExpertTransfer(twin)
    balancer = Balancer(groups.ep, transfer, states, schedule, microbatches, guest_bytes, settings.balance_explain)
    hooks.install(balancer, layers, model, transformer)
    return balancer


def _moe_layers(chunk: torch.nn.Module) -> dict[int, BalancedMoELayer]:
    """By layer number, ascending."""
    found = (module for module in chunk.modules() if isinstance(module, BalancedMoELayer))
    return {layer.layer_number: layer for layer in found}


def _beside(config: RunConfig, profile: ClusterProfile, model: list[torch.nn.Module], number: int) -> Overlap:
    """What is computed between an MoE layer and the one before it, for its Trans and Agg to hide under."""
    transformer = config.transformer
    chunk = next(chunk for chunk in model if number in _moe_layers(chunk))
    before = [other for other in _moe_layers(chunk) if other < number]
    ahead = [module.layer_number for module in chunk.modules() if isinstance(module, TransformerLayer)]
    dense = sum(max(before, default=0) < other < number for other in ahead)
    tokens = config.train.micro_batch_size * config.model.seq_length // transformer.context_parallel_size
    seconds = non_expert_seconds(profile, transformer, tokens, config.model.seq_length, dense)
    return Overlap(*seconds, experts=bool(before) or chunk is not model[0])


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
        say=say,
    )


def _one_or_all(functions: list) -> object:
    return functions[0] if len(functions) == 1 else functions
