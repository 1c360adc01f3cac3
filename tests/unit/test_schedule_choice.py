"""Parm's volumes (Eq. 1, 2, 7 and 11), Algorithm 1, and the choice of a schedule, computed by hand."""

from dataclasses import replace

import pytest

from megatron_balance.flow.parallel_schedule import Shape, TokenStep, volumes
from megatron_balance.flow.schedule_choice import ScheduleModel, choices, ranges
from megatron_balance.profile.cluster_profile import Fit, ParallelLines, builtin, from_links

SHAPE = Shape(tokens=64, hidden=8, rows=96, mp=2, esp=4)
BLM = 64 * 8
ETM = 96 * 8

ALL_GATHER = Fit(3.0, 0.5, 0, 0)
ALL_TO_ALL = Fit(5.0, 0.25, 0, 0)
SIMULTANEOUS = Fit(7.0, 0.375, 0, 0)
SORTING = Fit(11.0, 0.125, 0, 0)
GATHERED = Fit(13.0, 0.0625, 0, 0)
PROFILE = builtin(8, 4, hidden=8, ffn=16)
LINES = {"all_to_all": ALL_TO_ALL, "gathered": GATHERED}
SAME_TOKENS = {"all_gather": ALL_GATHER, "simultaneous": SIMULTANEOUS, "sorting": SORTING}
MEASURED = replace(PROFILE, parallel=ParallelLines(2, 4, **LINES, **SAME_TOKENS))


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
    model = ScheduleModel(MEASURED, 2, 4)
    y = 2 * ETM * 4 / 2
    all_to_all = 5 + 0.25 * y
    sorting = (11 + 0.125 * 2 * ETM) / 2
    assert model.seconds("s1", SHAPE, 2, True) == 2 * all_to_all + 3 + 0.5 * 2 * BLM + (11 + 0.125 * 2 * ETM / 2) / 2
    assert model.seconds("s2", SHAPE, 2, True) == all_to_all + 7 + 0.375 * y + sorting
    assert model.seconds("s2", SHAPE, 2, False) == 2 * all_to_all + 3 + 0.5 * 2 * ETM + sorting


def test_megatron_repeats_the_experts_where_ranks_have_the_same_tokens() -> None:
    slow = replace(MEASURED, forward=MEASURED.forward._replace(seconds_per_token=17.0))
    sorting = (11 + 0.125 * 2 * ETM) / 2
    exchange = 13 + 0.0625 * 2 * ETM
    # A rank computes its host's rows, 96 of each batch of tokens; four of eight ranks have a batch of their own
    repeated = 17 * 96 * 4 / 2
    assert ScheduleModel(slow, 2, 4).seconds("megatron", SHAPE, 2, True) == sorting + exchange + repeated


def test_with_sequence_parallelism_only_exchanges_differ() -> None:
    """Every rank has its own tokens: nothing is split, gathered or computed twice."""
    shape = SHAPE._replace(mp=1)
    lines = ParallelLines(1, 4, **LINES)
    model = ScheduleModel(replace(PROFILE, parallel=lines), 1, 4)
    assert model.seconds("s1", shape, 2, True) == 2 * (5 + 0.25 * 2 * ETM * 4)
    assert model.seconds("megatron", shape, 2, True) == 13 + 0.0625 * 2 * ETM


@pytest.mark.parametrize(
    ("mp", "esp", "ranks", "expected"),
    [
        (2, 2, 8, ("s1", "s2", "megatron")),
        (2, 1, 8, ("s1", "s2", "megatron")),
        # Tensor-parallel ranks have to divide the sources of rows
        (4, 2, 6, ("s1", "megatron")),
        # Sequence parallelism, or no tensor parallelism
        (1, 2, 8, ("s1", "megatron")),
        (1, 1, 8, ("s1",)),
    ],
)
def test_schedules_to_choose_from(mp: int, esp: int, ranks: int, expected: tuple[str, ...]) -> None:
    assert choices(SHAPE._replace(mp=mp, esp=esp), ranks) == expected


def test_what_is_measured_is_what_is_asked() -> None:
    y = 2 * ETM * 4 / 2
    assert ranges(SHAPE, 2) == {
        "all_gather": (2 * BLM, 2 * ETM),
        "all_to_all": (y, y),
        "gathered": (2 * ETM, 2 * ETM),
        "simultaneous": (y, y),
        "sorting": (ETM, 2 * ETM),
    }
    alone = {"all_to_all": (2 * ETM * 4, 2 * ETM * 4), "gathered": (2 * ETM, 2 * ETM)}
    assert ranges(SHAPE._replace(mp=1), 2) == alone


