"""The runtime with a placement for each microbatch, alone or on top of that of an iteration."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from megatron_balance.device.host_memory import Reading
from megatron_balance.observe.balance import evenness
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import ExpertPiece, TransPlan
from megatron_balance.planning.within import PassPlan
from megatron_balance.timeline.actions import Action, Operation
from tests.unit.balancers import COST, LAYERS, MICROBATCHES, OWNERS, RANKS, Hottest, build, grouped, hottest, loads
from tests.unit.exact_modes import EXACT, TWO_SCALES


@pytest.mark.parametrize("mode", EXACT)
def test_each_microbatch_has_its_own_placement(monkeypatch, mode: str) -> None:
    world = build(monkeypatch, **EXACT[mode])
    for iteration, world.microbatches in enumerate((5, 7, 4), 1):
        load = loads(iteration, world.microbatches)
        world.journal.clear()
        used = world.iterate(iteration, load)
        for layer in LAYERS:
            planned = [hottest(counts_DE) for counts_DE in load[layer]]
            assert used[layer] == [placement.trimmed for placement in planned]
            for (counts_BDE, current, microbatches), counts_DE in zip(
                world.entries("PLAN", layer), load[layer], strict=True
            ):
                assert np.array_equal(counts_BDE, counts_DE[None])
                assert (current, microbatches) == (OWNERS, 1)
            # The backward pass has the same order of microbatches
            assert [placement for _, placement in world.entries("AGG", layer)] == planned
            trans = [placement for _, placement in world.entries("TRANS", layer)]
            report = world.balancer.report()[layer]
            assert report.hosts_added == 2 * world.microbatches
            assert report.trans_bytes == 2 * len(trans) * COST.param_bytes
            assert report.agg_bytes == 2 * world.microbatches * COST.grad_bytes
            cost = dataclasses.replace(COST, microbatches=1)
            tokens = [
                np.concatenate([cost.traffic(*one).sum(1) for one in zip(load[layer], placements, strict=True)])
                for placements in ([OWNERS] * world.microbatches, planned)
            ]
            assert (report.ratio_before, report.ratio_after, report.rb) == evenness(*tokens)
            assert world.balancer.loads()[layer][1] == planned[-1]


@pytest.mark.parametrize("mode", TWO_SCALES)
def test_each_microbatch_adds_guests_to_the_placement_of_the_iteration(monkeypatch, mode: str) -> None:
    """Its gradients are home before those of the iteration's guests leave, because these may pass them on."""
    world = build(monkeypatch, **TWO_SCALES[mode])
    for number, state in world.balancer.layers.items():
        state.within = functools.partial(added, number, world.journal)
    for iteration in (1, 2, 3):
        load = loads(iteration)
        world.journal.clear()
        used = world.iterate(iteration, load)
        for layer in LAYERS:
            before = hottest(grouped(loads(iteration - 1), layer)) if iteration > 1 else OWNERS
            planned = [added(layer, [], counts_DE, before) for counts_DE in load[layer]]
            assert used[layer] == [one.placement.trimmed for one in planned]
            assert [counts for counts, _ in world.entries("within", layer)] == [one.tolist() for one in load[layer]]
            sent = [placement for _, placement in world.entries("AGG", layer)]
            assert sent[:MICROBATCHES] == [one.placement for one in planned]
            assert all(placement == before for placement in sent[MICROBATCHES:])
            assert (len(sent) > MICROBATCHES) == (iteration > 1)
            report = world.balancer.report()[layer]
            assert report.agg_bytes == (before.added_hosts + MICROBATCHES) * COST.grad_bytes


