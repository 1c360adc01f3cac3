"""Builds the optimizer. Muon (`--optimizer muon`) trains matrices, and Adam trains all other parameters with it.

Muon replaces the momentum of a matrix's gradient by about the nearest orthogonal matrix
(https://kellerjordan.github.io/posts/muon/), so an update depends on the whole matrix. megatron-core applies it to
every parameter with two axes. Here, a layer's experts are one parameter [S, O, I] on each rank, in which each expert is
a matrix, and their biases [S, O] are no matrix.
"""

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizers
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.slot_weights import GroupedWeights

MARKS = ("expert_tp", "is_qkv")
"""Attributes by which megatron-core's Muon recognizes a parameter."""


def build_optimizer(
    settings: OptimizerConfig, model: Sequence[DistributedDataParallel], groups: ProcessGroupCollection
) -> MegatronOptimizer:
    """Return the optimizer of a model's chunks; every rank calls it.

    Raises:
        ValueError: Muon cannot train the model.
    """
    if settings.optimizer != "muon":
        return get_megatron_optimizer(settings, [*model], use_gloo_process_groups=False, pg_collection=groups)
    matrices = _matrices(model)
    others = [parameter for chunk in model for parameter in chunk.parameters() if id(parameter) not in matrices]
    with _frozen(others):
        # Of all ranks, so that each rank has the same ones, with or without parameters
        muon_groups = megatron_optimizers._get_param_groups([*model], settings, None)
    with _frozen(matrices.values()):
        adam = dataclasses.replace(settings, optimizer="adam")
        rest: Any = get_megatron_optimizer(adam, [*model], use_gloo_process_groups=False, pg_collection=groups)
    parts: list[Any] = []
    for with_experts in (False, True):
        own = [group for group in muon_groups if group["is_expert_parallel"] == with_experts]
        if own:
            part: Any = _wrapped(_muon(own, settings, model[0].config, groups), settings)
            part.grad_stats_parallel_group = groups.tp_ep_pp if with_experts else groups.mp
            # Versions before 0.19 have only the first
            for name in ("tp_group", "expert_tp_group"):
                if hasattr(rest.chained_optimizers[0], name):
                    setattr(part, name, getattr(rest.chained_optimizers[0], name))
            parts.append(part)
    for parameter in matrices.values():
        if (main := getattr(parameter, "main_param", None)) is not None:
            vars(main).update({name: getattr(parameter, name) for name in MARKS if hasattr(parameter, name)})
    for part in rest.chained_optimizers:
        # megatron-core asks all parts to have the same settings, and reads the name nowhere any more
        part.config = settings
    return ChainedOptimizer([*parts, *rest.chained_optimizers])


def _matrices(model: Iterable[torch.nn.Module]) -> dict[int, torch.nn.Parameter]:
    """Return the parameters that Muon trains, by identity, with megatron-core's marks and the axis of their shards."""
    found: dict[int, torch.nn.Parameter] = {}
    for chunk in model:
        stacks: dict[int, bool] = {}
        for module in chunk.modules():
            # Versions after 0.16.1 do not have it
            if isinstance(module, getattr(megatron_experts, "GroupedMLP", ())):
                reason = "megatron-core's layer then stores a rank's experts as one matrix"
                raise ValueError(f"--moe-grouped-gemm: not with --optimizer muon, because {reason}; leave it out")
            if isinstance(module, GroupedExperts) and module.shards > 1:
                marked: Any = module
                marked.linear_fc1.weight.partition_dim = 0
                marked.linear_fc2.weight.partition_dim = 1
            if isinstance(module, GroupedWeights):
                stacks |= {id(parameter): parameter is module.weight for parameter in module.parameters()}
        for name, parameter in chunk.named_parameters():
            embedding = getattr(parameter, "is_embedding_or_output_parameter", False)
            if parameter.requires_grad and not embedding and stacks.get(id(parameter), parameter.dim() == 2):
                marked = parameter
                if "experts" in name and "shared" not in name:
                    marked.expert_tp = True
                if "linear_qkv.weight" in name:
                    marked.is_qkv = True
                found[id(parameter)] = parameter
    return found


@contextlib.contextmanager
def _frozen(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Hide parameters from megatron-core's functions that build optimizers, inside the block."""
    hidden = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in hidden:
        parameter.requires_grad = False
    yield
    for parameter in hidden:
        parameter.requires_grad = True


def _muon(
    param_groups: list[dict], settings: OptimizerConfig, shape: TransformerConfig, groups: ProcessGroupCollection
) -> torch.optim.Optimizer:
    """Return megatron-core's Muon, extended to stacks of matrices [S, O, I]. ValueError: unknown coefficients."""
    # 0.19 imports its module by itself; 0.16 does not, because the module needs emerging-optimizers
    newer: Any = getattr(megatron_optimizers, "emerging_optimizers", None)
    coefficients = getattr(settings, "muon_coefficient_type", "quintic")
    # `custom` ones have no flag
    known = [] if newer is None else sorted({*newer.get_supported_coefficient_types()} - {"custom"})
    if newer is not None and coefficients not in known:
        raise ValueError(f"--muon-coefficient-type {coefficients}: choose from {', '.join(known)}")
    base: Any = (newer or importlib.import_module("megatron.core.optimizer.muon")).TensorParallelMuon

    class StackedMuon(base):
        def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **options: Any) -> torch.Tensor:
            if grad.dim() == 2:
                return super().orthogonalize(p, grad, **options)
            return torch.stack([super(StackedMuon, self).orthogonalize(p, matrix, **options) for matrix in grad])

    assert shape.num_query_groups is not None and shape.kv_channels is not None
    queries = shape.num_attention_heads // shape.num_query_groups * shape.kv_channels
    gate = [queries] * shape.attention_output_gate
    given: dict[str, Any] = {
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "split_qkv": settings.muon_split_qkv,
        "is_qkv_fn": lambda parameter: getattr(parameter, "is_qkv", False),
        "qkv_split_shapes": (queries, *gate, shape.kv_channels, shape.kv_channels),
        "fp32_matmul_prec": settings.muon_fp32_matmul_prec,
        "num_ns_steps": settings.muon_num_ns_steps,
        "scale_mode": settings.muon_scale_mode,
        "extra_scale_factor": settings.muon_extra_scale_factor,
        "pg_collection": groups,
    }
    # Names in 0.16 and in 0.19; coefficients are a choice since 0.19
    accepted = inspect.signature(base.__init__).parameters
    nesterov = getattr(settings, "muon_nesterov", None)
    renamed = {
        **dict.fromkeys(("momentum_beta", "momentum"), settings.muon_momentum),
        **dict.fromkeys(("use_nesterov", "nesterov"), settings.muon_use_nesterov if nesterov is None else nesterov),
        **dict.fromkeys(("mode", "tp_mode"), settings.muon_tp_mode),
        "coefficient_type": coefficients,
    }
    return StackedMuon(param_groups, **given, **{name: renamed[name] for name in renamed if name in accepted})


def _wrapped(inner: torch.optim.Optimizer, settings: OptimizerConfig) -> MegatronOptimizer:
    """Return megatron-core's wrapper of an optimizer, which has main parameters in half precision."""
    # Losses are not scaled, and `optimizer_state.allocate` allocates the state
    absent: Any = None
    if settings.bf16:
        return Float16OptimizerWithFloat16Params(inner, settings, absent, absent)
    return FP32Optimizer(inner, settings, absent)
