"""The losses that a run adds to the mean loss per token: their gradients and logged means against definitions."""

import functools
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.utils import unwrap_model

from megatron_balance.flow.routers import routers_of
from megatron_balance.training import data
from megatron_balance.training.loop import train_step
from megatron_balance.training.run import Run
from tests.distributed import runs
from tests.harness import forget_auxiliary_losses

EXPERTS = 8
TOPK = 2
SAMPLES = 2
MICROBATCHES = 2

COMMON = f"--micro-batch-size {SAMPLES} --disable-bias-linear --swiglu --clip-grad 0 --seq-length 16"

KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss")
COEFFICIENTS = {"aux_loss": 1e5, "seq_aux_loss": 1.5e5, "global_aux_loss": 2e5, "z_loss": 5e3}
"""So large that the loss per token hardly matters, and such that each loss matters."""

TOLERANCE = 1e-4


def mask_some(sample: data.Batch, *_: object) -> None:
    """Mask a part of the tokens that differs by sequence; stands in for the check of a batch."""
    sample["loss_mask"] *= (sample["tokens"] * 5 + sample["position_ids"]) % 11 > sample["tokens"][:, :1] % 9


masked = functools.partial(mock.patch.object, data, "check_batch", mask_some)


class Routed(NamedTuple):
    """What one rank's router saw and learned in an iteration."""

    place: tuple[int, int, int]
    """Data-, context- and tensor-parallel rank."""
    inputs: list[torch.Tensor]
    """[S, b, H] of each microbatch; empty on a rank without a router."""
    weight: torch.Tensor | None
    gradient: torch.Tensor | None
    losses: dict[str, float]


def routed(flags: str) -> Routed:
    """Train an iteration of a model with one MoE layer."""
    with masked():
        run = runs.build(f"{COMMON} --num-layers 2 {flags}")
        inputs: list[torch.Tensor] = []

        def note(_: torch.nn.Module, arguments: tuple[torch.Tensor]) -> None:
            if torch.is_grad_enabled():
                inputs.append(arguments[0].detach().double())

        own = [*routers_of(run.model)]
        for router in own:
            router.register_forward_pre_hook(note)
        weights = [router.weight.detach().double() for router in own]
        losses = train_step(run).losses
    groups = run.groups
    gradients = [router.weight.main_grad.double() for router in own]
    place = groups.dp.rank(), groups.cp.rank(), groups.tp.rank()
    return Routed(place, inputs, *weights or [None], *gradients or [None], losses)


def microbatches_of(ranks: list[Routed], copies: bool) -> list[list[torch.Tensor]]:
    """Return the tokens [S, b, H] of whole sequences, by microbatch and data-parallel rank."""
    found: dict[int, list[list[torch.Tensor]]] = {}
    for one in sorted((one for one in ranks if one.inputs), key=lambda one: one.place):
        if not (copies and one.place[2]):
            found.setdefault(one.place[0], []).append(one.inputs)
    replicas = [[torch.cat(parts) for parts in zip(*own, strict=True)] for own in found.values()]
    return [[*microbatch] for microbatch in zip(*replicas, strict=True)]


def load_balancing(scores_TE: torch.Tensor, chosen_TE: torch.Tensor) -> torch.Tensor:
    """E sum(f_e P_e), with the experts' shares f_e of `chosen_TE` (Switch Transformer, Eq. 4)."""
    return EXPERTS * (chosen_TE.mean(0) / TOPK * scores_TE.mean(0)).sum()


