"""Balancing inside somebody else's Megatron-LM, or inside a training loop of one's own on megatron-core.

    add_balance_args(parser)                        our flags beside those that are there
    balancing = Balancing(args, transformer)        checked, before any process waits for another
    balanced_layer_spec(spec, balancing)            what the model is built from
    attach(model, balancing)                        once the model is in DDP

From then on, Plan, Trans and Agg follow from the model's forward and backward passes and from
`config.finalize_model_grads_func`, which megatron-core's schedules call. docs/inside_megatron_lm.md has an example.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from megatron_balance.build import run
from megatron_balance.build.balancer import build_balancer
from megatron_balance.build.tokens import build_chunk_choice, build_exchange, build_path, cluster_profile
from megatron_balance.cli.arguments import GROUPS, policy_flag
from megatron_balance.cli.checks import at_least_one, refuse_idle
from megatron_balance.cli.moe_checks import check_moe, token_dispatcher
from megatron_balance.cli.upstream_flags import refusal
from megatron_balance.comm.compressed import TokenExchange
from megatron_balance.config import run_config as ours
from megatron_balance.config.flags import add_flags, flag_of
from megatron_balance.config.flags import build as build_config
from megatron_balance.flow.chunks.choice import ChunkChoice
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.job import groups as device_groups
from megatron_balance.job import job
from megatron_balance.observe.balance import LayerReport, log_fields, mean_over_ranks
from megatron_balance.profile.cluster_profile import ClusterProfile
from megatron_balance.timeline.runtime import Balancer
from megatron_balance.training.progress import Progress

OUR_GROUPS = [(title, cls) for title, cls in GROUPS if cls in (ours.BalanceConfig, ours.CommConfig)]

ONLY_IN_OUR_LOOP = ("balance_log_dir", "balance_timeline")
"""What only training/loop.py and launch.py do."""

NOT_THERE = (
    *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "moe_expert_rank_capacity_factor", "moe_latent_size"),
    *("moe_use_upcycling", "mtp_num_layers", "fp8", "fp4", "cuda_graph_impl", "enable_cuda_graph"),
    *("external_cuda_graph", "optimizer_cuda_graph", "use_megatron_fsdp", "use_torch_fsdp2"),
    *("init_model_with_meta_device", "use_cpu_initialization", "data_parallel_random_init", "cpu_offloading"),
    *("fine_grained_activation_offloading", "overlap_param_gather_with_optimizer_step", "use_tp_pp_dp_mapping"),
    *("context_parallel_size", "hybrid_context_parallel", "num_distributed_optimizer_instances"),
    *("gtp_weight_remat_size", "expert_gtp_weight_remat_size", "heterogeneous_layers_config_path", "perform_rl_step"),
    "spec",
)
"""Settings of Megatron-LM's, in some version, that our MoE layer or the moving of experts does not go with."""

OFF = (None, False, 0, "none", "", [], ())
"""Values of settings that do nothing; 1 does nothing for sizes and numbers."""

Report = Callable[[int, Mapping[int, LayerReport]], None]
"""Called with the number of an iteration and what balancing did in it, by layer number, on every rank."""


class Shared(NamedTuple):
    """What all MoE layers of a run have in common."""

    path: ParallelDispatch
    exchange: TokenExchange
    chunks: ChunkChoice | None
    profile: Callable[[], ClusterProfile]


class Balancing:
    """The flags of one run, checked, and what is made of them once.

    Args:
        args: what a parser with `add_balance_args` returned; also `seq_length` and `micro_batch_size`, and, where there
            are any, Megatron-LM's other flags.
        transformer: the model's configuration.
        groups: of the parallel layout; None: those of megatron-core's `parallel_state`, once they are needed.

    Raises:
        ValueError: names the flag, its value and the remedy; it needs no process group.
    """

    def __init__(
        self, args: argparse.Namespace, transformer: TransformerConfig, groups: ProcessGroupCollection | None = None
    ) -> None:
        settings = {field.name: getattr(transformer, field.name) for field in dataclasses.fields(transformer)}
        values = vars(args) | settings
        self.notices = _check(values)
        self.config = _run_config(values, transformer)
        self.progress = Progress()
        self.balancer: Balancer | None = None
        """None without a policy, and before `attach`."""
        self._args, self._groups = args, groups
        self._shared: Shared | None = None

    @property
    def is_off(self) -> bool:
        """Whether the layers are megatron-core's own."""
        return self.config.balance.moe_layer_impl != "balanced"

    @property
    def first_iteration(self) -> int:
        """Iterations done before this process began, as Megatron-LM says when it has loaded a checkpoint."""
        return getattr(self._args, "iteration", 0)

    def shared(self) -> Shared:
        """Made at the first call, which every rank of the job makes at the same point."""
        if self._shared is None:
            config, groups = self.config, self._groups or ProcessGroupCollection.use_mpu_process_groups()
            profile = functools.cache(lambda: cluster_profile(config, groups))
            path = build_path(config, groups, profile)
            exchange = build_exchange(config, path, profile)
            chunks = build_chunk_choice(config, path, exchange, profile, lambda: self.progress.iteration)
            self._shared = Shared(path, exchange, chunks, profile)
        return self._shared


