"""The simulator: shared resources, events and programs, against slow references and limits that no schedule beats."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cost.exchange import ExchangeModel, stages
from megatron_balance.cost.network import Network
from megatron_balance.cost.sending import SendingModel
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.trans_plan import EMPTY_PLAN
from megatron_balance.profile.cluster_profile import Fit, from_links
from megatron_balance.profile.kernel_times import UNHINDERED, Beside
from megatron_balance.simulate.engine import (
    NOTHING,
    Command,
    Compute,
    DeadlockError,
    Engine,
    Receive,
    Send,
    Start,
    Wait,
    Work,
    speeds,
)
from megatron_balance.simulate.network import Fabric, TeamNetwork, one_after_another, ring
from megatron_balance.simulate.programs import _side_by_side
from megatron_balance.simulate.result import PARTS, Recorder, part_of
from megatron_balance.timeline.actions import Operation
from megatron_balance.timeline.lower import compute_order
from tests.unit.simulated import MOVES, SPEED, Log, layers_of, program, stage_of, team, work

uses = st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=3, max_size=3), min_size=1, max_size=6)


@given(uses)
@settings(deadline=None)
def test_speeds_are_max_min_fair(rows: list[list[float]]) -> None:
    use_FR = np.array(rows)
    speed_F = speeds(use_FR)
    used_R = speed_F @ use_FR
    assert (used_R <= 1 + 1e-9).all()
    for speed, use_R in zip(speed_F, use_FR, strict=True):
        limits = (used_R >= 1 - 1e-9) & (use_R > 0)
        fastest = [speed_F[use_FR[:, resource] > 0].max() for resource in np.flatnonzero(limits)]
        # Whoever is not at full speed is the fastest one on a resource that is used up
        assert speed >= 1 - 1e-9 or any(speed >= other - 1e-9 for other in fastest)


def one_collective(key: object, before: float, what: Work) -> Iterator:
    yield Compute("before", np.array([before]))
    yield Start(key, str(key), what)
    yield Wait(key)


def fluid(collectives: list[tuple[float, Work]], num_resources: int) -> list[float]:
    """Return the end of each collective, with the speeds of all of them computed again at every event."""
    left = [1.0] * len(collectives)
    ends = [ready + what.latency if not len(what.resources) else np.inf for ready, what in collectives]
    begins = [ready + what.latency for ready, what in collectives]
    now = 0.0
    while any(end == np.inf for end in ends):
        active = [i for i in range(len(ends)) if ends[i] == np.inf and begins[i] <= now + 1e-12]
        use_FR = np.zeros((len(active), num_resources))
        for row, i in zip(use_FR, active, strict=True):
            row[collectives[i][1].resources] = collectives[i][1].seconds / collectives[i][1].seconds.max()
        speed_F = speeds(use_FR) if active else np.zeros(0)
        later = [begin for begin, end in zip(begins, ends, strict=True) if end == np.inf and begin > now + 1e-12]
        durations = [left[i] * collectives[i][1].seconds.max() / v for i, v in zip(active, speed_F, strict=True)]
        step = min([*durations, *(begin - now for begin in later)])
        now += step
        for i, v in zip(active, speed_F, strict=True):
            left[i] -= v * step / collectives[i][1].seconds.max()
            if left[i] < 1e-9:
                ends[i] = now
    return ends


numbers = st.integers(0, 20).map(lambda n: n / 4)
works = st.builds(
    work, numbers, st.dictionaries(st.integers(0, 3), st.integers(1, 20).map(lambda n: n / 4), max_size=4)
)


@given(st.lists(st.tuples(numbers, works), min_size=1, max_size=7))
@settings(deadline=None)
def test_collectives_share_resources_like_a_fluid(collectives: list[tuple[float, Work]]) -> None:
    log = Log()
    teams = [(1, one_collective(key, *one)) for key, one in enumerate(collectives)]
    engine = Engine(teams, 4, log)
    total = engine.run()
    expected = fluid(collectives, 4)
    found = {int(label): end for label, _, end in log.spans}
    assert [found[key] for key in range(len(collectives))] == pytest.approx(expected, abs=1e-6)
    assert total >= engine.busy_seconds.max() - 1e-9
    assert total >= max(ready + what.alone for ready, what in collectives) - 1e-9


def test_collectives_of_a_lane_follow_each_other_and_others_do_not() -> None:
    def commands(lanes: tuple[str, str]) -> Iterator:
        for key, lane in zip(("one", "other"), lanes, strict=True):
            yield Start((lanes, key), key, work(0.0, {0: 2.0} if key == "one" else {1: 3.0}), lane)
        for key in ("one", "other"):
            yield Wait((lanes, key))

    for lanes, expected in ((("same", "same"), 5.0), (("a", "b"), 3.0)):
        assert Engine([(2, commands(lanes))], 2, Log()).run() == pytest.approx(expected)


def test_a_collective_waits_for_its_slowest_rank_of_all_teams() -> None:
    def commands(seconds: list[float]) -> Iterator:
        yield Compute("before", np.array(seconds))
        yield Start("both", "both", work(1.0, {}), teams=2)
        yield Compute("after", np.array([0.5, 0.5]))
        yield Wait("both")

    log = Log()
    assert Engine([(2, commands([1.0, 4.0])), (2, commands([2.0, 3.0]))], 0, log).run() == pytest.approx(5.0)
    assert log.spans == [("both", 4.0, 5.0)]


def test_a_wait_for_what_never_comes_is_an_error() -> None:
    def lonely() -> Iterator:
        yield Start("both", "both", NOTHING, teams=2)
        yield Wait("both")

    with pytest.raises(DeadlockError, match="team 0 waits for Wait"):
        Engine([(1, lonely())], 0, Log()).run()
    with pytest.raises(DeadlockError, match="Receive"):
        Engine([(1, iter([Receive("message")]))], 0, Log()).run()


def simulated(stages: int, microbatches: int, balanced: bool, chunks: int = 1, moves: Work = NOTHING):
    found = [stage_of(number, stages, microbatches, balanced) for number in range(stages)]
    log = Log()
    teams = [(2, program(stage, layers_of(stage, microbatches, chunks, moves), 0, 2)) for stage in found]
    return Engine(teams, MOVES + 1, log).run(), log, found


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 3), (2, 4), (4, 4), (4, 2)])
def test_a_team_computes_in_the_order_of_its_schedule(stages: int, microbatches: int, balanced: bool) -> None:
    _, log, found = simulated(stages, microbatches, balanced)
    computing = {Operation.FEC, Operation.FNEC, Operation.BEC, Operation.BNEC}
    for number, stage in enumerate(found):
        expected = [step.computation.name for step in stage.schedule if step.computation.operation in computing]
        assert log.labels[number] == [*expected, "optimizer"]
        started = [action for step in stage.schedule for action in (*step.planning, *step.communication)]
        waited = [label for owner, label in log.waits if owner == number]
        assert all(waited.count(action.name) == 1 for action in started)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_one_stage_without_overlap_takes_the_sum_of_its_parts(microbatches: int) -> None:
    total, _, _ = simulated(1, microbatches, balanced=False)
    each = 3 * (1.0 + 2.0) + 2 * (3.0 + 6.0 + 4 * 1.0)
    assert total == pytest.approx(microbatches * each + 0.5 + 0.125)


def test_a_pipeline_has_its_bubble() -> None:
    stages = 4
    microbatches = 8
    total, _, _ = simulated(stages, microbatches, balanced=False)
    forward = 3 * 1.0 + 2 * (3.0 + 2.0)
    backward = 3 * 2.0 + 2 * (6.0 + 2.0)
    least = (microbatches + stages - 1) * (forward + backward)
    messages = 2 * (stages - 1) * 0.25
    # Messages are hidden in the steady state, but for some at its borders
    assert least + messages + 0.625 <= total + 1e-9 <= least + messages * 4 + 0.625


def test_moves_are_hidden_up_to_what_hides_them() -> None:
    without, _, _ = simulated(1, 1, balanced=True)
    hidden, _, _ = simulated(1, 1, balanced=True, moves=work(0.0, {MOVES: 0.9}))
    exposed, _, _ = simulated(1, 1, balanced=True, moves=work(0.0, {MOVES: 30.0}))
    assert hidden == pytest.approx(without)
    # Four parts of Trans and of Agg in a row: two layers, of which one has two parts each
    assert exposed > 3 * 30.0


@given(st.tuples(*[st.floats(0.01, 10.0)] * 2), st.builds(Beside, *[st.floats(0.0, 3.0)] * 2))
@settings(max_examples=30)
def test_an_exchange_and_computation_do_their_work_beside_each_other(
    works: tuple[float, float], beside: Beside
) -> None:
    ends = [alone + added for alone, added in zip(works, beside.added(*works), strict=True)]
    together = min(ends)
    for alone, end, fraction in zip(works, ends, beside, strict=True):
        # Slowly until the first one ends, then at full speed
        assert together / (1 + fraction) + end - together == pytest.approx(alone)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.lists(st.booleans(), min_size=1, max_size=8))
def test_paired_passes_take_turns_at_every_exchange(first: list[bool], second: list[bool]) -> None:
    def commands(name: str, exchanges: list[bool]) -> list[Command]:
        found: list[Command] = []
        for index, exchange in enumerate(exchanges):
            key = f"{name}{index}"
            found += [Start(key, key, NOTHING), Wait(key)] if exchange else [Compute(key, np.ones(1))]
        return found

    passes = commands("a", first), commands("b", second)
    found = [*_side_by_side(*passes, UNHINDERED)]
    for own in passes:
        assert [one for one in found if any(one is other for other in own)] == own
    # A pass goes on after starting an exchange only if the other one has ended
    for index, (one, after) in enumerate(itertools.pairwise(found)):
        own, other = passes if any(one is each for each in passes[0]) else passes[::-1]
        if isinstance(one, Start) and any(after is each for each in own):
            assert not any(each is left for each in other for left in found[index + 1 :])


def test_pairs_hide_exchanges_and_launches_are_waited_for() -> None:
    def total(**changes: object) -> float:
        stage = dataclasses.replace(stage_of(0, 1, 3, balanced=False), **changes)
        return Engine([(2, program(stage, layers_of(stage, 3), 0, 2))], MOVES + 1, Log()).run()

    alone = total()
    passes = stage_of(0, 1, 3, balanced=False).passes
    order = [passes[0], passes[2], passes[1], passes[4], passes[3], passes[5]]
    blocks = [[1, 2]]
    ahead = {"passes": order, "schedule": compute_order(order, blocks)}
    paired = [order[0], *(one._replace(paired=True) for one in order[1:-1]), order[-1]]
    together = {"passes": paired, "schedule": compute_order(paired, blocks)}
    assert total(**ahead, beside=Beside(1.0, 0.5)) == pytest.approx(alone)
    # Two of three microbatches' exchanges are hidden, but for the first and the last one of each pair
    hidden = total(**together)
    assert alone - 2 * 2 * 2 * 2 * 2 * 1.0 <= hidden < alone - 8.0
    # Computation loses a third of each of 16 hidden seconds
    slower = total(**together, beside=Beside(0.0, 0.5))
    assert slower == pytest.approx(hidden + 16 / 3)
    # A second of computation hides two of four backward exchanges, which take half a second longer
    assert total(**together, beside=Beside(1.0, 0.0)) == pytest.approx(hidden + 2 * 2 * 0.5)
    # The host launches a paired forward pass in 4 seconds, or while exchanges slow it down
    assert total(**together, launching=(4.25, 8.0)) == pytest.approx(hidden + 2 * 2 * 0.25)
    assert total(**together, launching=(4.25, 8.0), beside=Beside(0.0, 0.5)) == pytest.approx(slower)
    # A layer's forward pass takes 1 + 3 + 2 seconds, and its backward pass 2 + 6 + 2
    assert total(launching=(6.0, 10.0)) == pytest.approx(alone)
    assert total(launching=(7.0, 12.0)) == pytest.approx(alone + 3 * 2 * (1.0 + 2.0))


def test_a_burst_passes_at_once() -> None:
    profile = from_links(
        4, 2, Fit(0, 1e-9, 0, 0), Fit(0, 1e-6, 0, 0), shared=Fit(0, 1e-6, 0, 0), forward=SPEED, backward=SPEED
    )
    model = ExchangeModel.of(profile)
    bytes_DD = np.full((4, 4), 1000.0)
    fabrics = [Fabric(4, 2, burst) for burst in (0.0, 1500.0, 1e9)]
    plain, burst, fast = (
        TeamNetwork(one, np.arange(4), Network.of(profile)).exchange(model, bytes_DD) for one in fabrics
    )
    # Each node sends 4000 bytes with two adapters, so 1500 bytes take 750 microseconds
    assert plain.alone - burst.alone == pytest.approx(750e-6)
    assert fast.seconds.max() == pytest.approx(1e-6)


def test_chunks_hide_exchanges() -> None:
    whole, _, _ = simulated(1, 1, balanced=False)
    chunks, _, _ = simulated(1, 1, balanced=False, chunks=4)
    assert chunks < whole - 4 * 0.5


def test_sums_of_parts_are_the_whole_time_of_every_rank() -> None:
    stages = [stage_of(number, 2, 4, True) for number in range(2)]
    ranks = [np.array([0, 1]), np.array([2, 3])]
    recorder = Recorder(ranks, [0, 3])
    moves = work(0.1, {MOVES: 2.0})
    teams = [(2, program(stage, layers_of(stage, 4, 1, moves), 0, 2)) for stage in stages]
    Engine(teams, MOVES + 1, recorder).run()
    total_D = np.sum([recorder.seconds[part] for part in PARTS], axis=0)
    for rank in (0, 3):
        spans = [span for span in recorder.spans if span.rank == rank and span.lane in ("computation", "waits")]
        spans.sort(key=lambda span: span.start)
        assert total_D[rank] == pytest.approx(spans[-1].end)
        assert all(one.end <= other.start + 1e-9 for one, other in itertools.pairwise(spans))


def test_every_label_belongs_to_a_part() -> None:
    labels = ("L3 FEC m0", "L3 A2A.1/4 m0", "L2 TRANS.1/2", "reduction")
    assert [part_of(label) for label in labels] == ["experts", "exchange", "Trans", "reduction"]
    with pytest.raises(ValueError, match="belongs to no part"):
        part_of("something")


def test_works_one_after_another_add_up() -> None:
    both = one_after_another([work(1.0, {0: 2.0, 1: 1.0}), work(0.5, {1: 3.0}), NOTHING])
    assert both.alone == pytest.approx(1.0 + 2.0 + 0.5 + 3.0)
    assert dict(zip(both.resources.tolist(), both.seconds.tolist(), strict=True)) == {0: 2.0, 1: 4.0}
    assert one_after_another([NOTHING, NOTHING]) is NOTHING


def test_messages_arrive_later() -> None:
    teams = [
        (1, iter([Compute("one", np.array([2.0])), Send("m", "forward message", 0.5)])),
        (1, iter([Receive("m"), Compute("other", np.array([1.0]))])),
    ]
    assert Engine(teams, 0, Log()).run() == pytest.approx(3.5)


@pytest.mark.parametrize("name", ["default", "flat", "2dh", "1dh"])
@pytest.mark.parametrize(("num_ranks", "node_size"), [(4, 4), (8, 4), (8, 2)])
def test_an_exchange_alone_takes_what_the_cost_model_says(name: str, num_ranks: int, node_size: int) -> None:
    (found, profile), generator = team(num_ranks, node_size), np.random.default_rng(0)
    model = ExchangeModel.of(profile, name)
    for scale in (1.0, 1e4, 1e7):
        bytes_DD = generator.exponential(scale, (num_ranks, num_ranks))
        expected = model.latency + float(
            model.network.byte_seconds(model.network.crossing(np.stack(stages(name, bytes_DD, node_size)))).sum()
        )
        assert found.exchange(model, bytes_DD).alone == pytest.approx(expected)
    assert found.exchange(model, np.eye(num_ranks)) is NOTHING


@pytest.mark.parametrize("beta_near", [1 / 150e9, 0.0])
@pytest.mark.parametrize(("num_ranks", "node_size"), [(4, 4), (8, 4)])
def test_trans_and_agg_alone_take_what_the_cost_model_says(beta_near: float, num_ranks: int, node_size: int) -> None:
    found, profile = team(num_ranks, node_size, beta_near)
    model = SendingModel(profile, 1e7, 2e7, in_parts=False)
    placement = Placement.identity(num_ranks, num_ranks, 2).with_hosts([(0, 1), (0, num_ranks - 1), (2, 1)])
    plan = model.plan(placement)
    for backward, ends in enumerate(model.progress(plan)):
        assert found.sending(model, plan, backward=bool(backward)).alone == pytest.approx(float(ends[-1]))
    assert found.sending(model, EMPTY_PLAN, backward=False) is NOTHING


def test_rings_cross_each_node_once() -> None:
    found, _ = team(8, 4)
    # Two groups of four: two members on each of two nodes, and all adapters of a node carry two ranks at full rate
    work_ = ring(found.fabric, found.network, np.arange(8), np.arange(8) % 2, 1e9, 2)
    sent = 2 * 1e9 * 3 / 4
    seconds = dict(zip(work_.resources.tolist(), work_.seconds.tolist(), strict=True))
    assert seconds[0] == pytest.approx(sent / 150e9)
    assert seconds[8] == pytest.approx(sent / 25e9 / 2)
    assert seconds[16] == pytest.approx(2 * sent / 25e9 / 2)
    assert work_.alone == pytest.approx(sent / 25e9, rel=1e-2)
    assert ring(found.fabric, found.network, np.arange(8), np.arange(8), 1e9, 2) is NOTHING
