"""`--moe-token-dispatcher-type flex` with HybridEP's stand-in: what it computes equals what all-to-alls compute."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, topk_routing_with_score_function
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.flow import device_dispatcher, layer
from megatron_balance.flow.dispatcher import AtOnceDispatcher
from megatron_balance.placement.placement import Placement
from megatron_balance.training.loop import evaluate
from megatron_balance.training.run import Run
from tests.distributed import runs
from tests.distributed.runs import deviation
from tests.hostcuda.runs import SAME_KERNELS, Watched, watched, watching
from tests.variants import variants

FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
BOUND = f"{FLEX} --moe-flex-rows bound"
PLAIN = f"--disable-bias-linear --swiglu --moe-router-force-workload hot_experts --global-batch-size 16 {SAME_KERNELS}"
EP4 = f"{PLAIN} --expert-model-parallel-size 4"
BLOCKWISE = "--balance-policy top2 --balance-overlap blockwise"

PAIRED = "--overlap-moe-expert-parallel-comm"

ITERATIONS = 3


class Balanced(NamedTuple):
    """What one rank observes."""

    watched: Watched
    loads: list[dict[int, tuple[np.ndarray, Placement]]]
    """Of each iteration, by layer."""


def balanced(flags: str, dtype: torch.dtype, room: Callable[..., int] = device_dispatcher.most_rows) -> Balanced:
    """Watch a run, in a precision that HybridEP lacks, too, and with room for `room` rows."""
    import deep_ep  # pyright: ignore[reportMissingImports]

    loads = []

    def keep_loads(run: Run) -> None:
        if run.balancer is not None:
            finish = run.balancer.finish_iteration
            run.balancer.finish_iteration = lambda: (finish(), loads.append(run.balancer.loads()))

    with (
        mock.patch.object(deep_ep, "TOKENS", (dtype,)),
        mock.patch.object(device_dispatcher, "most_rows", room),
        mock.patch.object(device_dispatcher, "grouped_mm_is_fast", lambda matrix: True),
    ):
        return Balanced(watched(flags, ITERATIONS, keep_loads), loads)


CASES = {
    "plain": EP4,
    "blockwise": f"{EP4} {BLOCKWISE} --balance-token-split local_first",
    "proportional": f"{EP4} {BLOCKWISE} --balance-token-split proportional --moe-comm-node-size 2",
    "quota": f"{EP4} --balance-policy quota --balance-overlap blockwise",
    "exact": f"{EP4} --balance-policy top2 --balance-load exact",
    "recomputation": f"{EP4} {BLOCKWISE} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "paired passes": f"{EP4} {PAIRED} {BLOCKWISE}",
    "paired passes, recomputation": f"{EP4} {PAIRED} --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "paired passes, exact": f"{EP4} {PAIRED} --balance-policy top2 --balance-load exact --balance-overlap blockwise",
    "capacity": f"{EP4} {BLOCKWISE} --moe-expert-capacity-factor 1",
    "one choice": f"{EP4} --balance-policy top2 --moe-router-topk 1 --moe-router-pre-softmax",
    "tensor parallel": f"{PLAIN} --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    f"--expert-tensor-parallel-size 1 {BLOCKWISE} --recompute-granularity selective --recompute-modules moe",
    "ownership": f"{PLAIN} --expert-model-parallel-size 2 --balance-policy demi --balance-ownership transfer",
}

QUICK = ("proportional",)


@pytest.mark.parametrize("name", variants([*CASES], QUICK))
def test_losses_gradients_and_plans_are_those_of_all_to_alls(
    device_ranks, profiles: dict[int, Path], name: str
) -> None:
    ranks = device_ranks(4, "deep_ep")
    acts = "--balance-policy" in CASES[name]
    # Without a slow network, these two policies leave experts where they are
    profile = {"ownership": profiles[2], "quota": profiles[4]}.get(name, "builtin")
    flags = f"{CASES[name]} --balance-profile {profile}" if acts else CASES[name]
    expected = ranks.run(balanced, flags, torch.float32)
    for one, other in zip(ranks.run(balanced, f"{flags} {BOUND}", torch.float32), expected, strict=True):
        assert not one.watched.complaints, one.watched.complaints
        assert deviation(one.watched.curve, other.watched.curve) < 2e-6
        assert one.watched.acted == other.watched.acted and (one.watched.acted > 0) == acts
        assert len(one.loads) == (ITERATIONS if acts else 0)
        for found, wanted in zip(one.loads, other.loads, strict=True):
            assert found.keys() == wanted.keys()
            for number, (load, placement) in found.items():
                assert np.array_equal(load, wanted[number][0]) and placement == wanted[number][1]


def contract() -> list[str]:
    """Send tokens to slots and back by megatron-core's HybridEP; return which parts of docs/cuda.md's contract fail."""
    import deep_ep  # pyright: ignore[reportMissingImports]

    ranks = dist.get_world_size()
    rank = dist.get_rank()
    slots = 3
    tokens = 5
    hidden = 8
    generator = torch.Generator().manual_seed(4)
    tokens_BH = torch.randn(ranks * tokens, hidden, generator=generator)
    map_BP = torch.rand(ranks * tokens, ranks * slots, generator=generator) < 0.4
    probs_BP = torch.rand(ranks * tokens, ranks * slots, generator=generator) * map_BP
    own = slice(rank * tokens, (rank + 1) * tokens)
    mine = slice(rank * slots, (rank + 1) * slots)
    token_R, slot_R = (index.tolist() for index in map_BP[:, mine].T.nonzero().T.flip(0))
    arrived = len(token_R)
    room = ranks * tokens * slots
    sent_TH = tokens_BH[own].cuda().requires_grad_()
    fused_a2a.reset_hybrid_ep_buffer()
    with mock.patch.object(deep_ep, "TOKENS", (torch.float32,)):
        rows_RH, probs_R, _, counts_S, handle = fused_a2a.hybrid_ep_dispatch(
            x=sent_TH,
            routing_map=map_BP[own].cuda(),
            probs=probs_BP[own].cuda(),
            group=dist.group.WORLD,
            num_local_experts=slots,
            num_permuted_tokens=room,
        )
        # What no row has written must not reach anybody
        anything_RH = torch.where(torch.arange(room, device="cuda")[:, None] < arrived, rows_RH, torch.inf)
        output_TH = fused_a2a.hybrid_ep_combine(anything_RH, handle, room, None)
        output_TH.backward(torch.ones_like(output_TH))
    fused_a2a.reset_hybrid_ep_buffer()
    choices_T1 = map_BP[own].sum(1, keepdim=True)
    found = {
        "there is room for the rows that were asked for": len(rows_RH) == len(probs_R) == room > arrived,
        "rows are in the order of slots, then of sources": torch.equal(rows_RH[:arrived].cpu(), tokens_BH[token_R]),
        "each row has its probability": torch.equal(probs_R[:arrived].cpu(), probs_BP[:, mine][token_R, slot_R]),
        "counts are rows of each slot": counts_S.tolist() == map_BP[:, mine].sum(0).tolist(),
        "a token gets the sum of its rows": torch.allclose(output_TH.cpu(), choices_T1 * tokens_BH[own]),
        "and so does its gradient": torch.allclose(sent_TH.grad.cpu(), choices_T1.float().expand(-1, hidden)),
    }
    return [part for part, holds in found.items() if not holds]


def test_the_stand_in_keeps_the_contract(device_ranks) -> None:
    assert device_ranks(2, "deep_ep").run(contract) == [[], []]


def test_counted_rows_compute_the_same(device_ranks) -> None:
    ranks = device_ranks(2, "deep_ep")
    flags = f"{PLAIN} --expert-model-parallel-size 2"
    plain, *others = (
        ranks.run(balanced, f"{flags} {more}", torch.float32)[0].watched for more in ("", FLEX, f"{FLEX} {PAIRED}")
    )
    for one in others:
        assert not one.complaints and deviation(one.curve, plain.curve) < 2e-6


@pytest.mark.slow
def test_half_precision_differs_by_rounding(device_ranks) -> None:
    ranks = device_ranks(4, "deep_ep")
    flags = f"{CASES['blockwise']} --balance-profile builtin --bf16"
    one, other = (ranks.run(balanced, f"{flags} {more}", torch.bfloat16)[0] for more in (BOUND, ""))
    assert not one.watched.complaints and one.watched.acted == other.watched.acted > 0
    assert deviation(one.watched.curve, other.watched.curve) < 1e-2


def paired(in_order: bool) -> list[str]:
    """Train with paired passes, and return the checker's complaints."""
    order = AtOnceDispatcher.exchanging
    shared = order if in_order else lambda self, *sent: contextlib.nullcontext([])
    with mock.patch.object(AtOnceDispatcher, "exchanging", shared):
        return balanced(f"{PLAIN} --expert-model-parallel-size 2 {PAIRED} {BOUND}", torch.float32).watched.complaints


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [True, False])
def test_exchanges_of_two_passes_follow_one_another(device_ranks, in_order: bool) -> None:
    for found in device_ranks(2, "deep_ep").run(paired, in_order):
        assert in_order == (not found), found


