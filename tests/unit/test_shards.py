"""device/shards.py: marks that megatron-core's modules leave out or set wrongly."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_balance.device.shards import mark_experts, mark_shards


class Projections(torch.nn.Module):
    """A shard, and a copy that is marked as one, as Transformer Engine marks latent attention's down projections."""

    def __init__(self) -> None:
        super().__init__()
        self.shard = torch.nn.Parameter(torch.ones(2, 3))
        self.copy = torch.nn.Parameter(torch.ones(2, 3))
        self.copy.tensor_model_parallel = True

    def sharded_state_dict(self, metadata: dict) -> dict[str, ShardedTensor]:
        return {
            "shard": ShardedTensor.from_rank_offsets("shard", self.shard.data, (1, 1, 4)),
            # One of three layers
            "copy": ShardedTensor.from_rank_offsets("copy", self.copy.data, (0, 1, 3), prepend_axis_num=1),
        }


@pytest.mark.parametrize(("size", "expected"), [(4, (True, False)), (1, (True, True))])
def test_what_a_checkpoint_stores_in_parts_is_a_shard(size: int, expected: tuple[bool, bool]) -> None:
    """On a single rank, all parameters are counted once."""
    module = Projections()
    group = SimpleNamespace(size=lambda: size)
    mark_shards(module, SimpleNamespace(tp=group, expt_tp=group, dp_cp=None))
    assert (module.shard.tensor_model_parallel, module.copy.tensor_model_parallel) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((1, 1, 1), True), ((2, 1, 2), True), ((1, 2, 1), False), ((2, 1, 1), False), ((1, 1, 2), False)],
)
def test_gradients_of_experts_are_summed_like_others_only_if_all_ranks_have_them(
    sizes: tuple[int, int, int], expected: bool
) -> None:
    groups = {
        name: SimpleNamespace(size=lambda size=size: size)
        for name, size in zip(("tp", "ep", "expt_tp"), sizes, strict=True)
    }
    experts = torch.nn.Linear(2, 2)
    mark_experts(experts, SimpleNamespace(**groups))
    assert [parameter.allreduce for parameter in experts.parameters()] == [expected, expected]
