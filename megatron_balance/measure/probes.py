"""One rank's experts, codec and exchanges on synthetic tokens, for measure/measure.py to time."""

import torch

from megatron_balance.comm.alltoall import default_all_to_all
from megatron_balance.comm.codecs import Codec
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.parallel_schedule import ParallelDispatch
from megatron_balance.flow.rows import combine, gather_rows, row_order
from megatron_balance.measure.stopwatch import OPERATIONS, Call, Passes


def expert_passes(experts: GroupedExperts, tokens: int) -> Passes:
    """Return `slot_passes` over `tokens` rows that are shared evenly among the experts."""
    slots = len(experts.linear_fc1.weight)
    return slot_passes(experts, torch.tensor([(tokens + slot) // slots for slot in range(slots)]))


def slot_passes(experts: GroupedExperts, tokens_per_slot: torch.Tensor) -> Passes:
    """Return passes over `tokens_per_slot` [S] int64 rows per expert, in the experts' dtype and on their device."""
    weight_SOH = experts.linear_fc1.weight
    tokens = int(tokens_per_slot.sum())
    hidden = weight_SOH.shape[-1]
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
    dispatch: ParallelDispatch, line: str, num_bytes: int, *, hidden: int, dtype: torch.dtype, device: torch.device
) -> Call:
    """Return the operation whose time a line of ParallelLines predicts, on about `num_bytes` bytes.

    Args:
        dispatch: the dispatch of megatron for the line `gathered`, of s2 with a group for simultaneous exchanges for
            the lines of tensor-parallel ranks, of s1 or s2 for `all_to_all`.
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
    wire = default_all_to_all(dispatch.exchange_group)
    sharding = dispatch.sharding()
    each = -(-num_bytes // (row_bytes * (hosts if line == "gathered" else sources)))
    splits_DH = torch.full((sources, hosts), each)
    results = rows_of(each * sources)
    if line == "gathered":
        rows = rows_of(each * hosts)

        def there_and_back() -> None:
            sharding.spread(wire, rows, splits_DH).wait()
            sharding.collect(wire, results, splits_DH).wait()

        return there_and_back
    if line == "simultaneous":
        assert dispatch.simultaneous is not None
        sharding = dispatch.simultaneous
    return lambda: sharding.collect(wire, results, splits_DH).wait()


def _sorting(rows: torch.Tensor, hosts: int) -> Call:
    """Return a call that copies rows by host and sums them again, forward and backward."""
    routing = torch.arange(len(rows), device=rows.device)[:, None] % hosts == torch.arange(hosts, device=rows.device)

    def there_and_back() -> None:
        order = row_order(routing, len(rows))
        # The gradient of copies is a sum, and that of a sum is copies
        for _ in ("forward", "backward"):
            combine(gather_rows(rows, order), order)

    return there_and_back
