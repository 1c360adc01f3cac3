"""A model's hooks enter computations in schedule order and reduce gradients once Agg has collected them."""

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_balance.device.host_memory import Reading
from megatron_balance.timeline import hooks
from tests.unit.balancers import BLOCKS, EXPERTS, LAYERS, MICROBATCHES, RANKS, World, build, passes

HIDDEN = 3
TOKENS = 7


class Experts(torch.autograd.Function):
    """Reports its start and end, like experts between two exchanges."""

    @staticmethod
    def forward(context, tokens, weight, begin, with_graph):
        context.begin = begin
        context.save_for_backward(tokens, weight)
        # Recomputation runs with gradients, which autograd disables inside a Function
        with torch.set_grad_enabled(with_graph):
            begin("experts")
            begin("combine")
        return tokens * weight

    @staticmethod
    def backward(context, gradient):
        tokens, weight = context.saved_tensors
        context.begin("experts_backward")
        gradients = gradient * weight, (gradient * tokens).sum(0)
        context.begin("dispatch_backward")
        return *gradients, None, None


class Layer(torch.nn.Module):
    """Stand-in for an MoE layer, with the members that hooks need."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.experts = torch.nn.Linear(HIDDEN, 1, bias=False)
        self.recompute = recompute
        self.host = None
        self.begin = lambda work: None

    def forward(self, tokens):
        if self.recompute and self.training:
            return checkpoint(self._mixture, tokens, use_reentrant=True), None
        return self._mixture(tokens), None

    def _mixture(self, tokens):
        # The load differs in every pass
        counts_DE = torch.full((RANKS, EXPERTS), int(tokens.detach().abs().sum() * 1000))
        self.host(Reading(counts_DE.clone), self.training)
        return Experts.apply(tokens, self.experts.weight[0], self.begin, torch.is_grad_enabled())


class Chunk(torch.nn.Module):
    """A model chunk: a dense layer, then MoE layers, each followed by a dense layer."""

    def __init__(self, numbers: list[int], recompute: str, early: bool) -> None:
        super().__init__()
        self.before = torch.nn.Linear(HIDDEN, HIDDEN)
        self.layers = torch.nn.ModuleList(Layer(recompute == "layer") for _ in numbers)
        self.behind = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in numbers)
        self.recompute = recompute == "block"
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=early, overlap_param_gather=False)
        self.expert_parallel_bucket_groups = []

    def forward(self, tokens):
        tokens = self.before(tokens)
        for layer, dense in zip(self.layers, self.behind, strict=True):

            def block(tokens, layer=layer, dense=dense):
                return dense(tokens + layer(tokens.tanh())[0])

            recompute = self.recompute and self.training
            tokens = checkpoint(block, tokens, use_reentrant=True) if recompute else block(tokens)
        return tokens


class BucketGroup:
    """Stand-in for DDP's group of buckets."""

    def __init__(self, world: World, name: str, layers: list[Layer]) -> None:
        self.world = world
        self.name = name
        self.buckets = [SimpleNamespace(params=list(layer.experts.parameters())) for layer in layers]

    def start_grad_sync(self) -> None:
        self.world.journal.append(("reduced", self.name))


