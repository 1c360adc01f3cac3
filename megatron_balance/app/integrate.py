"""Balancing inside another program: Megatron-LM, or a custom training loop on megatron-core.

  add_balance_args(parser)                        adds our flags to the program's
  balancing = Balancing(args, transformer)        checks them, before any process waits for another
  balanced_layer_spec(spec, balancing)            gives the spec that the model is built from
  attach(model, balancing)                        starts balancing, once the model is in DDP

After `attach`, two triggers start Plan, Trans and Agg: the model's forward and backward passes, and
`config.finalize_model_grads_func`, which megatron-core's schedules call. Example: docs/inside_megatron_lm.md.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model

from megatron_balance.build.balancer import build_balancer
from megatron_balance.build.routing import force_workload
from megatron_balance.build.run import balanced_layer_spec as build_layer_spec
from megatron_balance.build.run import finalizer
from megatron_balance.build.wiring import Wiring, build_wiring
from megatron_balance.cli.arguments import run_config
from megatron_balance.cli.checks import at_least, refuse_idle_balancing
from megatron_balance.cli.command_line import CommandLine
from megatron_balance.cli.flag_groups import OUR_GROUPS, field_help
from megatron_balance.cli.machine_checks import check_expert_gemm
from megatron_balance.cli.moe_checks import check_moe
from megatron_balance.cli.upstream_flags import refusal
from megatron_balance.config.flags import add_flags, flag_of
from megatron_balance.config.run_config import RunConfig
from megatron_balance.device.machine import Machine
from megatron_balance.device.shards import mark_shards
from megatron_balance.flow.layer import remember
from megatron_balance.flow.routers import define_losses, keep_precision
from megatron_balance.job.groups import expert_node_size
from megatron_balance.job.job import Launch, node_topology
from megatron_balance.observe.balance import LayerReport, log_fields, mean_over_ranks
from megatron_balance.timeline.runtime import Balancer
from megatron_balance.training.logging import moe_layer_pattern
from megatron_balance.training.progress import Progress

ONLY_IN_OUR_LOOP = ("balance_log_dir", "balance_timeline", "balance_calibrate", "moe_routing_replay_path")
"""Settings that only our own training program implements."""

NOT_THERE = (
    *("overlap_moe_expert_parallel_comm", "delay_wgrad_compute", "moe_expert_rank_capacity_factor", "moe_latent_size"),
    *("moe_use_upcycling", "fp8", "fp4", "cuda_graph_impl", "enable_cuda_graph"),
    *("external_cuda_graph", "optimizer_cuda_graph", "use_megatron_fsdp", "use_torch_fsdp2"),
    *("init_model_with_meta_device", "use_cpu_initialization", "data_parallel_random_init", "cpu_offloading"),
    *("fine_grained_activation_offloading", "overlap_param_gather_with_optimizer_step", "use_tp_pp_dp_mapping"),
    *("hybrid_context_parallel", "num_distributed_optimizer_instances"),
    *("gtp_weight_remat_size", "expert_gtp_weight_remat_size", "heterogeneous_layers_config_path", "perform_rl_step"),
    "spec",
)
"""Settings of some version of Megatron-LM that our MoE layer or the movement of experts does not support."""

OFF = (None, False, 0, "none", "", [], ())
"""Values that switch a setting off; a size or number of 1 also does."""

Report = Callable[[int, Mapping[int, LayerReport]], None]
"""Receives an iteration's number and its report for each layer number, on every rank."""


class Balancing:
    """The checked flags of one run, and the wiring built from them; no process group is needed.

    Args:
        args: the result of a parser with `add_balance_args`, also with `seq_length` and `micro_batch_size`.
        transformer: the model's configuration.
        groups: the process groups of the parallel layout; None: those of megatron-core's `parallel_state` at first use.

    Raises:
        ValueError: a flag is invalid; the message names it, its value and the remedy.
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
        self.is_off = self.config.balance.moe_layer_impl != "balanced"
        """Whether the MoE layers are megatron-core's own."""
        self.args = args
        self.groups = groups
        self.wiring: Wiring | None = None
        """None before the first call of `balanced_layer_spec`."""


def add_balance_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to another program's parser, and return it; ValueError if it has a flag of the same name."""
    for title, cls in OUR_GROUPS.items():
        added = add_flags(parser.add_argument_group(title), cls, field_help(cls))
        taken = [field.name for field in dataclasses.fields(cls) if field.name not in added]
        if taken:
            raise ValueError(f"{flag_of(taken[0])}: the parser has this flag already; call add_balance_args only once")
    return parser