def test_reports_count_rows_as_the_hosts_of_each_microbatch_share_them(monkeypatch) -> None:
    world = build(monkeypatch, **TWO_SCALES["two scales"])
    cost = dataclasses.replace(COST, split="proportional")
    load = loads(1)
    rows = {}
    for layer, state in world.balancer.layers.items():
        state.within = functools.partial(added, layer, [])
        state.split = "proportional"
        planned = [added(layer, [], counts_DE, OWNERS).placement for counts_DE in load[layer]]
        rows[layer] = np.concatenate([cost.traffic(*one).sum(1) for one in zip(load[layer], planned, strict=True)])
        state.limit = int(np.median(rows[layer].max(1)))
    world.iterate(1, load)
    for layer, report in world.balancer.report().items():
        assert report.ratio_after == pytest.approx(evenness(rows[layer], rows[layer])[1], rel=1e-2)
        assert report.certified == (MICROBATCHES // 2 + MICROBATCHES % 2) / MICROBATCHES


def added(number: int, journal: list[tuple], counts_DE: np.ndarray, placement: Placement) -> PassPlan:
    """Return a plan with one more guest: the expert with most tokens that a rank does not compute."""
    journal.append(("within", number, counts_DE.tolist(), placement))
    order = np.argsort(-counts_DE.sum(0), kind="stable").tolist()
    expert, rank = next(
        (expert, rank) for expert in order for rank in range(RANKS) if rank not in placement.hosts[expert]
    )
    guests = tuple((*row, expert if place == rank else -1) for place, row in enumerate(placement.guests))
    hosts = [*placement.hosts]
    hosts[expert] = (*sorted((*hosts[expert], rank)),)
    changed = dataclasses.replace(placement, guests=guests, hosts=tuple(hosts))
    return PassPlan(changed, TransPlan.of([[ExpertPiece(expert, placement.hosts[expert][0], rank, 0)]]))


def test_a_failing_plan_for_an_exact_load_leaves_experts_to_owners(monkeypatch) -> None:
    class Failing(Hottest):
        def plan(self, counts_BDE: np.ndarray, *arguments) -> Placement:
            if counts_BDE[0, 0, 0] % 2:
                raise ArithmeticError("an odd load")
            return super().plan(counts_BDE, *arguments)

    world = build(monkeypatch, **EXACT["exact"], policy=Failing)
    load = loads(1)
    failed = 0
    for layer, placements in world.iterate(1, load).items():
        planned = [OWNERS if counts_DE[0, 0] % 2 else hottest(counts_DE) for counts_DE in load[layer]]
        failed += planned.count(OWNERS)
        assert placements == [placement.trimmed for placement in planned]
    assert 0 < failed < len(LAYERS) * MICROBATCHES


def test_recomputation_of_several_layers_at_a_time_brings_their_weights_again(monkeypatch) -> None:
    """Two layers are repeated before the second one computes backward; with one buffer, this takes more Trans."""
    world = build(monkeypatch, **EXACT["exact, one buffer"])
    balancer = world.balancer
    world.microbatches = 1
    load = loads(1, 1)
    balancer.begin_iteration(1)

    def enter(computation: Action) -> None:
        if (computation.operation, computation.part) == (Operation.A2A, 1):
            counts_DE = torch.from_numpy(load[computation.block][0])
            used = balancer.host(computation.block, Reading(counts_DE.clone), training=True)
            assert used == hottest(load[computation.block][0]).trimmed
        else:
            balancer.enter(*computation[:4])

    for step in balancer.schedule(1):
        computation = step.computation
        if computation.operation in (Operation.REDUCE, Operation.STEP):
            break
        with torch.set_grad_enabled(not computation.is_forward):
            enter(computation)
        if computation[:2] == (9, Operation.BNEC):
            world.journal.clear()
            for block in (5, 9):
                enter(Action(block, Operation.A2A, 1, 4))
                enter(Action(block, Operation.FEC))
                assert world.journal[-1][:3] == ("waited", "TRANS", block)
    trans = [layer for kind, layer, *_ in world.journal if kind == "TRANS"]
    assert trans == [5, 9, 5, 4, 3]


def test_evaluation_plans_for_its_own_load(monkeypatch) -> None:
    world = build(monkeypatch, **EXACT["exact"])
    world.iterate(1, loads(1))
    world.journal.clear()
    counts_DE = loads(2)[5][0]
    balancer = world.balancer
    balancer.aside = True
    for _ in range(2):
        assert (
            balancer.host(5, Reading(torch.from_numpy(counts_DE).clone), training=False) == hottest(counts_DE).trimmed
        )
        assert [entry[:2] for entry in world.journal] == [("PLAN", 5), ("TRANS", 5), ("waited", "TRANS")]
        world.journal.clear()
