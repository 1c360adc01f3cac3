"""Runs with each all-to-all: what they learn is the same, and their layers share one exchange."""

from unittest import mock

import torch.distributed as dist

from megatron_balance.comm.alltoall import NodeAllToAll
from tests.distributed import runs

RUN = "--expert-model-parallel-size 4 --moe-comm-node-size 2 --moe-token-dispatcher-type alltoall"


def test_training_does_not_depend_on_the_all_to_all(ranks) -> None:
    curves = {
        name: ranks(4).run(runs.train_curve, f"{RUN} --moe-comm-alltoall {name}", 2)
        for name in [
            "flat",
            "default",
            "1dh",
            "2dh",
            "pipe",
            "auto",
            "megatron_balance.comm.pipelined:PipelinedAllToAll",
        ]
    }
    assert len(curves["flat"][0]) == 2
    assert all(curve == curves["flat"] for curve in curves.values()), curves


def built(name: str) -> tuple[int, int]:
    """Return (groups created, all-to-alls) of a run with two layers."""
    from megatron_balance.flow.layer import BalancedMoELayer

    created = []

    def count(*args: object, **kwargs: object) -> object:
        created.append(kwargs.get("timeout"))
        return NEW_GROUP(*args, **kwargs)

    with mock.patch("megatron_balance.job.groups.dist.new_group", count):
        run = runs.build(f"{RUN} --moe-comm-alltoall {name} --distributed-timeout-minutes 3")
    layers = [module for module in run.model[0].modules() if isinstance(module, BalancedMoELayer)]
    assert len(layers) == 2
    used = {id(layer.dispatcher.exchange.dispatch) for layer in layers}
    is_of_nodes = isinstance(layers[0].dispatcher.exchange.dispatch, NodeAllToAll)
    assert is_of_nodes == (name not in ("default", "flat", "p2p"))
    ours = [timeout for timeout in created if timeout is not None and timeout.total_seconds() == 3 * 60 + 6]
    return len(ours), len(used)


NEW_GROUP = dist.new_group


def test_layers_share_one_all_to_all_and_its_groups(ranks) -> None:
    without, _ = ranks(4).run(built, "flat")[0]
    # Two nodes, and two sets of equal local ranks
    for name, more in {"p2p": 0, "2dh": 4, "auto": 4}.items():
        assert ranks(4).run(built, name)[0] == (without + more, 1), name