def add_balance_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of expert balancing and of expert communication to another program's parser; returns it.

    Raises:
        ValueError: it has a flag of that name already.
    """
    for title, cls in OUR_GROUPS:
        added = add_flags(parser.add_argument_group(title), cls, metadata=policy_flag())
        taken = [field.name for field in dataclasses.fields(cls) if field.name not in added]
        if taken:
            raise ValueError(f"{flag_of(taken[0])}: the parser has this flag already; call add_balance_args only once")
    return parser


def balanced_layer_spec(
    spec: ModuleSpec | TransformerBlockSubmodules, balancing: Balancing
) -> ModuleSpec | TransformerBlockSubmodules:
    """A layer's or a block's spec with our MoE layer in place of megatron-core's; dense layers are left as they are.

    Every rank of the job calls it, after megatron-core's process groups are there.
    """
    if balancing.is_off:
        return spec
    if not isinstance(spec, ModuleSpec):
        layers = [balanced_layer_spec(layer, balancing) for layer in spec.layer_specs or ()]
        return dataclasses.replace(spec, layer_specs=layers)
    path, exchange, chunks, _ = balancing.shared()
    return run.balanced_layer_spec(spec, path, balancing.config.balance, exchange, chunks)


def attach(
    model: list[torch.nn.Module],
    balancing: Balancing,
    microbatches: Callable[[], int] = get_num_microbatches,
    report: Report | None = None,
) -> list[torch.nn.Module]:
    """Let balancing act in every training iteration of `model`; every rank of the job calls it once.

    It can come before the optimizer is made and before weights are loaded. An iteration begins with the first forward
    pass in training mode and with gradients, and ends when gradients have been finalized. Passes that no backward pass
    follows have to be in evaluation mode, or without gradients.

    Args:
        model: this rank's chunks, in megatron-core's DDP.
        microbatches: of the present iteration, on each data-parallel rank.
        report: called every `args.log_interval` iterations; None: a line is printed on the last rank.

    Returns:
        `model`, so that it serves as a hook of Megatron-LM's model builders.

    Raises:
        ValueError: the model is not in DDP, or was not built from `balanced_layer_spec`.
    """
    if balancing.is_off:
        return model
    if not all(isinstance(chunk, DistributedDataParallel) for chunk in model):
        raise ValueError("attach: wrap the model in megatron.core.distributed.DistributedDataParallel before")
    if balancing._shared is None:
        raise ValueError("attach: build the model from balanced_layer_spec(spec, balancing)")
    if dist.get_rank() == 0:
        for notice in balancing.notices:
            print(f"note: {notice}", flush=True)
    path, _, _, profile = balancing.shared()
    hooks = get_model_config(model[0])
    hooks.finalize_model_grads_func = run.finalizer(path, hooks.finalize_model_grads_func or finalize_model_grads)
    iterations = _Iterations(balancing, hooks, report or _print_line)
    for chunk in model:
        # Before the hooks of the balancer, whose iteration has to have begun
        chunk.register_forward_pre_hook(iterations.begin)
    config = balancing.config.replace(transformer=hooks, ddp=model[0].ddp_config)
    run.force_workload(config, path, model, lambda: balancing.progress.iteration, microbatches)
    balancing.balancer = build_balancer(config, path.groups, model, None, microbatches, profile)
    iterations.finalize = hooks.finalize_model_grads_func
    hooks.finalize_model_grads_func = iterations.end
    return model


class _Iterations:
    """When iterations begin and end, as far as a model sees it."""

    def __init__(self, balancing: Balancing, hooks: TransformerConfig, report: Report) -> None:
        self.balancing, self.hooks, self.report = balancing, hooks, report
        self.finalize: Callable = finalize_model_grads
        self._running = self._resumed = False

    def begin(self, chunk: torch.nn.Module, inputs: Any) -> None:
        """The pre-hook of each chunk's forward pass."""
        if self._running or not (chunk.training and torch.is_grad_enabled()):
            return
        if self.hooks.finalize_model_grads_func != self.end:
            raise ValueError(
                "finalize_model_grads_func of the model's config was replaced after attach(model, balancing), so that "
                "gradients of guests would be lost; call attach after it is set"
            )
        progress = self.balancing.progress
        if not self._resumed:
            progress.iteration, self._resumed = self.balancing.first_iteration, True
        self._running = True
        if self.balancing.balancer is not None:
            self.balancing.balancer.begin_iteration(progress.iteration + 1)

    def end(self, *args: Any, **kwargs: Any) -> Any:
        """`config.finalize_model_grads_func`."""
        result = self.finalize(*args, **kwargs)
        progress, balancer = self.balancing.progress, self.balancing.balancer
        progress.iteration, self._running = progress.iteration + 1, False
        if balancer is not None and progress.iteration % self.balancing.config.log.log_interval == 0:
            # Times that the device takes are known when it is done
            torch.cuda.synchronize()
            self.report(progress.iteration, mean_over_ranks(balancer.report(), self.hooks.num_layers))
        return result