class Model:
    """Two chunks with hooks, computed as a pipeline stage does."""

    def __init__(self, world: World, recompute: str = "nothing", early: bool = False) -> None:
        self.world = world
        self.chunks = [Chunk(numbers, recompute, early) for numbers in BLOCKS]
        modules = (layer for chunk in self.chunks for layer in chunk.layers)
        self.layers = dict(zip(LAYERS, modules, strict=True))
        groups = {"upper": [9], "middle": [5, 4]}
        self.chunks[1].expert_parallel_bucket_groups = [
            BucketGroup(world, name, [self.layers[number] for number in numbers]) for name, numbers in groups.items()
        ]
        self.chunks[0].expert_parallel_bucket_groups = [BucketGroup(world, "lower", [self.layers[3]])]
        self.config = SimpleNamespace(finalize_model_grads_func=self._finalize)
        hooks.install(world.balancer, self.layers, self.chunks, self.config)
        self.computed: list[str] = []
        self.balancer = world.balancer
        self.balancer.timeline = SimpleNamespace(add=self._note)

    def _finalize(self, *arguments: int, **named: int) -> tuple:
        for chunk in self.chunks:
            for group in chunk.expert_parallel_bucket_groups:
                # As DDP does for groups that are not reduced yet
                group.start_grad_sync()
        self.world.journal.append(("finalized",))
        return arguments, named

    def _note(self, span) -> None:
        if span.stream == "computation":
            self.computed.append(span.name)

    def iterate(self, number: int, between: Callable[[], None] = lambda: None) -> None:
        """Run forward and backward passes in the stage's order; call `between` before and after each."""
        self.computed.clear()
        self.balancer.begin_iteration(number)
        outputs: dict[tuple[int, int], torch.Tensor] = {}
        gradients: dict[tuple[int, int], torch.Tensor] = {}
        inputs: dict[tuple[int, int], torch.Tensor] = {}
        for chunk, microbatch, forward, _ in passes(MICROBATCHES):
            between()
            if forward:
                generator = torch.Generator().manual_seed(100 * number + microbatch)
                tokens = torch.randn(TOKENS, HIDDEN, generator=generator)
                if chunk:
                    tokens = outputs[0, microbatch].detach().requires_grad_()
                inputs[chunk, microbatch] = tokens
                outputs[chunk, microbatch] = self.chunks[chunk](tokens)
            else:
                gradient = torch.ones(TOKENS, HIDDEN) if chunk else gradients[1, microbatch]
                outputs[chunk, microbatch].backward(gradient)
                gradients[chunk, microbatch] = inputs[chunk, microbatch].grad
        between()
        assert self.config.finalize_model_grads_func(1, two=2) == ((1,), {"two": 2})

    def aside(self) -> None:
        """Compute a forward pass of the fault search, an evaluation, and one that forgets to switch gradients off."""
        for training, gradients in ((True, False), (False, False), (False, True)):
            tokens = torch.ones(TOKENS, HIDDEN)
            for chunk in self.chunks:
                chunk.train(training)
                with torch.set_grad_enabled(gradients):
                    tokens = chunk(tokens)
                chunk.train()


@pytest.mark.parametrize("recompute", ["nothing", "layer", "block"])
@pytest.mark.parametrize("overlap", ["none", "blockwise"])
def test_computations_are_entered_in_the_schedules_order(monkeypatch, overlap: str, recompute: str) -> None:
    """The order is kept despite recomputation, and despite passes without a backward pass in and between iterations."""
    world = build(monkeypatch, overlap)
    model = Model(world, recompute)
    order = [step.computation.name for step in world.balancer.schedule(MICROBATCHES)]
    for iteration in (1, 2):
        model.iterate(iteration, model.aside)
        # The last computation ends with the iteration
        assert model.computed == order[:-1]
        last = {number: state.last for number, state in world.balancer.layers.items()}
        assert all(len(found.counts_BDE) == MICROBATCHES for found in last.values())
        model.aside()
        assert model.computed == order[:-1]
        assert {number: state.last for number, state in world.balancer.layers.items()} == last


def test_recomputation_counts_no_load_twice(monkeypatch) -> None:
    counted = []
    for recompute in ("nothing", "layer", "block"):
        torch.manual_seed(7)
        world = build(monkeypatch)
        model = Model(world, recompute)
        model.iterate(1)
        counted.append({layer: counts_DE for layer, (counts_DE, _) in world.balancer.loads().items()})
    for other in counted[1:]:
        assert all(np.array_equal(other[layer], counted[0][layer]) for layer in LAYERS)


@pytest.mark.parametrize("overlap", ["none", "blockwise"])
def test_gradients_are_reduced_between_agg_and_plan(monkeypatch, overlap: str) -> None:
    world = build(monkeypatch, overlap)
    model = Model(world)
    for iteration in (1, 2):
        world.journal.clear()
        model.iterate(iteration)
        finalized = world.journal.index(("finalized",))
        waits = {kind: [place for place, entry in enumerate(world.journal) if entry[:2] == ("waited", kind)]
                 for kind in ("AGG", "PLAN")}  # fmt: skip
        assert len(waits["PLAN"]) == len(LAYERS)
        assert all(place > finalized for place in waits["PLAN"])
        assert all(place < finalized for place in waits["AGG"])
        assert bool(waits["AGG"]) == (iteration > 1)