def definitions(tokens: list[list[torch.Tensor]], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return each router loss of the iteration, without its coefficient."""
    found: dict[str, list[torch.Tensor]] = {}
    so_far = []
    for microbatch in tokens:
        logits = [F.linear(own, weight) for own in microbatch]
        scores = [own.softmax(-1) for own in logits]
        chosen = [torch.zeros_like(own).scatter(-1, own.topk(TOPK).indices, 1.0) for own in logits]
        so_far += chosen
        every = torch.cat(scores, 1).flatten(0, 1)
        flat = torch.cat(so_far, 1).flatten(0, 1)
        found.setdefault("global_aux_loss", []).append(load_balancing(every, flat))
        for own, picked in zip(scores, chosen, strict=True):
            found.setdefault("aux_loss", []).append(load_balancing(own.flatten(0, 1), picked.flatten(0, 1)))
            for sequence in range(SAMPLES):
                loss = load_balancing(own[:, sequence], picked[:, sequence])
                found.setdefault("seq_aux_loss", []).append(loss)
        found.setdefault("z_loss", []).extend(own.logsumexp(-1).square().mean() for own in logits)
    return {name: torch.stack(losses).mean() for name, losses in found.items()}


LOGGED = {
    **{"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"},
    **{"global_aux_loss": "global_load_balancing_loss", "z_loss": "z_loss"},
}


def check(ranks: Callable, world_size: int, flags: str, names: tuple[str, ...], copies: bool = False) -> None:
    """Check the gradient of the router's weight on all ranks, and the logged losses."""
    kinds = [name for name in names if name in KINDS]
    z_loss = f"--moe-z-loss-coeff {COEFFICIENTS['z_loss'] if 'z_loss' in names else 0}"
    balancing = f"--moe-router-load-balancing-type {' '.join(kinds or ['none'])}"
    strength = f"--moe-aux-loss-coeff {' '.join(str(COEFFICIENTS[kind]) for kind in kinds) or 0}"
    every: list[Routed] = ranks(world_size).run(routed, f"{flags} {z_loss} {balancing} {strength}")
    weight = next(one.weight for one in every if one.weight is not None).requires_grad_()
    losses = definitions(microbatches_of(every, copies), weight)
    (expected,) = torch.autograd.grad(sum(COEFFICIENTS[name] * losses[name] for name in names), weight)
    for one in every:
        if one.gradient is not None:
            assert (one.gradient - expected).abs().max() <= TOLERANCE * expected.abs().max()
        for name in names:
            assert one.losses[LOGGED[name]] == pytest.approx(losses[name].item(), rel=1e-5), name


def batch(replicas: int) -> str:
    return f"--global-batch-size {SAMPLES * MICROBATCHES * replicas}"


PER_TOKEN = "--calculate-per-token-loss"
TP2 = "--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 2"
LAST = "--moe-layer-freq [0]+[1]"
FIRST = "--moe-layer-freq [1]+[0]"
PP2 = "--pipeline-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
ROPE = "--position-embedding-type rope"


class Layout(NamedTuple):
    world_size: int
    flags: str
    copies: bool = False
    """Whether tensor-parallel ranks route the same tokens."""


SEQUENCE_PARALLEL = f"{TP2} --sequence-parallel"
LAYOUTS = {
    "DP2": Layout(2, f"{LAST} {batch(2)}"),
    "EP2": Layout(2, f"{LAST} {batch(2)} --expert-model-parallel-size 2"),
    "TP2-SP": Layout(2, f"{FIRST} {batch(1)} {SEQUENCE_PARALLEL}"),
    **{
        f"TP2-{schedule}": Layout(
            2, f"{LAST} {batch(1)} {TP2} --moe-parallel-schedule {schedule}", copies=schedule != "s1"
        )
        for schedule in ("megatron", "baseline", "s1", "s2")
    },
    "CP2": Layout(2, f"{LAST} {batch(1)} {CP2} {ROPE}"),
    "PP2-first": Layout(2, f"{FIRST} {batch(1)} {PP2}"),
    "PP2-last": Layout(2, f"{LAST} {batch(1)} {PP2}"),
    "CP2xDP2xEP4": Layout(4, f"{LAST} {batch(2)} {CP2} {ROPE} --expert-model-parallel-size 4"),
    "CP2xTP2-s2": Layout(4, f"{LAST} {batch(1)} {CP2} {ROPE} {TP2} --moe-parallel-schedule s2", copies=True),
    "CP2xPP2": Layout(4, f"{FIRST} {batch(1)} {CP2} {ROPE} {PP2}"),
    "TP2-SPxDP2": Layout(4, f"{LAST} {batch(2)} {SEQUENCE_PARALLEL}"),
}


@pytest.mark.parametrize(("name", "layer"), [("EP2", "balanced"), ("TP2-s1", "balanced"), ("PP2-first", "megatron")])
def test_router_losses_are_those_of_their_definitions(ranks, name: str, layer: str) -> None:
    world_size, flags, copies = LAYOUTS[name]
    check(ranks, world_size, f"{flags} {PER_TOKEN} --moe-layer-impl {layer}", tuple(COEFFICIENTS), copies)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["balanced", "megatron"])
