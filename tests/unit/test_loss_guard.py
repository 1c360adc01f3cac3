"""training/loss_guard.py and training/fault_search.py: the parts that need no other ranks."""

from types import SimpleNamespace

import pytest
import torch

from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.training.fault_search import (
    Finding,
    SearchedChunk,
    bad_losses,
    describe,
    first_bad_output,
    is_finite,
    kind,
)
from megatron_balance.training.loss_guard import LossGuard, PoisonedRun, SpikyLoss
from megatron_balance.training.progress import Progress, StepReport
from tests.distributed.runs import BASE

NAN = float("nan")
INF = float("inf")


def steady(spikes: SpikyLoss, count: int = SpikyLoss.WINDOW) -> SpikyLoss:
    """Add `count` alternating losses of 2.4 and 2.6: mean 2.5, deviation 0.1."""
    for index in range(count):
        assert spikes.describe(2.4 + 0.2 * (index % 2)) is None
    return spikes


def test_loss_is_spiky_far_above_the_ones_before() -> None:
    for loss, spiky in ((3.4, False), (3.6, True), (1.0, False), (NAN, False), (INF, False)):
        assert (steady(SpikyLoss()).describe(loss) is not None) == spiky
    text = steady(SpikyLoss()).describe(9.0)
    assert text == "9.000000E+00, after 2.500000E+00 +- 1.0E-01 in the 100 iterations before"
    assert steady(SpikyLoss(), SpikyLoss.WINDOW - 1).describe(9.0) is None, "the window is not full"


def test_what_counts_into_the_statistics() -> None:
    spikes = steady(SpikyLoss())
    assert [spikes.describe(5.0) is not None for _ in range(5)] == [True, False, False, False, False]
    constant = SpikyLoss()
    for _ in range(SpikyLoss.WINDOW):
        constant.describe(2.0)
    assert constant.describe(2.01) is None and constant.describe(2.1) is not None
    spikes = steady(SpikyLoss())
    assert spikes.describe(NAN) is None and spikes.describe(3.6) is not None


def report(loss: float = 2.5, **changes: object) -> StepReport:
    values = {"losses": {"lm loss": loss}, "grad_norm": 1.0, "learning_rate": 1e-4, "loss_scale": 1.0}
    values |= {"iteration": 7, "global_batch_size": 4, "consumed_samples": 28, "skipped": False, "seconds": 0.1}
    return StepReport(**(values | changes))


def guard(flags: str = "") -> LossGuard:
    machine = Machine(world_size=1, cuda=False, transformer_engine=False, apex=False)
    return LossGuard(parse_args(f"{BASE} {flags}".split(), machine).config, [], None)


def test_review_tells_of_a_spike_if_asked_to() -> None:
    for flags, expected in (("--check-for-spiky-loss", 1), ("", 0)):
        said: list[str] = []
        own = guard(flags)
        for _ in range(SpikyLoss.WINDOW):
            own.review(report(2.0), Progress(), said.append)
        own.review(report(9.0), Progress(), said.append)
        assert len(said) == expected
        assert all(text.startswith("iteration 7: spiky loss: 9.000000E+00") for text in said)


def test_review_ends_the_run_at_the_limit() -> None:
    said: list[str] = []
    own = guard("--max-consecutive-bad-iterations 2")
    own.review(report(fault="  rank 1: router"), Progress(bad_in_a_row=1), said.append)
    assert said == [
        "iteration 7 has a NaN or infinite loss or gradient; its step is skipped (1 in a row):\n  rank 1: router"
    ]
    with pytest.raises(PoisonedRun, match=r"--max-consecutive-bad-iterations 2 is reached: .*\n  rank 1: router"):
        own.review(report(fault="  rank 1: router"), Progress(bad_in_a_row=2), said.append)


def test_a_switched_off_guard_hands_the_data_on() -> None:
    data = [iter(())]
    assert guard("--no-check-for-nan-in-loss-and-grad").begin(data) is data


