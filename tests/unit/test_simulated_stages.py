"""Simulated stages without experts, gathers, late parameters and Transfers, against sums of their parts."""

import dataclasses

import numpy as np
import pytest

from megatron_balance.profile.cluster_profile import Fit
from megatron_balance.simulate.engine import NOTHING, Engine
from megatron_balance.simulate.network import at_once
from megatron_balance.simulate.programs import StageSchedule
from megatron_balance.simulate.result import Recorder
from megatron_balance.timeline.actions import chunk_start
from megatron_balance.timeline.lower import compute_order, one_forward_one_backward
from tests.unit.simulated import MOVES, Log, layers_of, program, stage_of, team, work


def dense_stage(number: int, stages: int, microbatches: int, **more: object) -> StageSchedule:
    passes = one_forward_one_backward([(0, one) for one in range(microbatches)], 1, stages - number - 1)
    schedule = compute_order(passes, [[]])
    options = {"message": 0.25, "reduce": work(0.5, {}), "step": 0.125} | more
    return StageSchedule(
        number=number,
        stages=stages,
        teams=1,
        passes=passes,
        blocks=[[]],
        schedule=schedule,
        others={chunk_start(0): (3.0, 6.0)},
        **options,
    )


def test_a_stage_without_experts_computes_its_chunks() -> None:
    log = Log()
    stages = [dense_stage(0, 2, 3), stage_of(1, 2, 3, balanced=True)]
    teams = [(2, program(stage, layers_of(stage, 3) if stage.blocks[0] else {}, 0, 2)) for stage in stages]
    total = Engine(teams, MOVES + 1, log).run()
    assert log.labels[0] == ["dense layers"] * 6 + ["optimizer"]
    # The stage with experts computes after the first forward pass, and before the last backward pass
    own = 3 * (3 * (1.0 + 2.0) + 2 * (3.0 + 6.0 + 4 * 1.0)) + 0.625
    assert total >= own + 3.0 + 2 * 0.25


@pytest.mark.parametrize("seconds", [0.5, 20.0])
def test_early_reductions_and_late_gathers_overlap_without_experts(seconds: float) -> None:
    whole = work(0.0, {0: seconds})
    exposed = Engine([(1, program(dense_stage(0, 1, 4, gather=whole, reduce=whole), {}, 0, 1))], 1, Log()).run()
    overlapping = dense_stage(0, 1, 4, early={chunk_start(0): whole}, late={chunk_start(0): whole}, reduce=NOTHING)
    overlapped = Engine([(1, program(overlapping, {}, 0, 1))], 1, Log()).run()
    # One chunk: its first forward pass needs all parameters, and its last backward pass completes all gradients
    assert exposed == pytest.approx(4 * 9.0 + 2 * seconds + 0.125)
    assert overlapped == pytest.approx(exposed)


@pytest.mark.parametrize("seconds", [0.5, 2.0, 20.0])
def test_late_gathers_are_hidden_up_to_what_hides_them(seconds: float) -> None:
    stage = stage_of(0, 1, 2, balanced=False)
    log = Log()
    parts = {block: work(0.0, {1: seconds}) for block in stage.others}
    late = dataclasses.replace(stage, late=parts)
    plain = Engine([(2, program(stage, layers_of(stage, 2), 0, 2))], 2, Log()).run()
    total = Engine([(2, program(late, layers_of(late, 2), 0, 2))], 2, log).run()
    # Only the first block's is not hidden, if those of others arrive before their blocks begin
    first = seconds
    before_second = 1.0
    layer = 3.0 + 2.0 + 1.0
    second = max(0.0, seconds - before_second)
    third = max(0.0, 3 * seconds - (first + before_second + second) - layer)
    assert total == pytest.approx(plain + first + second + third)
    assert [label for label, _, _ in log.spans].count("L1 gather") == 1


def test_a_transfer_follows_the_step_on_all_teams() -> None:
    stage = stage_of(0, 1, 1, balanced=True, teams=2)
    log = Log()
    layers = layers_of(stage, 1)
    moving = {number: dataclasses.replace(layer, transfer=work(0.0, {MOVES: 3.0})) for number, layer in layers.items()}
    plain = Engine([(2, program(stage, layers, team, 2)) for team in range(2)], MOVES + 1, Log()).run()
    total = Engine([(2, program(stage, moving, team, 2)) for team in range(2)], MOVES + 1, log).run()
    assert total == pytest.approx(plain + 2 * 3.0)
    assert [label for label, _, _ in log.spans if "TRANSFER" in label] == ["L1 TRANSFER", "L2 TRANSFER"]


def test_experts_move_over_the_links_between_their_owners() -> None:
    found, _ = team(8, 4)
    bytes_DD = np.zeros((8, 8))
    bytes_DD[0, 4] = bytes_DD[1, 2] = 1e9
    moved = found.moving(found.network, bytes_DD, 0.1)
    seconds = dict(zip(moved.resources.tolist(), moved.seconds.tolist(), strict=True))
    assert {1, 2, 8, 12, 16, 17} == {*seconds}
    assert moved.alone == pytest.approx(0.1)
    twice = at_once([moved, moved])
    assert twice.seconds.max() == pytest.approx(2 * moved.seconds.max())
    assert twice.alone == pytest.approx(0.1)


def test_gathers_take_their_line_alone() -> None:
    found, _ = team(8, 4)
    line = Fit(1e-5, 1e-11, 0.0, 0.0)
    for members in (2, 4, 8):
        assert found.gather(line, members, 1e8).alone == pytest.approx(line.seconds(1e8))
    some = found.gather(line, 2, 1e8, share_D=np.repeat([1.0, 0.5, 0.25, 0.0], 2))
    assert some.seconds == pytest.approx(1e-3 * np.repeat([1.0, 0.5, 0.25], 2))
    assert found.gather(line, 1, 1e8) is NOTHING


def test_a_pass_with_gathers_takes_the_sum_of_its_parts() -> None:
    stage = stage_of(0, 1, 1, balanced=False)
    gathers = {"spread": 0.1, "collect": 0.2, "first": 0.3, "last": 0.4}
    layers = {
        number: dataclasses.replace(
            layer,
            forward_B=[
                one._replace(**{name: work(value, {}) for name, value in gathers.items()}) for one in layer.forward_B
            ],
        )
        for number, layer in layers_of(stage, 1).items()
    }
    plain = Engine([(2, program(stage, layers_of(stage, 1), 0, 2))], 2, Log()).run()
    recorder = Recorder([np.array([0, 1])])
    total = Engine([(2, program(stage, layers, 0, 2))], 2, recorder).run()
    assert total == pytest.approx(plain + 2 * sum(gathers.values()))
    assert recorder.seconds["gathers"] == pytest.approx(2 * sum(gathers.values()))
