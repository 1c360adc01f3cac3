"""The timed operations, on synthetic tensors: collectives, Trans and Agg, experts, codecs, and schedules' exchanges."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import AllToAll, default_all_to_all, post_operations, wait_for
from megatron_balance.comm.codecs import Codec
from megatron_balance.comm.trans_agg import TransAgg
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.rows import combine, gather_rows, row_order
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import ExpertPiece, TransPlan

Call = Callable[[], object]
"""An operation to time; it can be called any number of times."""


BothPasses = tuple[Call, Call]
"""A forward pass of one rank's experts, and the backward pass of the latest one; or both directions of a codec."""


class Load(NamedTuple):
    """Messages that every rank sends and receives in a Trans or an Agg."""

    batches: int
    """Number of batches; each has a piece of every expert."""
    experts: int
    num_bytes: int
    """Bytes of an expert."""


def _one_way(group: dist.ProcessGroup, buffer: torch.Tensor, step: int) -> Call:
    """Return a call in which every other run of `step` ranks sends to the next run, rank by rank."""
    received = torch.empty_like(buffer)
    rank = group.rank()
    size = group.size()
    sends = rank // step % 2 == 0
    peer = rank + step if sends else rank - step
    if peer >= size:
        return idle
    verb, tensor = (dist.isend, buffer) if sends else (dist.irecv, received)
    return lambda: wait_for(post_operations([dist.P2POp(verb, tensor, group=group, group_peer=peer)]))


def messages(group: dist.ProcessGroup, buffer: torch.Tensor, steps: Sequence[int]) -> Call:
    """Return a call in which each rank sends its buffer to the ranks at distances `steps` after it."""
    received = [torch.empty_like(buffer) for _ in steps]
    rank = group.rank()
    size = group.size()

    def run() -> None:
        receives = [
            dist.P2POp(dist.irecv, room, group=group, group_peer=(rank - step) % size, tag=tag)
            for tag, (room, step) in enumerate(zip(received, steps, strict=True))
        ]
        sends = [
            dist.P2POp(dist.isend, buffer, group=group, group_peer=(rank + step) % size, tag=tag)
            for tag, step in enumerate(steps)
        ]
        wait_for(post_operations([*receives, *sends]))

    return run


def idle() -> None:
    """Do nothing while other groups measure."""


