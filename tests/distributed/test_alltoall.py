"""Every all-to-all moves the same rows as all_to_all_single, with exactly the messages of its model."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import AllToAll, NodeAllToAll
from megatron_balance.comm.pipelined import MESSAGES_AT_ONCE
from megatron_balance.comm.registry import ALL_TO_ALLS, Chooser, load_all_to_all
from megatron_balance.cost.exchange import stages
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.job.groups import NodeGroups, new_node_groups
from megatron_balance.profile.cluster_profile import Fit, builtin
from tests.distributed import runs
from tests.variants import variants

LAYOUTS = {"1x4": (4, 4), "2x2": (4, 2), "4x1": (4, 1), "2x4": (8, 4), "4x2": (8, 2)}
"""Nodes x ranks per node -> total ranks, ranks per node."""

UNEVEN = {"3+3+2": (8, 3), "3+1": (4, 3)}
"""Layouts with a smaller last node."""

NAMES = ["default", *ALL_TO_ALLS]

SPLITS: dict[str, Callable[[int, int, int], int]] = {
    "uneven": lambda source, target, ranks: (3 * source + 5 * target) % 4,
    "skewed": lambda source, target, ranks: 1 + 40 * (target == 1) + 9 * (source == ranks - 1),
    "one row": lambda source, target, ranks: int((source, target) == (ranks - 1, 0)),
    "own rows": lambda source, target, ranks: 3 * (source == target),
    "nothing": lambda source, target, ranks: 0,
}
"""Rows from each source to each target."""


def splits_of(kind: str) -> torch.Tensor:
    ranks = range(dist.get_world_size())
    return torch.tensor([[SPLITS[kind](source, target, len(ranks)) for target in ranks] for source in ranks])


def load(name: str, nodes: NodeGroups) -> AllToAll:
    profile = builtin(nodes.ep.size(), nodes.node_size, 64, 128)
    return load_all_to_all(name, nodes.ep, nodes=lambda: nodes, profile=lambda: profile)


def all_of(names: Sequence[str], node_size: int) -> dict[str, AllToAll]:
    nodes = new_node_groups(dist.group.WORLD, node_size)
    return {name: load(name, nodes) for name in names}


def needed(member: AllToAll, splits_DD: torch.Tensor) -> torch.Tensor:
    """Return the split matrix, with -1 where the all-to-all says that it does not read."""
    if member.reads_all_splits:
        return splits_DD
    rank = dist.get_rank()
    own_DD = torch.full_like(splits_DD, -1)
    own_DD[rank], own_DD[:, rank] = splits_DD[rank], splits_DD[:, rank]
    return own_DD


def expected_rows(rows: torch.Tensor, splits_DD: torch.Tensor) -> torch.Tensor:
    sent = splits_DD[dist.get_rank()].tolist()
    received = splits_DD[:, dist.get_rank()].tolist()
    output = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(output, rows, received, sent)
    return output


def some_rows(count: int, dtype: torch.dtype, width: tuple[int, ...] = (3,)) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(0, 200, (count, *width), generator=generator).to(dtype)


def exchange_everything(names: list[str], node_size: int) -> None:
    rank = dist.get_rank()
    members = all_of(names, node_size)
    for kind in SPLITS:
        splits_DD = splits_of(kind)
        sent = int(splits_DD[rank].sum())
        received = int(splits_DD[:, rank].sum())
        for dtype, width in ((torch.int64, (3,)), (torch.uint8, (13,)), (torch.float32, ())):
            rows = some_rows(sent, dtype, width)
            expected = expected_rows(rows, splits_DD)
            for name, member in members.items():
                found = member.start(rows, needed(member, splits_DD)).wait()
                assert found.dtype == dtype and torch.equal(found, expected), (name, kind, dtype)
                for room in (received - 1, received + 5):
                    found = member.start(rows, needed(member, splits_DD), room).wait()
                    assert len(found) == max(received, room) and torch.equal(found[:received], expected), name
        for dtype in (torch.bfloat16, torch.float64):
            # Not contiguous, as activations may be
            rows = some_rows(sent, dtype, (3, 2)).transpose(1, 2) / 7
            weights = some_rows(received, dtype, (2, 3)) / 9
            expected = expected_rows(rows.contiguous(), splits_DD), expected_rows(weights, splits_DD.T)
            for name, member in members.items():
                assert torch.equal(member.start(rows, needed(member, splits_DD)).wait(), expected[0]), (
                    name,
                    kind,
                    dtype,
                )
                gradients = member.reverse.start(weights, needed(member, splits_DD).T).wait()
                assert torch.equal(gradients, expected[1]), (name, kind, dtype)


@pytest.mark.parametrize(("world_size", "node_size"), variants(LAYOUTS, quick=("2x2",)))
def test_all_move_the_same_rows(ranks, world_size: int, node_size: int) -> None:
    ranks(world_size).run(exchange_everything, NAMES, node_size)


@pytest.mark.parametrize(("world_size", "node_size"), UNEVEN.values(), ids=UNEVEN)
def test_a_smaller_last_node(ranks, world_size: int, node_size: int) -> None:
    ranks(world_size).run(exchange_everything, ["1dh", "pipe", "auto"], node_size)


def refused() -> str:
    with pytest.raises(ValueError) as error:
        all_of(["2dh"], 3)
    # Other ranks may still be connecting the groups that this rank would now close
    dist.barrier()
    return str(error.value)


def test_2dh_refuses_a_smaller_last_node(ranks) -> None:
    for message in ranks(4).run(refused):
        assert "--moe-comm-node-size 3" in message and "divisor of 4" in message and "pipe" in message


TURNS = itertools.cycle(["1dh", "2dh", "pipe", "default"])


@mock.patch.object(Chooser, "predict", lambda *_: next(TURNS))
@mock.patch("megatron_balance.comm.registry.TURNS", 1)
def wait_in_any_order(node_size: int) -> None:
    """Start several exchanges of each all-to-all and wait in random order; `auto` switches algorithm each time."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    splits = [splits_of(kind) * factor for factor, kind in enumerate([*SPLITS, "skewed", "uneven"], start=1)]
    rows = [some_rows(int(splits_DD[rank].sum()), torch.float32, (50,)) for splits_DD in splits]
    expected = [expected_rows(*pair) for pair in zip(rows, splits, strict=True)]
    for name, member in all_of(NAMES, node_size).items():
        exchanges = [member.start(*pair) for pair in zip(rows, splits, strict=True)]
        order = list(range(len(splits)))
        # A different order on every rank
        random.Random(rank + size).shuffle(order)
        for index in order:
            assert torch.equal(exchanges[index].wait(), expected[index]), (name, index)
        # Waiting again changes nothing
        assert torch.equal(exchanges[0].wait(), expected[0]), name