def evaluated(kept: bool) -> list[str]:
    """Evaluate under a policy, where nobody reads the loads, and return the checker's complaints."""
    keep = layer.keep_until_read if kept else lambda *tensors: None
    fused_a2a.reset_hybrid_ep_buffer()
    with mock.patch.object(layer, "keep_until_read", keep), watching() as checker:
        run = runs.build(f"{EP4} {BLOCKWISE} --balance-profile builtin --bf16 --eval-iters 1 {BOUND}")
        evaluate(run, run.data.train)
        return checker.complaints()


@pytest.mark.parametrize("kept", [True, False])
def test_loads_that_nobody_reads_are_kept_until_they_have_arrived(device_ranks, kept: bool) -> None:
    for found in device_ranks(4, "deep_ep").run(evaluated, kept):
        assert kept == (not found) and all(text.startswith("freed in use") for text in found), found


def half_the_mean(config: TransformerConfig, sources: int, tokens: int, slots: int) -> int:
    return tokens * config.moe_router_topk // 2


def test_too_little_room_is_noticed(device_ranks) -> None:
    ranks = device_ranks(2, "deep_ep")
    flags = f"{PLAIN} --expert-model-parallel-size 2 {BOUND}"
    kept, lost = (ranks.run(balanced, flags, torch.float32, *room)[0].watched for room in ((), (half_the_mean,)))
    assert deviation(lost.curve, kept.curve) > 1e-4


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("factor", [None, 0.5, 1.25])
def test_there_is_room_for_the_most_uneven_routing(slots: int, factor: float | None) -> None:
    """All tokens of all sources choose the experts of one rank, as many of them as they can."""
    experts = 8
    tokens = 12
    sources = 3
    config = SimpleNamespace(moe_router_topk=2, num_moe_experts=experts, moe_expert_capacity_factor=factor)
    logits = torch.zeros(tokens, experts).index_fill_(1, torch.arange(slots), 1.0) + torch.rand(tokens, experts) / 8
    _, map_TE = topk_routing_with_score_function(logits, 2)
    if factor is not None:
        _, map_TE = apply_router_token_dropping(logits.softmax(1) * map_TE, map_TE, 2, capacity_factor=factor)
    most = device_dispatcher.most_rows(config, sources, tokens, slots)
    found = sources * int(map_TE[:, :slots].sum())
    # Capacities of all experts leave more room than two choices need
    assert most == found if slots < experts else most >= found