def even_exchange(exchange: AllToAll, buffer: torch.Tensor) -> Call:
    """Return a call in which each rank exchanges equal parts of its buffer with all others, and copies such a part."""
    size = exchange.group.size()
    each = -(-len(buffer) // (size - 1))
    splits_DD = torch.full((size, size), each)
    sent = buffer.new_zeros(each * size)
    return lambda: exchange.start(sent, splits_DD).wait()


def _all_gather(group: dist.ProcessGroup, buffer: torch.Tensor, _: int) -> Call:
    part = buffer.new_zeros(-(-len(buffer) // group.size()))
    gathered = part.new_empty(len(part) * group.size())
    return lambda: dist.all_gather_into_tensor(gathered, part, group=group)


@dataclass(frozen=True, eq=False)
class SyntheticSlots:
    """A rank's slots, as many guests as experts; their tensors are weights and gradients at once."""

    slots: Sequence[Sequence[torch.Tensor]]

    def ready(self) -> None:
        """Nothing to wait for."""

    def weights_of(self, slot: int) -> Sequence[torch.Tensor]:
        return self.slots[slot]

    def gradients_of(self, slot: int) -> Sequence[torch.Tensor]:
        return self.slots[slot]


def plan(num_ranks: int, step: int, load: Load) -> tuple[TransPlan, Placement]:
    """Return a plan in which every rank sends its experts to ranks at multiples of the distance `step`."""
    peers = max(1, num_ranks // step - 1)
    routes = [
        (rank * load.experts + index, rank, (rank + step * (1 + index % peers)) % num_ranks)
        for rank in range(num_ranks)
        for index in range(load.experts)
    ]
    rounds = tuple(tuple(ExpertPiece(*route, piece, load.batches) for route in routes) for piece in range(load.batches))
    owners = Placement.identity(num_ranks * load.experts, num_ranks, load.experts)
    return TransPlan.of(rounds), owners.with_hosts((expert, target) for expert, _, target in routes)


def transfer(
    kind: str, group: dist.ProcessGroup, step: int, load: Load, slots: Sequence[Sequence[torch.Tensor]]
) -> Call:
    """Return a call that runs the Trans or Agg of `plan`, given the tensors of as many experts as guests."""
    run = getattr(TransAgg(group), kind)
    return functools.partial(run, *plan(group.size(), step, load), SyntheticSlots(slots))


OPERATIONS: dict[str, Callable[[dist.ProcessGroup, torch.Tensor, int], Call]] = {
    "p2p": lambda group, buffer, step: messages(group, buffer, [step]),
    "one_way": _one_way,
    "all_to_all": lambda group, buffer, _: even_exchange(default_all_to_all(group), buffer),
    "all_gather": _all_gather,
    "all_reduce": lambda group, buffer, _: lambda: dist.all_reduce(buffer, group=group),
}
"""Collective -> function of a group, a buffer with the bytes of `ClusterProfile.links`, and a distance of ranks."""


def expert_passes(experts: GroupedExperts, tokens: int) -> BothPasses:
    """Return passes over `tokens` rows, shared evenly among the experts, in their dtype and on their device."""
    weight_SOH = experts.linear_fc1.weight
    slots = len(weight_SOH)
    hidden = weight_SOH.shape[-1]
    tokens_per_slot = torch.tensor([(tokens + slot) // slots for slot in range(slots)])
    # Not the default generator, because measuring must not change the training
    generator = torch.Generator(weight_SOH.device).manual_seed(0)
    new = {"dtype": weight_SOH.dtype, "device": weight_SOH.device, "generator": generator}
    rows_RH = torch.randn(tokens, hidden, **new).requires_grad_()
    probs_R = torch.rand(tokens, **new).requires_grad_()
    gradient_RH = torch.randn(tokens, hidden, **new)
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        # Otherwise gradients would accumulate
        for tensor in (rows_RH, probs_R, *experts.parameters()):
            tensor.grad = None
        outputs[:] = [experts(rows_RH, tokens_per_slot, probs_R)]

    def backward() -> None:
        outputs.pop().backward(gradient_RH)

    return forward, backward


def codec_passes(codec: Codec, tokens: int, *, hidden: int, dtype: torch.dtype, device: torch.device) -> BothPasses:
    """Return the compression of `tokens` rows, and the decompression of their payload, as passes."""
    generator = torch.Generator(device).manual_seed(0)
    rows_RH = torch.randn(tokens, hidden, device=device, generator=generator).to(dtype)
    payload = codec.encode(rows_RH)
    return lambda: codec.encode(rows_RH), lambda: codec.decode(payload, hidden, dtype)


def schedule_call(
    dispatch: ParallelDispatch, line: str, num_bytes: int, *, hidden: int, dtype: torch.dtype, device: torch.device
) -> Call:
    """Return the operation whose time a line of ParallelLines predicts, on about `num_bytes` bytes.

    Args:
        dispatch: megatron's for `gathered`; s1's or s2's for `all_to_all`; s2's with a group for simultaneous exchanges
            for the lines of tensor-parallel ranks.
        line: a name in ParallelLines.
    """
    groups = dispatch.groups
    if line == "all_gather":
        buffer = torch.zeros(-(-num_bytes // dtype.itemsize), dtype=dtype, device=device)
        return OPERATIONS["all_gather"](groups.tp, buffer, 1)
    sources = groups.tp_ep.size()
    hosts = groups.ep.size()
    row_bytes = hidden * dtype.itemsize

    def rows_of(number: int) -> torch.Tensor:
        return torch.zeros(number, hidden, dtype=dtype, device=device)

    if line == "sorting":
        return _sorting(rows_of(-(-num_bytes // row_bytes)), hosts)
    exchange = default_all_to_all(dispatch.exchange_group)
    sharding = dispatch.sharding()
    each = -(-num_bytes // (row_bytes * (hosts if line == "gathered" else sources)))
    splits_DH = torch.full((sources, hosts), each)
    results = rows_of(each * sources)
    if line == "gathered":
        rows = rows_of(each * hosts)

        def both_directions() -> None:
            sharding.spread(exchange, rows, splits_DH).wait()
            sharding.collect(exchange, results, splits_DH).wait()

        return both_directions
    if line == "simultaneous":
        assert dispatch.simultaneous is not None
        sharding = dispatch.simultaneous
    return lambda: sharding.collect(exchange, results, splits_DH).wait()


def _sorting(rows: torch.Tensor, hosts: int) -> Call:
    """Return a call that copies rows by host and sums them again, forward and backward."""
    routing = torch.arange(len(rows), device=rows.device)[:, None] % hosts == torch.arange(hosts, device=rows.device)

    def both_directions() -> None:
        order = row_order(routing, len(rows))
        # The gradient of a copy is a sum, and the gradient of a sum is a copy
        for _ in ("forward", "backward"):
            combine(gather_rows(rows, order), order)

    return both_directions
