"""Parm's volumes (Eq. 1, 2, 7 and 11) and Algorithm 1, computed by hand."""

from dataclasses import replace

import pytest

from megatron_balance.flow.parallel_schedule import Shape, TokenStep, volumes
from megatron_balance.flow.schedule_choice import ScheduleModel, ranges
from megatron_balance.profile.cluster_profile import Fit, ParallelLines, builtin

SHAPE = Shape(tokens=64, hidden=8, rows=96, mp=2, esp=4)
BLM, ETM = 64 * 8, 96 * 8

ALL_GATHER, ALL_TO_ALL, SIMULTANEOUS = Fit(3.0, 0.5, 0, 0), Fit(5.0, 0.25, 0, 0), Fit(7.0, 0.375, 0, 0)
SORTING = Fit(11.0, 0.125, 0, 0)
PROFILE = builtin(8, 4, hidden=8, ffn=16)
MEASURED = replace(PROFILE, parallel=ParallelLines(2, 4, ALL_GATHER, ALL_TO_ALL, SIMULTANEOUS, SORTING))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            "baseline",
            [
                (TokenStep.ESP_ALL_GATHER, BLM * 4),
                (TokenStep.EP_ALL_TO_ALL, ETM * 4),
                (TokenStep.ESP_ALL_REDUCE, ETM * 4),
                (TokenStep.EP_ALL_TO_ALL, ETM * 4),
            ],
        ),
        ("s1", [*[(TokenStep.EP_ESP_ALL_TO_ALL, ETM * 4 // 2)] * 2, (TokenStep.MP_ALL_GATHER, BLM)]),
        ("s2", [*[(TokenStep.EP_ESP_ALL_TO_ALL, ETM * 4 // 2)] * 2, (TokenStep.MP_ALL_GATHER, ETM)]),
    ],
)
def test_volumes(schedule: str, expected: list[tuple[TokenStep, int]]) -> None:
    assert volumes(schedule, SHAPE) == expected


@pytest.mark.parametrize("schedule", ["s1", "s2"])
def test_volumes_without_tensor_parallelism(schedule: str) -> None:
    assert volumes(schedule, SHAPE._replace(mp=1)) == [(TokenStep.EP_ESP_ALL_TO_ALL, ETM * 4)] * 2


def test_algorithm_1_by_hand() -> None:
    model, y = ScheduleModel(MEASURED, 2, 4), 2 * ETM * 4 / 2
    all_to_all, sorting = 5 + 0.25 * y, (11 + 0.125 * 2 * ETM) / 2
    assert model.seconds("s1", SHAPE, 2, True) == 2 * all_to_all + 3 + 0.5 * 2 * BLM + (11 + 0.125 * 2 * ETM / 2) / 2
    assert model.seconds("s2", SHAPE, 2, True) == all_to_all + 7 + 0.375 * y + sorting
    assert model.seconds("s2", SHAPE, 2, False) == 2 * all_to_all + 3 + 0.5 * 2 * ETM + sorting


def test_what_is_measured_is_what_is_asked() -> None:
    y = 2 * ETM * 4 / 2
    assert ranges(SHAPE, 2) == {
        "all_gather": (2 * BLM, 2 * ETM),
        "all_to_all": (y, y),
        "simultaneous": (y, y),
        "sorting": (ETM, 2 * ETM),
    }


def test_lines_of_another_layout_are_not_taken() -> None:
    for schedule in ("s1", "s2"):
        shape = SHAPE._replace(esp=2)
        other, plain = (
            ScheduleModel(profile, 2, 2).seconds(schedule, shape, 2, True) for profile in (MEASURED, PROFILE)
        )
        assert other == plain


@pytest.mark.parametrize("rows", [1 << 10, 1 << 26])
@pytest.mark.parametrize("node_size", [1, 4, 8])
def test_simultaneous_exchanges_from_the_lines_of_links(node_size: int, rows: int) -> None:
    """The gather shares the links of the tensor-parallel ranks and overlaps with traffic on the other links."""
    shape, size = SHAPE._replace(rows=rows), 2.0 * rows * SHAPE.hidden
    y = size * SHAPE.esp / SHAPE.mp
    near, far = (10e-6, 1 / 150e9), (25e-6, 1 / 25e9)

    def line(link: tuple[float, float], messages: float, num_bytes: float) -> float:
        return link[0] * messages + link[1] * num_bytes

    if node_size == 8:
        all_to_all = line(near, 7, 7 / 8 * y)
        together = all_to_all + line(near, 1, size)
    elif node_size == 1:
        all_to_all = line(far, 7, 7 / 8 * y)
        together = all_to_all + line(far, 1, size)
    else:
        # By the profile's all-to-all, a node's link carries 13/32 of its four ranks' bytes in sequence
        inside, all_to_all = line(near, 3, 3 / 8 * y), line(far, 4, 13 / 32 * 4 * 4 / 8 * y)
        together = max(inside + line(near, 1, size), all_to_all)
    model = ScheduleModel(builtin(8, node_size, hidden=8, ffn=16), SHAPE.mp, SHAPE.esp)
    assert model.seconds("s2", shape, 2, True) == pytest.approx(all_to_all + together, rel=1e-12)


def test_simultaneous_exchanges_last_as_long_as_the_slower_level() -> None:
    """If links between nodes take no time, the traffic inside nodes takes longer, because of the gather."""
    free = Fit(0.0, 0.0, 0, 0)
    links = {kind: lines | {"inter": free} for kind, lines in PROFILE.links.items()}
    model, y = ScheduleModel(replace(PROFILE, links=links), 2, 4), 2 * ETM * 4 / 2
    inside, gather = 3 * 10e-6 + 3 / 8 * y / 150e9, 10e-6 + 2 * ETM / 150e9
    assert model.seconds("s2", SHAPE, 2, True) == pytest.approx(inside + inside + gather, rel=1e-12)


@pytest.mark.parametrize("mp", [2, 8])
def test_few_rows_favor_s2_and_many_s1(mp: int) -> None:
    """This is Parm, section IV-B, with tensor-parallel ranks inside a node and across both nodes."""
    model = ScheduleModel(PROFILE, mp, 1)
    for rows, expected in ((1 << 10, "s2"), (1 << 24, "s1")):
        shape = Shape(tokens=1 << 20, hidden=4096, rows=rows, mp=mp, esp=1)
        seconds = {name: model.seconds(name, shape, 2, False) for name in ("s1", "s2")}
        assert min(seconds, key=seconds.__getitem__) == expected
        assert model.seconds("s2", shape, 2, True) <= seconds["s2"]