@pytest.mark.parametrize("per_token", ["", PER_TOKEN], ids=["by microbatch", "by token"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_router_loss_is_that_of_its_definition(ranks, name: str, per_token: str, layer: str) -> None:
    world_size, flags, copies = LAYOUTS[name]
    if layer == "megatron" and (copies or "schedule" in flags):
        pytest.skip("megatron-core's layer needs sequence parallelism, and has no schedules")
    for term in COEFFICIENTS:
        check(ranks, world_size, f"{flags} {per_token} --moe-layer-impl {layer}", (term,), copies)


PREDICTIONS = (
    f"{COMMON} --num-layers 1 {ROPE} --mtp-num-layers 2 --mtp-loss-scaling-factor 1e5 "
    "--moe-router-load-balancing-type none --moe-z-loss-coeff 0 --global-batch-size 8"
)


def gradients(run: Run) -> dict[str, torch.Tensor]:
    return {name: weight.main_grad.clone() for name, weight in unwrap_model(run.model)[0].named_parameters()}


def trained(flags: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the gradients of an iteration, and its losses."""
    with masked():
        run = runs.build(f"{PREDICTIONS} {flags}")
        losses = train_step(run).losses
    return gradients(run), losses


def defined(flags: str, per_token: bool) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the same for the definition of the predictions' losses, by one backward pass over the global batch."""
    with masked():
        run = runs.build(f"{PREDICTIONS} {flags}")
        (model,) = run.model
        depths = 2
        sums: list[list[torch.Tensor]] = [[] for _ in range(depths)]
        numbers: list[list[torch.Tensor]] = [[] for _ in range(depths)]
        for _ in range(4):
            batch = next(run.data.train[0])
            model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])
            for depth in range(depths):
                mask = torch.zeros_like(batch["loss_mask"])
                mask[:, : -depth - 1] = batch["loss_mask"][:, depth + 1 :]
                sums[depth].append((unwrap_model(model).losses[depth] * mask).sum())
                numbers[depth].append(mask.sum())
    totals = [torch.stack(own) for own in sums]
    counts = [torch.stack(own) for own in numbers]
    means = [total.sum() / count.sum() for total, count in zip(totals, counts, strict=True)]
    by_batch = [(total / count).mean() for total, count in zip(totals, counts, strict=True)]
    (1e5 / depths * sum(means if per_token else by_batch)).backward()
    model.finish_grad_sync()
    return gradients(run), {f"mtp_{depth} loss": mean.item() for depth, mean in enumerate(means, 1)}


by_token = pytest.mark.parametrize("per_token", ["", PER_TOKEN], ids=["by microbatch", "by token"])


@by_token
@pytest.mark.parametrize(
    ("world_size", "layout", "layer"),
    [
        (2, CP2, "balanced"),
        *(
            pytest.param(*case, layer, marks=pytest.mark.slow)
            for case in ((1, ""), (2, ""), (4, CP2), (4, f"{CP2} --cp-comm-type all_gather"))
            for layer in ("balanced", "megatron")
        ),
    ],
)
def test_losses_of_predictions_are_those_of_their_definition(
    ranks, world_size: int, layout: str, layer: str, per_token: str
) -> None:
    flags = f"--moe-layer-impl {layer}"
    expected, means = ranks(1).run(defined, flags, bool(per_token))[0]
    found, losses = ranks(world_size).run(trained, f"{layout} {per_token} {flags}")[-1]
    assert {name: losses[name] for name in means} == pytest.approx(means, rel=1e-5)
    for name, gradient in found.items():
        assert (gradient - expected[name]).abs().max() <= TOLERANCE * expected[name].abs().max() + 1e-3, name


BIASED = (
    f"{COMMON} --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2 "
    "--moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 1e-2 1e-2 --global-batch-size 4"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 12 --position-embedding-type rope --normalization RMSNorm --mtp-num-layers 1 "
    "--moe-shared-expert-intermediate-size 64"
)
OF_ROUTERS = dict.fromkeys(
    ("expert_bias", "local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"), torch.float32
)
"""The precision of every buffer of a router, by its name."""

OF_YARN = dict.fromkeys(("cos_cached", "sin_cached"), torch.bfloat16)
"""Only a fused rotary embedding reads these, and asks for the model's precision."""


def buffers(flags: str) -> tuple[int, dict[str, torch.dtype]]:
    """Return the number of routers, and the precision of all buffers after weights in half precision are loaded."""
    run = runs.build(f"{BIASED} {flags}")
    for router in routers_of(run.model):
        router.load_state_dict({name: value.bfloat16() for name, value in router.state_dict().items()})
    train_step(run)
    named = [(name.rpartition(".")[2], one.dtype) for chunk in run.model for name, one in chunk.named_buffers()]
    forget_auxiliary_losses()
    assert len({*named}) == len(dict(named))
    return len([*routers_of(run.model)]), dict(named)


@pytest.mark.parametrize("layer", ["balanced", "megatron"])
@pytest.mark.parametrize(
    ("flags", "routers", "expected"),
    [
        (f"--bf16 {LATENT}", 3, OF_ROUTERS | OF_YARN),
        ("--fp16 --softmax-type learnable --moe-layer-freq [0]+[1]", 1, OF_ROUTERS),
    ],
    ids=["latent attention and predictions", "sinks and a dense layer"],
)
def test_buffers_keep_their_precision(ranks, flags: str, routers: int, expected: dict, layer: str) -> None:
    assert ranks(1).run(buffers, f"{flags} --moe-layer-impl {layer}") == [(routers, expected)]


def biases(flags: str, iterations: int) -> list[tuple[bool, list[list[float]]]]:
    """Return for each iteration whether it was skipped, and all routers' expert biases after it."""
    run = runs.build(f"{BIASED} {flags}")
    found = []
    for _ in range(iterations):
        skipped = train_step(run).skipped
        found.append((skipped, [router.expert_bias.tolist() for router in routers_of(run.model)]))
    return found


@pytest.mark.parametrize("guarded", ["", pytest.param("--no-check-for-nan-in-loss-and-grad", marks=pytest.mark.slow)])
def test_a_step_that_the_loss_scaler_skips_moves_no_bias(ranks, guarded: str) -> None:
    flags = f"--fp16 --initial-loss-scale 1e6 --hysteresis 1 {guarded}"
    (found,) = ranks(1).run(biases, flags, 6)
    skipped, after = zip(*found, strict=True)
    start = [[0.0] * EXPERTS] * 2
    moved = [one != before for before, one in zip((start, *after), after, strict=False)]
    assert moved == [not one for one in skipped]
    assert skipped[0] and any(moved)


def test_router_losses_do_not_overflow(ranks) -> None:
    """A microbatch's share of this scale is above the maximum of float16."""
    (((skipped, _),),) = ranks(1).run(biases, "--fp16 --initial-loss-scale 2e5", 1)
    assert not skipped
