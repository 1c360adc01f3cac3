"""tools/bench/schedule_time.py: the compared variants, and the tables of measurements."""

import itertools

import pytest

import schedule_time
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine

VARIANTS = schedule_time.VARIANTS
SHAPES = schedule_time.SHAPES
TIMES = {"baseline": 4.0, "megatron": 3.0, "s1": 2.0, "s2": 1.0, "auto": 1.1}


def test_every_layer_and_model_is_a_run() -> None:
    machine = Machine(world_size=8, cuda=False, transformer_engine=False, apex=False)
    assert len(SHAPES) * 4 >= 24
    for (mp, esp), name in itertools.product(itertools.product((2, 4), repeat=2), VARIANTS):
        for model in (*[schedule_time.GPT2] * (esp == 4), *(shape.flags(mp, esp, 8) for shape in SHAPES)):
            layout = schedule_time.layout_flags(mp, esp, 8)
            line = f"{schedule_time.COMMON} {layout} {model} --moe-parallel-schedule {name}"
            shape = parse_args(line.split(), machine)[0].transformer
            assert (shape.tensor_model_parallel_size, shape.expert_tensor_parallel_size) == (mp, esp)


def test_nobody_always_follows_the_same_one() -> None:
    turns = [schedule_time.turn(number) for number in range(3)]
    assert all(set(turn) == set(VARIANTS) for turn in turns)
    before = {
        name: {one for turn in turns for one, after in itertools.pairwise(turn) if after == name} for name in TIMES
    }
    assert all(len(before[name]) > 1 for name in ("s1", "s2", "auto"))


def measured(slow: float = 1.0) -> object:
    return schedule_time.Measured({name: [slow * seconds] * 3 for name, seconds in TIMES.items()}, "s2", None)


def test_an_iteration_lasts_as_long_as_on_its_slowest_rank() -> None:
    assert schedule_time.job_of([measured(), measured(2.0)]).seconds["s1"] == [4.0] * 3


def test_rows_and_means() -> None:
    shape = SHAPES[0]
    one = measured()
    cells = ["4", "2", *(f"{number:g}" for number in shape), "4000", "1.33x", "2.00x", "4.00x", "3.64x (s2)"]
    assert schedule_time.row(4, 2, shape, one) == f"| {' | '.join([*cells, '1.100', '1.000'])} |"
    worse = one._replace(chosen="s1", seconds=one.seconds | {"auto": [2.2] * 3})
    assert schedule_time.over_better(worse) == pytest.approx((2.2, 2.1))
    half = one._replace(seconds=one.seconds | {"s2": [2.0] * 3})
    table = schedule_time.table_iv({(2, 2): [one, half]})
    assert "| s2 | 2 | 2 | 3.00x (2.00-4.00) |" in table and table[-1].startswith("| Parm (auto) | 2 | 2 | 3.64x")
