"""One rank's experts, codec and exchanges on synthetic tokens, for measure/measure.py to time."""

import torch

from megatron_balance.comm.alltoall import AllToAll
from megatron_balance.comm.codecs import Codec
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.rows import RowOrder, combine, gather_rows
from megatron_balance.measure.stopwatch import OPERATIONS, Call, Passes


def expert_passes(experts: GroupedExperts, tokens: int) -> Passes:
    """Return `slot_passes` over `tokens` rows that are shared evenly among the experts."""
    slots = len(experts.linear_fc1.weight)
    return slot_passes(experts, torch.tensor([(tokens + slot) // slots for slot in range(slots)]))


def slot_passes(experts: GroupedExperts, tokens_per_slot: torch.Tensor) -> Passes:
    """Return passes over `tokens_per_slot` [S] int64 rows per expert, in the experts' dtype and on their device."""
    weight_SOH = experts.linear_fc1.weight
    tokens, hidden = int(tokens_per_slot.sum()), weight_SOH.shape[-1]
    # Not the default generator: measuring must not change the training
    generator = torch.Generator(weight_SOH.device).manual_seed(0)
    new = {"dtype": weight_SOH.dtype, "device": weight_SOH.device, "generator": generator}
    rows_RH = torch.randn(tokens, hidden, **new).requires_grad_()
    probs_R = torch.rand(tokens, **new).requires_grad_()
    gradient_RH = torch.randn(tokens, hidden, **new)
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        # Otherwise each pass would add its gradient to the last one
        for tensor in (rows_RH, probs_R, *experts.parameters()):
            tensor.grad = None
        outputs[:] = [experts(rows_RH, tokens_per_slot, probs_R)]

    def backward() -> None:
        outputs.pop().backward(gradient_RH)

    return Passes(forward, backward)


def codec_passes(codec: Codec, tokens: int, *, hidden: int, dtype: torch.dtype, device: torch.device) -> Passes:
    """Return the compression of `tokens` rows and the decompression of their payload, as passes."""
    generator = torch.Generator(device).manual_seed(0)
    rows_RH = torch.randn(tokens, hidden, device=device, generator=generator).to(dtype)
    payload = codec.encode(rows_RH)
    return Passes(lambda: codec.encode(rows_RH), lambda: codec.decode(payload, hidden, dtype))


def schedule_call(
    dispatch: ParallelDispatch,
    wire: AllToAll,
    line: str,
    num_bytes: int,
    *,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Call:
    """Return the operation whose time a line of ParallelLines predicts, on about `num_bytes` bytes.

    Args:
        dispatch: the dispatch of s2, with a group for simultaneous exchanges.
        wire: the all-to-all among all shards of all hosts.
        line: a name in ParallelLines.
    """
    groups = dispatch.groups
    if line == "all_gather":
        buffer = torch.zeros(-(-num_bytes // dtype.itemsize), dtype=dtype, device=device)
        return OPERATIONS["all_gather"](groups.tp, buffer)
    sources, hosts, row_bytes = wire.group.size(), groups.ep.size(), hidden * dtype.itemsize
    if line == "sorting":
        rows = torch.zeros(-(-num_bytes // row_bytes), hidden, dtype=dtype, device=device, requires_grad=True)
        routing = torch.arange(len(rows), device=device)[:, None] % hosts == torch.arange(hosts, device=device)

        def there_and_back() -> None:
            rows.grad = None
            order = RowOrder.of(routing, len(rows))
            output = combine(gather_rows(rows, order), order)
            output.backward(output.detach())

        return there_and_back
    each = -(-num_bytes // (row_bytes * sources))
    splits_DH = torch.full((sources, hosts), each)
    sharding = dispatch.simultaneous if line == "simultaneous" else dispatch.sharding()
    assert sharding is not None
    results = torch.zeros(int(splits_DH[:, groups.ep.rank()].sum()), hidden, dtype=dtype, device=device)
    return lambda: sharding.collect(wire, results, splits_DH).wait()