def balanced_layer_spec(
    spec: ModuleSpec | TransformerBlockSubmodules, balancing: Balancing
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return a layer's or a block's spec with our MoE layer; every rank calls it after process groups exist."""
    if balancing.is_off:
        return spec
    if balancing.wiring is None:
        groups = balancing.groups or ProcessGroupCollection.use_mpu_process_groups()
        balancing.wiring = build_wiring(balancing.config, groups, balancing.progress)
    wiring = balancing.wiring
    if isinstance(spec, ModuleSpec):
        return build_layer_spec(spec, wiring)
    layers = [build_layer_spec(layer, wiring) for layer in spec.layer_specs or ()]
    return dataclasses.replace(spec, layer_specs=layers)


def attach(
    model: list[torch.nn.Module],
    balancing: Balancing,
    microbatches: Callable[[], int] = get_num_microbatches,
    report: Report | None = None,
) -> list[torch.nn.Module]:
    """Balance every training iteration of `model`; every rank of the job calls it once.

    `attach` may precede the construction of the optimizer and the loading of weights. An iteration begins with the
    first forward pass that is in training mode and has gradients enabled. It ends when gradients have been finalized.
    A forward pass without a backward pass must run in evaluation mode or without gradients.

    Args:
        model: this rank's model chunks, in megatron-core's DDP; returned, as by hooks of Megatron-LM's model builders.
        microbatches: returns the number of microbatches per data-parallel rank of the iteration in progress.
        report: called every `args.log_interval` iterations; None: the last rank prints a line.

    Raises:
        ValueError: the model is not in DDP, or was not built from `balanced_layer_spec`.
    """
    if balancing.is_off:
        return model
    chunks = [chunk for chunk in model if isinstance(chunk, DistributedDataParallel)]
    if len(chunks) < len(model):
        raise ValueError("attach: wrap the model in megatron.core.distributed.DistributedDataParallel before")
    if balancing.wiring is None:
        raise ValueError("attach: build the model from balanced_layer_spec(spec, balancing)")
    if dist.get_rank() == 0:
        for notice in balancing.notices:
            print(f"note: {notice}", flush=True)
    hooks = get_model_config(chunks[0])
    config = balancing.config.replace(transformer=hooks, ddp=chunks[0].ddp_config)
    wiring = dataclasses.replace(balancing.wiring, config=config)
    iterations = _Iterations(balancing, hooks, report or _print_line)
    hooks.finalize_model_grads_func = finalizer(wiring.dispatch, iterations.finalize_as_the_program)
    for chunk in chunks:
        # Must run before the balancer's hooks, which need an iteration in progress
        chunk.register_forward_pre_hook(iterations.begin)
    remember(chunks)
    unwrapped: Any = unwrap_model([*chunks])
    for chunk in unwrapped:
        mark_shards(chunk, wiring.groups)
    keep_precision(chunks)
    define_losses(chunks, (lambda tokens: tokens) if hooks.calculate_per_token_loss else None)
    force_workload(wiring, chunks, microbatches)
    balancing.balancer = build_balancer(wiring, chunks, None, microbatches=microbatches)
    iterations.finalize = hooks.finalize_model_grads_func
    hooks.finalize_model_grads_func = iterations.end
    return model


class _Iterations:
    """Detects the beginning and end of iterations from a model's passes."""

    def __init__(self, balancing: Balancing, hooks: TransformerConfig, report: Report) -> None:
        self.balancing = balancing
        self.hooks = hooks
        self.report = report
        self.finalize: Callable = finalize_model_grads
        """Returns guests' gradients, then calls `finalize_as_the_program`."""
        self._own: Callable = hooks.finalize_model_grads_func or finalize_model_grads
        self._before = self._own
        self._running = self._resumed = self._ending = False

    def begin(self, chunk: torch.nn.Module, inputs: Any) -> None:
        """Begin an iteration unless one is in progress. This is the forward pre-hook of each chunk."""
        if self._running or not (chunk.training and torch.is_grad_enabled()):
            return
        if self.hooks.finalize_model_grads_func != self.end:
            self._take_over()
        progress = self.balancing.progress
        if not self._resumed:
            # Megatron-LM sets args.iteration when it loads a checkpoint
            progress.iteration = getattr(self.balancing.args, "iteration", 0)
            self._resumed = True
        self._running = True
        if self.balancing.balancer is not None:
            self.balancing.balancer.begin_iteration(progress.iteration + 1)

    def _take_over(self) -> None:
        """Call the function that the program set when training began, as Megatron-Bridge does, within `end`."""
        if self._resumed:
            problem = "was replaced during training, so that gradients of guests would be lost"
            raise ValueError(f"finalize_model_grads_func of the model's config {problem}; set it before training")
        self._own = self.hooks.finalize_model_grads_func or finalize_model_grads
        self.hooks.finalize_model_grads_func = self.end

    def finalize_as_the_program(self, *args: Any, **kwargs: Any) -> Any:
        """Finalize gradients with the program's own function."""
        return self._own(*args, **kwargs)

    def end(self, *args: Any, **kwargs: Any) -> Any:
        """Finalize gradients and end the iteration. This is the transformer config's `finalize_model_grads_func`."""
        if self._ending:
            # The program's function contains this one, which it found in the config
            return self._before(*args, **kwargs)
        self._ending = True
        result = self.finalize(*args, **kwargs)
        self._ending = False
        progress = self.balancing.progress
        balancer = self.balancing.balancer
        progress.iteration += 1
        self._running = False
        if balancer is not None and progress.iteration % self.balancing.config.log.log_interval == 0:
            # Times on the device are known only after it has finished
            torch.cuda.synchronize()
            reports = mean_over_ranks(balancer.report(), len(moe_layer_pattern(self.hooks)))
            balancer.calibrate(reports, balancer.factors)
            self.report(progress.iteration, reports)
        return result


def _print_line(iteration: int, layers: Mapping[int, LayerReport]) -> None:
    if dist.get_rank() == dist.get_world_size() - 1 and layers:
        print(f" balancing in iteration {iteration:8d} |{log_fields([layers])}", flush=True)


def _check(values: Mapping[str, Any]) -> list[str]:
    """Check all settings, given by name, and return notices for the log; ValueError for an impossible combination."""
    fields = [field for cls in OUR_GROUPS.values() for field in dataclasses.fields(cls)]
    if any(field.name not in values for field in fields):
        raise ValueError("the flags of balancing are missing: call add_balance_args(parser) before parsing")
    for name, meaning in (("seq_length", "tokens of a sample"), ("micro_batch_size", "samples of a microbatch")):
        if values.get(name) is None:
            raise ValueError(f"{flag_of(name)} is required: args.{name}, the number of {meaning}")
    # The calling program chose the dispatcher, so the flag counts as given
    given = {field.name for field in fields if values[field.name] != field.default} | {"moe_token_dispatcher_type"}
    machine = Machine.here(1)
    line = CommandLine(values, given, machine)
    line.distributed_backend = line.get("distributed_backend") or ("nccl" if machine.cuda else "gloo")
    at_least(line, 1, ("balance_interval", "balance_guest_ring", "moe_comm_refit_interval"))
    refuse_idle_balancing(line)
    for name in ONLY_IN_OUR_LOOP:
        if name in given:
            raise ValueError(f"{flag_of(name)}: only pretrain_gpt_moe.py has it; leave it out")
    if line.balance_ownership == "transfer":
        raise ValueError("--balance-ownership transfer: only pretrain_gpt_moe.py has it; use --balance-ownership fixed")
    for name in NOT_THERE if line.moe_layer_impl == "balanced" else ():
        value = values.get(name)
        if value is True or (value not in OFF and value != 1):
            reason = refusal(flag_of(name)) or "not supported; leave it out"
            raise ValueError(f"{flag_of(name)} {value}: not with --moe-layer-impl balanced: {reason}")
    check_expert_gemm(line)
    check_moe(line)
    return line.notices


def _run_config(values: Mapping[str, Any], transformer: TransformerConfig) -> RunConfig:
    topology = node_topology(Launch.from_environment(), values["moe_comm_node_size"])
    expert_tp = transformer.expert_tensor_parallel_size or transformer.tensor_model_parallel_size
    expert_node_size(topology, transformer.expert_model_parallel_size, expert_tp)
    values = {**values, "moe_comm_node_size": topology.node_size}
    special = {"transformer": transformer, "optimizer": OptimizerConfig(), "ddp": DistributedDataParallelConfig()}
    return run_config(values, special)
