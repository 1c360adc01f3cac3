"""workloads/forced_routing.py in megatron-core's routers: in isolation, and in small training runs of many layouts."""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.job.layout import build_groups, destroy_groups
from megatron_balance.training.loop import evaluate, train_step
from megatron_balance.training.run import Run
from megatron_balance.workloads.forced_routing import BatchPart, force_routing
from megatron_balance.workloads.synthetic import NAMES, workload_choices
from tests.distributed import runs

EXPERTS = 8
TOPK = 3
SEQUENCE = 4
SAMPLES = 2

Pass = tuple[int, str]
"""Layer number and kind of pass."""


def as_map(choices_TK: np.ndarray, experts: int) -> torch.Tensor:
    """Return the choices as a map, [T, E] bool."""
    chosen = torch.zeros(len(choices_TK), experts, dtype=torch.bool)
    return chosen.scatter(1, torch.from_numpy(choices_TK), True)


def build_router(**changes: object) -> tuple[TopKRouter, ProcessGroupCollection]:
    settings = {
        **{"num_layers": 1, "hidden_size": 12, "num_attention_heads": 1, "num_moe_experts": EXPERTS},
        **{"moe_router_topk": TOPK, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001},
    }
    config = TransformerConfig(**(settings | changes))
    groups = build_groups(config, seed=7)
    router = TopKRouter(config, groups)
    router.set_layer_number(1)
    return router, groups


def force_one_router(workload: str, changes: dict) -> None:
    """Check that two microbatches follow the workload token by token, with finite probabilities and gradients."""
    router, groups = build_router(**changes)
    part = BatchPart.of(groups, SEQUENCE, router.config.sequence_parallel)
    force_routing([router], workload, part, seed=5, step=lambda: 9, microbatches=lambda: 2)
    # Logits so far apart that exponentials underflow, as in a diverged router
    scale = torch.linspace(0.1, 400, SEQUENCE * SAMPLES).view(SEQUENCE, SAMPLES, 1)
    for microbatch in range(2):
        hidden = (torch.randn(SEQUENCE, SAMPLES, 12) * scale).to(router.weight.dtype).requires_grad_()
        probs_TE, map_TE = router(hidden)
        tokens = range(microbatch * 8, (microbatch + 1) * 8)
        choices_TK = workload_choices(
            workload, num_experts=EXPERTS, topk=TOPK, tokens=tokens, total_tokens=16, seed=6, step=9
        )
        # The router's order is [sequence, samples], the workload's [samples, sequence]
        expected_TK = choices_TK.reshape(SAMPLES, SEQUENCE, TOPK).swapaxes(0, 1).reshape(-1, TOPK)
        assert torch.equal(map_TE, as_map(expected_TK, EXPERTS))
        assert (map_TE.sum(1) == TOPK).all()
        assert probs_TE.isfinite().all() and (probs_TE[~map_TE] == 0).all()
        router.weight.grad = None
        (probs_TE.float() * torch.randn(probs_TE.shape)).sum().backward()
        for gradient in (router.weight.grad, hidden.grad):
            assert gradient.isfinite().all() and gradient.any()
    # This backward pass gave the scale a shape that does not fit a schedule's
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