def test_lines_of_another_layout_are_not_taken() -> None:
    for schedule in ("s1", "s2", "megatron"):
        shape = SHAPE._replace(esp=2)
        other, plain = (
            ScheduleModel(profile, 2, 2).seconds(schedule, shape, 2, True) for profile in (MEASURED, PROFILE)
        )
        assert other == plain


NEAR = Fit(100.0, 1.0, 0, 0)
FAR = Fit(1000.0, 10.0, 0, 0)
FREE = PROFILE.forward._replace(seconds_per_token=0.0)


def links(node_size: int, shared: float = 10.0, far: Fit = FAR) -> ScheduleModel:
    """Return the model of 8 ranks with two shards of each expert, whose tensor-parallel ranks have the same tokens."""
    lines = {"shared": far._replace(beta=shared * far.beta / 10), "forward": FREE, "backward": FREE}
    return ScheduleModel(from_links(8, node_size, NEAR, far, **lines), 2, 2)


def test_exchanges_from_the_lines_of_links() -> None:
    """Two nodes of four ranks; a batch takes 0.9 of a message's latency, and each message a tenth."""
    shape = SHAPE._replace(esp=2)
    y = 2.0 * ETM * 2 / 2
    rows = 2.0 * ETM
    # Half of the bytes that a rank sends leave the node
    all_to_all = 900 + 4 * 100 + 10 * y / 2
    far_bytes = 10 * y / 2
    gather = 100 + rows
    model = links(4)
    assert model.seconds("s1", shape, 2, True) == pytest.approx(2 * all_to_all + 100 + 2 * BLM)
    assert model.seconds("s2", shape, 2, False) == pytest.approx(2 * all_to_all + gather)
    # The gather shares links with the 3/8 that stay in the node, while the rest crosses nodes
    together = max(3 / 8 * y + gather, far_bytes)
    assert model.seconds("s2", shape, 2, True) == pytest.approx(2 * all_to_all + together - far_bytes)
    # To one other host in the node and two in the other, from both copies of the tokens; then a gather of two parts
    there = 900 + 10 + 2 * 100 + 10 * rows / 2 + 100 + 2 * rows
    assert model.seconds("megatron", shape, 2, True) == pytest.approx(2 * there)


@pytest.mark.parametrize("node_size", [1, 8])
def test_simultaneous_exchanges_on_one_kind_of_link(node_size: int) -> None:
    shape = SHAPE._replace(esp=2)
    line = NEAR if node_size == 8 else FAR
    y = 2.0 * ETM
    rows = 2.0 * ETM
    all_to_all = 0.9 * line.alpha + 7 * 0.1 * line.alpha + line.beta * 7 / 8 * y
    assert links(node_size).seconds("s2", shape, 2, True) == pytest.approx(2 * all_to_all + line.seconds(rows))


def test_simultaneous_exchanges_last_as_long_as_the_slower_level() -> None:
    """If links between nodes take no time, the traffic inside nodes takes longer, because of the gather."""
    shape = SHAPE._replace(esp=2)
    y = 2.0 * ETM
    model = links(4, shared=1e-9, far=Fit(0.0, 1e-9, 0, 0))
    inside = 3 / 8 * y
    gather = 100 + 2 * ETM
    latency = 90 + 3 * 10
    assert model.seconds("s2", shape, 2, True) == pytest.approx(2 * (latency + inside) + gather, rel=1e-6)


@pytest.mark.parametrize("mp", [2, 8])
def test_few_rows_favor_s2_and_many_s1(mp: int) -> None:
    """This is Parm, section IV-B, with tensor-parallel ranks inside a node and across both nodes."""
    model = ScheduleModel(PROFILE, mp, 1)
    for rows, expected in ((1 << 10, "s2"), (1 << 24, "s1")):
        shape = Shape(tokens=1 << 20, hidden=4096, rows=rows, mp=mp, esp=1)
        seconds = {name: model.seconds(name, shape, 2, False) for name in ("s1", "s2")}
        assert min(seconds, key=seconds.__getitem__) == expected
        assert model.seconds("s2", shape, 2, True) <= seconds["s2"] * (1 + 1e-9)