def test_a_search_gets_the_same_microbatches_again() -> None:
    own = guard()
    source = iter([{"tokens": torch.ones(1)}, {"tokens": torch.zeros(1)}, {}])
    (data,) = own.begin([source])
    first = [next(data), next(data)]
    (again,) = own._repeat(lambda data: [[next(data[0]), next(data[0])]])
    assert [one is other for one, other in zip(again, first, strict=True)] == [True, True]
    (data,) = own.begin([source])
    assert next(data) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_is_finite(dtype: torch.dtype) -> None:
    largest = torch.full((4, 4), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(largest)
    for bad in (NAN, INF, -INF):
        values = largest.clone()
        values[2, 3] = bad
        assert not is_finite(({"a": [largest, values]}, None, 3))
        assert kind(values) == ("NaN" if bad != bad else "Inf")


def test_what_has_no_numbers_is_finite() -> None:
    freed = torch.full((3,), NAN)
    freed.untyped_storage().resize_(0)
    assert is_finite([torch.ones(2, dtype=torch.int64), torch.empty(0), torch.ones(2, 3)[:0], None, freed])


def test_only_the_earliest_findings_are_described() -> None:
    early = Finding((0, 1, 5), "early")
    late = Finding((0, 2, 0), "late")
    assert describe([[late], [early], [], [early]]) == "  ranks 1, 3: early"


def test_description_is_short() -> None:
    lines = describe([[Finding((), f"weight {index}") for index in range(30)]]).splitlines()
    assert len(lines) == 9 and lines[-1] == "  and 22 more"


def test_losses_that_are_bad_once_and_twice() -> None:
    good = {"lm loss": torch.tensor([1.0, 2.0])}
    bad = {"lm loss": torch.tensor([INF, 2.0])}
    found = bad_losses([good, bad, bad], [good, good, bad])
    assert [finding.text.split(";")[0] for finding in found] == [
        "the loss of microbatch 1 is Inf",
        "the loss of microbatch 2 is Inf",
    ]
    assert "finite when repeated" in found[0].text and "loss mask" in found[1].text


class Scale(torch.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, None]:
        return values * self.factor, None


class Stack(torch.nn.Module):
    """Layers numbered from 4 on, as on a later pipeline stage."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(Scale(factor) for factor in factors)
        self.decoder.layers[0].layer_number = 4

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.decoder.layers:
            values, _ = layer(values)
        return values


def test_first_bad_output_is_found_in_its_microbatch() -> None:
    chunk = SearchedChunk((0, 1), Stack(2.0, 1e30, 1e30))
    with first_bad_output([chunk]) as found:
        for value in (1e-30, 1e-25, 1.0, 1.0):
            chunk.model(torch.full((2,), value))
    (finding,) = found
    assert finding == Finding((2, 0, 1, 3), "decoder.layers.5 turns finite inputs into Inf (microbatch 2)")
    chunk.model(torch.full((2,), NAN))
    assert found == [finding]
    chunk = SearchedChunk((0, 0), Stack(2.0, 3.0))
    with first_bad_output([chunk]) as found:
        chunk.model(torch.ones(2))
    assert found == []


class Experts(GroupedExperts):
    """Two experts, the second one with a bad weight, which leave rows behind theirs as they are."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def forward(
        self, rows_RH: torch.Tensor, tokens_per_slot: torch.Tensor, probs_R: torch.Tensor, gradients: None = None
    ) -> torch.Tensor:
        output_RH = torch.full_like(rows_RH, NAN)
        first = int(tokens_per_slot[0])
        used = int(tokens_per_slot.sum())
        output_RH[:first] = rows_RH[:first]
        output_RH[first:used] = rows_RH[first:used] * INF
        return output_RH


@pytest.mark.parametrize(("sizes", "expected"), [((3, 0), []), ((3, 2), ["decoder.layers.3.experts, expert 1"])])
def test_rows_of_no_expert_accuse_nobody(sizes: tuple[int, int], expected: list[str]) -> None:
    """`--moe-flex-rows bound` has more rows than tokens."""
    stack = Stack(1.0)
    (layer,) = stack.decoder.layers
    layer.experts = experts = Experts()
    layer.local_expert_indices = [0, 1]
    experts.home_experts = (0, 1)
    rows_RH = torch.ones(8, 2)
    rows_RH[sum(sizes) :] = NAN
    with first_bad_output([SearchedChunk((0, 0), stack)]) as found:
        experts(rows_RH, torch.tensor(sizes), torch.ones(8))
    assert [finding.text.split(" turns")[0] for finding in found] == expected


def test_layers_are_numbered_over_the_whole_model() -> None:
    chunk = SearchedChunk((0, 1), Stack(1.0, 1.0))
    assert chunk.global_name("decoder.layers.1.mlp.router") == "decoder.layers.4.mlp.router"
    assert chunk.global_name("decoder.final_layernorm.weight") == "decoder.final_layernorm.weight"
    empty = SimpleNamespace(decoder=SimpleNamespace(layers=torch.nn.ModuleList()))
    assert SearchedChunk((0, 0), empty).global_name("embedding.word_embeddings") == "embedding.word_embeddings"