@pytest.mark.parametrize(("world_size", "node_size"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.slow)])
def test_several_at_a_time(ranks, world_size: int, node_size: int) -> None:
    # gloo matches messages by tag
    ranks(world_size).run(wait_in_any_order, node_size, in_one_order=False)


def choose() -> list[str]:
    """Return the log lines of `auto` for two exchanges of short rows and two of long rows, in nodes of two ranks."""
    said: list[str] = []
    nodes = new_node_groups(dist.group.WORLD, 2)
    profile = replace(builtin(4, 2, 64, 128), all_to_alls={"2dh": Fit(20e-6, 1e-9, 0, 0)})
    member = load_all_to_all("auto", nodes.ep, nodes=lambda: nodes, profile=lambda: profile, log=said.append)
    for width in (1, 1, 500_000, 500_000):
        rows = torch.full((4, width), float(dist.get_rank()))
        received = member.start(rows, torch.ones(4, 4, dtype=torch.int64)).wait()
        assert torch.equal(received[:, 0], torch.arange(4.0))
    return said


def test_auto_says_once_what_it_chose(ranks) -> None:
    said = ranks(4).run(choose)
    assert said == [said[0]] * 4
    short, long = said[0]
    # Two messages between nodes, at 25 us and 2.5 us more; 4 MB to other nodes at 25 GB/s; 6 MB at 1 GB/s
    assert short.startswith(
        "--moe-comm-alltoall auto: 2dh for 6.4e-05 MB in all (predicted: pipe 0.0285 ms, default 0.0275 ms, 2"
    )
    assert long.startswith("--moe-comm-alltoall auto: pipe for 32 MB in all (predicted: pipe 0.188 ms, default 0.187 ")
    assert "2dh 0.02 ms" in short and "2dh 6.02 ms" in long


def start_alone() -> None:
    """Start the last rank before the others, and let the first rank wait after them.

    This deadlocks if `start` blocks until the others start, or if an exchange progresses only inside `wait`.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    # More data than socket buffers hold
    splits_DD = torch.full((size, size), 100)
    rows = torch.full((100 * size, 5000), rank, dtype=torch.float64)
    # Collectives of one group must have one order on all ranks
    aside = dist.new_group()
    for member in all_of(NAMES, 2).values():
        started = member.start(rows, splits_DD) if rank == size - 1 else None
        dist.all_reduce(torch.ones(1), group=aside)
        exchange = started or member.start(rows, splits_DD)
        if rank > 0:
            exchange.wait()
        dist.all_reduce(torch.ones(1), group=aside)
        received = exchange.wait()
        assert torch.equal(received[:, 0], torch.arange(size).repeat_interleave(100).double())


def test_exchanges_go_on_by_themselves(ranks) -> None:
    # One rank is ahead of the others on purpose
    ranks(4).run(start_alone, timeout=120, in_one_order=False)


class Watched:
    """Records which messages are posted in which group, and when they are waited for."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, tuple[int, ...]]] = []
        """(post or wait, isend or irecv, ranks of the group) of every message."""
        self.sent: list[tuple[tuple[int, ...], int, int]] = []
        """(ranks of the group, target, bytes) of every message."""

    def batch(self, operations: list[dist.P2POp]) -> list[object]:
        group = tuple(dist.get_process_group_ranks(operations[0].group))
        receiving = [operation.op is dist.irecv for operation in operations]
        assert receiving == sorted(receiving, reverse=True), "receives come first"
        self.sent += [(group, one.peer, one.tensor.nbytes) for one in operations if one.op is dist.isend]
        verbs = [operation.op.__name__ for operation in operations]
        self.events += [("post", verb, group) for verb in verbs]

        def watched(work: dist.Work, verb: str) -> mock.Mock:
            def wait() -> None:
                work.wait()
                self.events.append(("wait", verb, group))

            return mock.Mock(wait=wait)

        return [watched(*pair) for pair in zip(POST(operations), verbs, strict=True)]


