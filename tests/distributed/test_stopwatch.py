"""The stopwatch and its operations on real ranks: what they send, and how often and in which order they are timed."""

import functools
from unittest import mock

import torch
import torch.distributed as dist

from megatron_balance.measure.operations import OPERATIONS
from megatron_balance.measure.stopwatch import GroupBench, Stopwatch


def record_traffic() -> dict[str, tuple[int, int]]:
    """Return the bytes that this rank sends and receives in each collective on a buffer of 1200 bytes."""
    buffer = torch.zeros(300)
    traffic = {}
    with mock.patch.object(dist, "batch_isend_irecv", return_value=[]) as call:
        OPERATIONS["all_to_all"](dist.group.WORLD, buffer, 1)()
        messages = {
            verb: [one for one in call.call_args.args[0] if one.op is verb] for verb in (dist.isend, dist.irecv)
        }
        traffic["all_to_all"] = tuple(sum(one.tensor.nbytes for one in some) for some in messages.values())
        others = {rank: 400 for rank in range(4) if rank != dist.get_rank()}
        assert all({one.peer: one.tensor.nbytes for one in some} == others for some in messages.values())
    with mock.patch.object(dist, "all_gather_into_tensor") as call:
        OPERATIONS["all_gather"](dist.group.WORLD, buffer, 1)()
        traffic["all_gather"] = (call.call_args.args[1].nbytes, call.call_args.args[0].nbytes)
    with mock.patch.object(dist, "batch_isend_irecv", return_value=[]) as call:
        for step in (1, 2):
            OPERATIONS["p2p"](dist.group.WORLD, buffer, step)()
            receive, send = call.call_args.args[0]
            traffic["p2p"] = (send.tensor.nbytes, receive.tensor.nbytes)
            assert (send.peer, receive.peer) == ((dist.get_rank() + step) % 4, (dist.get_rank() - step) % 4)
        call.reset_mock()
        OPERATIONS["one_way"](dist.group.WORLD, buffer, 2)()
        (one,) = call.call_args.args[0]
        assert (one.op, one.peer) == ((dist.isend, dist.get_rank() + 2), (dist.irecv, dist.get_rank() - 2))[
            dist.get_rank() // 2
        ]
        call.reset_mock()
        OPERATIONS["one_way"](dist.group.WORLD, buffer, 3)()
        assert [one.peer for call in call.call_args_list for one in call.args[0]] == {0: [3], 3: [0]}.get(
            dist.get_rank(), []
        )
    return traffic


def test_bytes_are_those_of_the_definition(ranks) -> None:
    expected = {"all_to_all": (1200, 1200), "all_gather": (300, 1200), "p2p": (1200, 1200)}
    assert ranks(4).run(record_traffic) == [expected] * 4


def orders() -> list[list[int]]:
    """Return the order of the calls in each of four repeats, after the first call of each."""
    found: list[int] = []
    stopwatch = Stopwatch(dist.group.WORLD, torch.device("cpu"), 4)
    calls = [functools.partial(found.append, index) for index in range(8)]
    stopwatch.typical(calls)
    stopwatch.typical(calls, 2)
    return [found[first : first + 8] for first in range(0, 80, 8)]


def test_no_call_always_follows_the_same_one(ranks) -> None:
    first, *others = ranks(2).run(orders)
    assert others == [first]
    assert all(sorted(order) == [*range(8)] for order in first)
    assert len(set(map(tuple, first[1:5]))) == 4
    for order in first[6:]:
        assert all(after == before + 1 for before, after in zip(order[::2], order[1::2], strict=True))


def batches() -> dict[int, tuple[set[int], int]]:
    """Return, by the number of messages of a batch, the ranks that get one, and the messages that this rank sends."""
    bench = GroupBench(
        stopwatch=Stopwatch(dist.group.WORLD, torch.device("cpu"), 1),
        groups={(0, 1, 2, 3): dist.group.WORLD},
        passes=mock.Mock(),
        dtype=torch.float32,
        node_size=2,
    )
    bench.seconds("messages", (0, 1, 2, 3), [1, 7])
    found = {}
    with mock.patch.object(dist, "batch_isend_irecv", return_value=[]) as call:
        for count in (2, 7):
            bench.seconds("messages", (0, 1, 2, 3), [count])
            sent = [one for one in call.call_args.args[0] if one.op is dist.isend]
            received = [one for one in call.call_args.args[0] if one.op is dist.irecv]
            assert len(received) == count and {one.tensor.nbytes for one in sent} == {256}
            found[count] = {(one.peer - dist.get_rank()) % 4 for one in sent}, len(sent)
    return found


def test_batches_of_messages(ranks) -> None:
    assert ranks(4).run(batches) == [{2: ({1, 2}, 2), 7: ({1, 2, 3}, 7)}] * 4