def test_expert_gradients_are_reduced_once_agg_is_through_with_all_their_layers(monkeypatch) -> None:
    world = build(monkeypatch)
    model = Model(world, early=True)
    told = world.balancer.aggregated
    world.balancer.aggregated = lambda number: (world.journal.append(("told", number)), told(number))
    for iteration in (1, 2):
        world.journal.clear()
        model.iterate(iteration)
        found = [entry for entry in world.journal if entry[0] in ("told", "reduced", "finalized")]
        assert found == [
            *[("told", 9), ("reduced", "upper"), ("told", 5), ("told", 4), ("reduced", "middle")],
            *[("told", 3), ("reduced", "lower"), ("finalized",)],
        ]


def test_what_is_not_reduced_early_is_left_to_ddp(monkeypatch) -> None:
    world = build(monkeypatch)
    Model(world).iterate(1)
    assert [entry for entry in world.journal if entry[0] == "reduced"] == [
        *[("reduced", "lower"), ("reduced", "upper"), ("reduced", "middle")]
    ]


def test_a_hook_that_is_missing_is_noticed(monkeypatch) -> None:
    world = build(monkeypatch)
    model = Model(world)
    model.layers[5].begin = lambda moment: None
    with pytest.raises(AssertionError, match=r"the model computes .* where its schedule has "):
        model.iterate(1)


def described(stage: int, microbatches: int, stages: int = 3, paired: bool = False, **config: int | None) -> str:
    """Return the order of passes; a `+` joins the passes of a pair."""
    transformer = SimpleNamespace(
        pipeline_model_parallel_size=stages, overlap_moe_expert_parallel_comm=paired, **config
    )
    found = hooks.stage_passes(transformer, stage, microbatches)
    texts = (f"{'BF'[one.forward]}{one.chunk}{one.microbatch}{'+ '[not (one.paired and one.forward)]}" for one in found)
    return "".join(texts).strip()


def test_the_order_of_pipeline_stages() -> None:
    """The order is that of megatron-core's schedules: later stages have fewer passes ahead."""
    plain = {"virtual_pipeline_model_parallel_size": None, "microbatch_group_size_per_vp_stage": None}
    assert [described(stage, 4, **plain) for stage in range(3)] == [
        "F00 F01 F02 B00 F03 B01 B02 B03",
        "F00 F01 B00 F02 B01 F03 B02 B03",
        "F00 B00 F01 B01 F02 B02 F03 B03",
    ]
    interleaved = {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 3}
    assert [described(stage, 6, **interleaved).index("B") // 4 for stage in range(3)] == [8, 6, 4]
    assert described(2, 6, **interleaved) == (
        "F00 F01 F02 F10 B10 F11 B11 F12 B12 F03 B00 F04 B01 F05 B02 F13 B13 F14 B14 F15 B15 B03 B04 B05"
    )


def test_the_order_of_paired_passes() -> None:
    plain = {"virtual_pipeline_model_parallel_size": None, "microbatch_group_size_per_vp_stage": None}
    assert described(0, 3, 1, paired=True, **plain) == "F00 F01+B00 F02+B01 B02"
    assert described(0, 1, 1, paired=True, **plain) == "F00 B00"
    one_chunk = {"virtual_pipeline_model_parallel_size": 1, "microbatch_group_size_per_vp_stage": 2}
    assert [described(stage, 4, 2, paired=True, **one_chunk) for stage in range(2)] == [
        "F00 F01 F02 F03+B00 B01 B02 B03",
        "F00 F01+B00 F02+B01 F03+B02 B03",
    ]
    interleaved = {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 2}
    assert [described(stage, 4, 2, paired=True, **interleaved) for stage in range(2)] == [
        "F00 F01 F10 F11 F02 F03+B10 F12+B11 F13+B00 B01 B12 B13 B02 B03",
        "F00 F01 F10 F11+B10 F02+B11 F03+B00 F12+B01 F13+B12 B13 B02 B03",
    ]
