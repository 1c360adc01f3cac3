"""tools/bench/emulated.py: sleeps proportional to tokens, the real layer's messages, zero gradients for experts."""

import time

import pytest
import torch
import torch.distributed as dist

import emulated
from megatron_balance.job.layout import build_groups
from tests.distributed.layers import HIDDEN, build_layer, moe_config
from tests.distributed.runs import train

Messages = list[tuple[torch.Size, str]]
"""Shape of the rows and the splits of each exchange."""


def passes(layer: torch.nn.Module) -> Messages:
    """Run one forward and one backward pass; return what they sent."""
    messages: Messages = []
    exchange = type(layer.dispatcher.exchange.dispatch).start

    def start(rows: torch.Tensor, *splits: object):
        messages.append((rows.shape, str(splits)))
        return exchange(layer.dispatcher.exchange.dispatch, rows, *splits)

    layer.dispatcher.exchange.dispatch.start = start
    generator = torch.Generator().manual_seed(dist.get_rank())
    hidden = torch.randn(20 + dist.get_rank(), 1, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    output, _ = layer(hidden)
    assert output.shape == hidden.shape and output.dtype == hidden.dtype
    output.square().sum().backward()
    assert hidden.grad.any() and layer.router.weight.grad.any()
    return messages


def compare_with_the_real_layer() -> int:
    """Compare emulated and real passes of one layer; return the number of rows that this rank's experts got."""
    config = moe_config()
    layer = build_layer(config, build_groups(config, seed=7))
    real = passes(layer)
    assert all(parameter.grad.any() for parameter in layer.experts.parameters())
    layer.zero_grad(set_to_none=True)
    slept: list[float] = []
    said: list[str] = []
    emulated.emulate([layer], emulated.EmulatedDevice(1e-3, backward_ratio=3, sleep=slept.append), said.append)
    assert passes(layer) == real
    # Routing weights and rows to the experts, then rows back; then the gradients in reverse
    assert len(real) == 6
    rows = real[2][0][0]
    assert slept == pytest.approx([rows * 1e-3, rows * 3e-3])
    assert "EMULATED" in said[0] and "1000 us per token" in said[0]
    for parameter in layer.experts.parameters():
        assert parameter.grad.shape == parameter.shape and not parameter.grad.any()

    emulated.emulate([layer], emulated.EmulatedDevice(1e-4), said.append)
    start = time.monotonic()
    passes(layer)
    assert time.monotonic() - start >= rows * 3e-4
    return rows


def test_sleeps_are_proportional_and_messages_are_the_real_layers(ranks) -> None:
    rows = ranks(2).run(compare_with_the_real_layer)
    assert sum(rows) == 3 * (20 + 21) and rows[0] != rows[1]


def train_emulated(flags: str) -> list[float]:
    """Return the sleeps of two iterations of a small run."""
    slept: list[float] = []
    device = emulated.EmulatedDevice(1e-6, attention_seconds=7.0, sleep=slept.append)
    reports = train(flags, 2, lambda run: emulated.emulate(run.model, device, lambda line: None))
    assert all(report.grad_norm > 0 for report in reports)
    return slept


TENSOR_PARALLEL = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"


@pytest.mark.parametrize(
    ("flags", "ranks_per_attention"),
    [
        ("--balance-policy fastermoe --overlap-grad-reduce", 1),
        (f"{TENSOR_PARALLEL} --moe-parallel-schedule s1", 2),
    ],
)
def test_a_run_trains_on_it(ranks, flags: str, ranks_per_attention: int) -> None:
    for slept in ranks(2).run(train_emulated, f"--expert-model-parallel-size 2 {flags}"):
        # Two layers, two iterations
        slept = [seconds * ranks_per_attention if seconds > 3 else seconds for seconds in slept]
        assert slept.count(7.0) == slept.count(14.0) == 4
        experts = [seconds for seconds in slept if seconds < 7]
        assert len(experts) == 8 and sum(experts) > 0


def refused() -> None:
    device = emulated.EmulatedDevice(1e-6)
    with pytest.raises(ValueError, match="--moe-layer-impl megatron"):
        train("--moe-layer-impl megatron", 1, lambda run: emulated.emulate(run.model, device))


def test_what_cannot_be_emulated_is_refused(ranks) -> None:
    ranks(2).run(refused)