def _print_line(iteration: int, layers: Mapping[int, LayerReport]) -> None:
    if dist.get_rank() == dist.get_world_size() - 1 and layers:
        print(f" balancing in iteration {iteration:8d} |{log_fields([layers])}", flush=True)


def _check(values: Mapping[str, Any]) -> list[str]:
    """Notices for the log; `values` are all settings by name.

    Raises:
        ValueError: settings that do not go together.
    """
    fields = [field for _, cls in OUR_GROUPS for field in dataclasses.fields(cls)]
    if any(field.name not in values for field in fields):
        raise ValueError("the flags of balancing are missing: call add_balance_args(parser) before parsing")
    for name in ("seq_length", "micro_batch_size"):
        if values.get(name) is None:
            raise ValueError(f"{flag_of(name)} is required: args.{name}, the number of {_UNITS[name]}")
    given = {field.name for field in fields if values[field.name] != field.default}
    at_least_one(values, ("balance_interval", "moe_comm_refit_interval"))
    refuse_idle(values, given)
    _refuse(values, given)
    notices: list[str] = []
    cuda = torch.cuda.is_available()
    backend = values.get("distributed_backend") or ("nccl" if cuda else "gloo")
    expert_tp = values["expert_tensor_parallel_size"] or values["tensor_model_parallel_size"]
    check_moe(values, given, expert_tp, values["ffn_hidden_size"], cuda, notices)
    # Whoever calls has chosen the dispatcher already
    token_dispatcher(values, given | {"moe_token_dispatcher_type"}, backend, cuda, notices)
    return notices


_UNITS = {"seq_length": "tokens of a sample", "micro_batch_size": "samples of a microbatch"}


def _refuse(values: Mapping[str, Any], given: set[str]) -> None:
    """What only our own training loop does, and what of Megatron-LM's does not go with our layer."""
    for name in ONLY_IN_OUR_LOOP:
        if name in given:
            raise ValueError(f"{flag_of(name)}: only pretrain_gpt_moe.py writes it; leave it out")
    if values["balance_ownership"] == "transfer":
        raise ValueError(
            "--balance-ownership transfer: moves optimizer state, which only pretrain_gpt_moe.py does and saves; use "
            "--balance-ownership fixed"
        )
    if values["moe_layer_impl"] != "balanced":
        return
    for name in NOT_THERE:
        value = values.get(name)
        if value is True or (value not in OFF and value != 1):
            reason = refusal(flag_of(name)) or "not supported; leave it out"
            raise ValueError(f"{flag_of(name)} {value}: not with --moe-layer-impl balanced: {reason}")


def _run_config(values: Mapping[str, Any], transformer: TransformerConfig) -> ours.RunConfig:
    """Settings as the builders take them; what none of them reads keeps its default."""
    comm = build_config(ours.CommConfig, values)
    topology = job.node_topology(job.Launch.from_environment(), comm.moe_comm_node_size)
    expert_tp = transformer.expert_tensor_parallel_size or transformer.tensor_model_parallel_size
    device_groups.expert_node_size(topology, transformer.expert_model_parallel_size, expert_tp)
    return ours.RunConfig(
        transformer=transformer,
        optimizer=OptimizerConfig(),
        ddp=DistributedDataParallelConfig(),
        balance=build_config(ours.BalanceConfig, values),
        comm=dataclasses.replace(comm, moe_comm_node_size=topology.node_size),
        model=ours.ModelConfig(seq_length=values["seq_length"]),
        tokenizer=ours.TokenizerConfig(),
        data=ours.DataConfig(),
        train=build_config(ours.TrainConfig, values),
        checkpoint=ours.CheckpointConfig(save=values.get("save"), load=values.get("load")),
        scheduler=ours.SchedulerConfig(),
        log=build_config(ours.LogConfig, values),
        launch=build_config(ours.LaunchConfig, values),
    )