POST = dist.batch_isend_irecv


def record(names: Sequence[str], node_size: int) -> dict[str, Watched]:
    """Return the messages and waits of this rank in one exchange of uneven rows of 24 bytes, by name."""
    splits_DD = splits_of("uneven")
    rows = some_rows(int(splits_DD[dist.get_rank()].sum()), torch.float64)
    found = {}
    for name, member in all_of(names, node_size).items():
        found[name] = watched = Watched()
        with mock.patch.object(dist, "batch_isend_irecv", watched.batch):
            member.start(rows, needed(member, splits_DD)).wait()
    return found


@pytest.mark.parametrize(
    ("world_size", "node_size"),
    [LAYOUTS["2x4"], UNEVEN["3+3+2"], pytest.param(*LAYOUTS["4x2"], marks=pytest.mark.slow)],
)
def test_messages_are_those_of_the_model(ranks, world_size: int, node_size: int) -> None:
    # 2dh refuses a smaller last node
    names = ["p2p", "1dh", "pipe", *(["2dh"] if world_size % node_size == 0 else [])]
    watched = ranks(world_size).run(record, names, node_size)
    for name in names:
        check_messages(name, [own[name] for own in watched], node_size)
    if world_size % node_size == 0:
        check_pipe_keeps_both_levels_busy([own["pipe"] for own in watched], node_size)


def check_messages(name: str, watched: Sequence[Watched], node_size: int) -> None:
    world_size = len(watched)
    sent = Counter((source, *message[1:]) for source, found in enumerate(watched) for message in found.sent)
    bytes_DD = np.array([[24 * ((3 * i + 5 * j) % 4) for j in range(world_size)] for i in range(world_size)])
    expected = Counter(
        (source, target, stage_DD[source, target])
        for stage_DD in stages(name, bytes_DD, node_size)
        for source, target in zip(*map(list, stage_DD.nonzero()), strict=True)
    )
    assert sent == expected
    crossing = Counter(source for source, target, _ in sent.elements() if source // node_size != target // node_size)
    nodes = -(-world_size // node_size)
    senders = {"1dh": set(range(0, world_size, node_size))}.get(name, set(range(world_size)))
    assert set(crossing) == senders
    if name in ("1dh", "2dh"):
        assert set(crossing.values()) == {nodes - 1}
        assert sum(stage.sum() for stage in stages(name, bytes_DD, node_size)) > bytes_DD.sum()


def rindex(values: list, value: object) -> int:
    return len(values) - 1 - values[::-1].index(value)


def check_pipe_keeps_both_levels_busy(every: Sequence[Watched], node_size: int) -> None:
    everyone = tuple(range(len(every)))
    for rank, watched in enumerate(every):
        first = rank - rank % node_size
        node = everyone[first : first + node_size]
        near, far = ([event for event in watched.events if event[2] == group] for group in (node, everyone))
        # Each level starts before the other has ended
        assert watched.events.index(far[0]) < rindex(watched.events, near[-1])
        assert watched.events.index(near[0]) < rindex(watched.events, far[-1])
        under_way = itertools.accumulate(1 if verb == "post" else -1 for verb, kind, _ in far if kind == "isend")
        assert max(under_way) <= MESSAGES_AT_ONCE
        for group, target, _ in watched.sent:
            assert group == (node if target in node else everyone)


def in_two_groups() -> None:
    """Use two expert-parallel groups, the even and the odd ranks, with two ranks of each group per node."""
    rank = dist.get_rank()
    halves = [dist.new_group(range(start, 8, 2)) for start in (0, 1)]
    nodes = new_node_groups(halves[rank % 2], 2)
    assert dist.get_process_group_ranks(nodes.intra) == [rank % 2 + 4 * (rank // 4), rank % 2 + 4 * (rank // 4) + 2]
    assert dist.get_process_group_ranks(nodes.inter) == [rank % 4, rank % 4 + 4]
    rows = torch.arange(4) + 10 * rank
    expected = torch.tensor([10 * source + rank // 2 for source in range(rank % 2, 8, 2)])
    for name in NAMES:
        found = load(name, nodes).start(rows, torch.ones(4, 4, dtype=torch.int64)).wait()
        assert torch.equal(found, expected), name


def test_groups_at_the_same_time(ranks) -> None:
    ranks(8).run(in_two_groups)


RUN = "--expert-model-parallel-size 4 --moe-comm-node-size 2 --moe-token-dispatcher-type alltoall"


def built(name: str) -> tuple[int, int]:
    """Return (groups created, all-to-alls) of a run with two layers."""
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