SCORES = {
    "softmax": {},
    "pre-softmax": {"moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "groups": {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 0},
    "biased-before": {"moe_router_force_load_balancing": True},
}

DTYPES = {
    "float32": {},
    "bfloat16": {"params_dtype": torch.bfloat16, "bf16": True},
    "bfloat16-fp32": {"params_dtype": torch.bfloat16, "bf16": True, "moe_router_dtype": "fp32"},
    "float64": {"params_dtype": torch.float64, "moe_router_dtype": "fp64"},
}


def force_routers(workloads: Sequence[str], settings: Sequence[dict]) -> None:
    for workload, changes in itertools.product(workloads, settings):
        force_one_router(workload, changes)
        destroy_groups()


def test_one_router(ranks) -> None:
    settings = [scores | dtype for scores, dtype in itertools.product(SCORES.values(), DTYPES.values())]
    ranks(1).run(force_routers, ["hot_experts"], settings)
    ranks(1).run(force_routers, NAMES, [{}])


def force(run: Run) -> None:
    force_routing(
        run.model,
        "hot_experts",
        BatchPart.of(run.groups, run.config.model.seq_length, run.config.transformer.sequence_parallel),
        seed=5,
        step=lambda: run.progress.iteration,
        microbatches=run.batches.get,
    )


def counts_of_a_run(flags: str, start: int) -> dict[Pass, list[list[int]]]:
    """Return tokens per expert by layer and kind of pass, for two training steps from `start` and an evaluation."""
    run = runs.build(flags)
    run.progress.iteration = start
    force(run)
    phases: list[dict[Pass, torch.Tensor]] = []

    def count(router: TopKRouter, inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        kind = "evaluation" if not router.training else "gradients" if torch.is_grad_enabled() else "first"
        assert (output[1].sum(1) == 2).all()
        phases[-1][router.layer_number, kind] += output[1].sum(0)

    for module in itertools.chain.from_iterable(chunk.modules() for chunk in run.model):
        if isinstance(module, TopKRouter):
            module.register_forward_hook(count)
    for work in (lambda: train_step(run), lambda: train_step(run), lambda: evaluate(run, run.data.valid)):
        phases.append(defaultdict(lambda: torch.zeros(EXPERTS, dtype=torch.int64)))
        work()
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [dict(phase) for phase in phases])
    totals: dict[Pass, list[torch.Tensor]] = defaultdict(lambda: [torch.zeros(EXPERTS, dtype=torch.int64)] * 3)
    for own in everyone:
        for index, phase in enumerate(own):
            for key, counts in phase.items():
                totals[key] = [total + counts * (index == n) for n, total in enumerate(totals[key])]
    return {key: [total.tolist() for total in phases] for key, phases in totals.items()}


RECOMPUTED = "--recompute-granularity selective --recompute-modules moe"
LAYOUTS = {
    "DP2-one-sample": (2, "--micro-batch-size 1"),
    "EP2": (2, "--expert-model-parallel-size 2"),
    "TP2": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 --swiglu "
        "--disable-bias-linear",
    ),
    "recompute-full": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "recompute-moe-megatron-PP2": (
        2,
        f"{RECOMPUTED} --moe-layer-impl megatron --disable-bias-linear --pipeline-model-parallel-size 2",
    ),
    "interleaved": (2, "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_workload_in_every_layout(ranks, layout: str) -> None:
    world_size, flags = LAYOUTS[layout]
    common = f"--global-batch-size 8 --eval-iters 2 --eval-interval 5 {flags}"
    counts = ranks(world_size).run(counts_of_a_run, common, 3)[0]
    tokens = 8 * 32

    def expected(layer: int, step: int) -> np.ndarray:
        choices_TK = workload_choices(
            "hot_experts",
            num_experts=EXPERTS,
            topk=2,
            tokens=range(tokens),
            total_tokens=tokens,
            seed=5 + layer,
            step=step,
        )
        return np.bincount(choices_TK.ravel(), minlength=EXPERTS)

    layers = 4 if layout == "interleaved" else 2
    kinds = {"gradients", "evaluation"} | ({"first"} if "recompute" in layout else set())
    assert counts.keys() == set(itertools.product(range(1, layers + 1), kinds))
    for layer, kind in counts:
        steps = [0 * expected(layer, 3), 0 * expected(layer, 3), 2 * expected(layer, 5)]
        if kind != "evaluation":
            steps = [expected(layer, 3), expected(layer, 4), 0 * expected(layer, 5)]
        assert counts[layer, kind] == [step.tolist() for step in steps], (layer, kind)
    assert (expected(1, 3) != expected(2, 3)).any() and (expected(1, 3) != expected(1, 4)).any()


def routed_in_both_passes() -> None:
    """Check that recomputation routes each microbatch as its first pass did, even when a bad iteration is repeated."""
    run = runs.build(f"--global-batch-size 8 {RECOMPUTED}")
    force(run)
    maps: dict[Pass, list[torch.Tensor]] = defaultdict(list)

    def note(router: TopKRouter, inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        maps[router.layer_number, "gradients" if torch.is_grad_enabled() else "first"].append(output[1].clone())

    for module in run.model[0].modules():
        if isinstance(module, TopKRouter):
            module.register_forward_hook(note)
    # An injected fault makes the loss guard repeat the forward pass
    run.guard.evidence = lambda reports: torch.ones(1)
    train_step(run)
    for layer in (1, 2):
        first = maps[layer, "first"]
        again = maps[layer, "gradients"]
        assert (len(first), len(again)) == (8, 4)
        assert not torch.equal(again[0], again[1])
        for one, other in zip(first, again * 2, strict=True):
            assert torch.equal(one, other)


def test_recomputation_and_repetition_route_alike(ranks) -> None:
    ranks(1).run(routed_in_both_passes)


def refused() -> str:
    router, _ = build_router()
    router.router_replay = "taken"
    with pytest.raises(ValueError) as error:
        part = BatchPart(seq_length=4, data_rank=0, data_ranks=1)
        force_routing([router], "burst", part, seed=0, step=lambda: 0, microbatches=lambda: 1)
    return str(error.value)


def test_a_router_that_chooses_itself_is_refused(ranks) -> None:
    (message,) = ranks(1).run(refused)
    assert message.startswith("--moe-router-force-workload burst: ") and "--moe-enable-routing-replay" in message
