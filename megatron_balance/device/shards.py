"""Marks of parameters: from these, megatron-core derives which ranks sum a gradient, and counts each gradient once in a
norm.

megatron-core's modules set `tensor_model_parallel` while they initialize weights, so they omit it with
`--no-initialization`. They never set it on learnable sinks and on experts' second biases, and some modules set it on
copies.
"""

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule


def mark_experts(experts: torch.nn.Module, groups: ProcessGroupCollection) -> None:
    """Set `allreduce` and `sequence_parallel` on all parameters of a layer's experts, before DDP sees them. Only ranks
    with the same experts sum their gradients, unless experts are distributed like other parameters."""
    like_others = groups.ep.size() == 1 and groups.expt_tp.size() == groups.tp.size()
    for parameter in experts.parameters():
        parameter.allreduce = like_others  # pyright: ignore[reportAttributeAccessIssue]
        parameter.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]


def mark_shards(module: MegatronModule, groups: ProcessGroupCollection) -> None:
    """Set `tensor_model_parallel` on all parameters: true if no other rank holds a copy. The module's
    `sharded_state_dict` decides: true for a parameter that checkpoints store as a shard of the (expert) tensor-parallel
    group. Parameters missing from it keep their marks."""
    state = module.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
    for name, parameter in module.named_parameters():
        if (entry := state.get(name)) is None:
            continue
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        group = groups.tp if getattr(parameter, "allreduce", True) else groups.expt_tp
        parameter.tensor_model_parallel = group.size() == 1 or _is_cut(entry)  # pyright: ignore[reportAttributeAccessIssue]


def _is_cut(entry: ShardedTensor | ShardedTensorFactory) -> bool:
    """Return whether a tensor is a part of a larger one; prepended axes only number layers and experts."""
    parts = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
    return any(part.local_shape != part.global_shape[part.prepend_axis_num :] for part in parts)
