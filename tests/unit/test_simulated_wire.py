"""Simulated parallel schedules: against predictions of `--moe-parallel-schedule auto`, and in whole configurations."""

import json
from pathlib import Path

import numpy as np
import pytest

import simulate
from megatron_balance.cost.exchange import ExchangeModel, resized
from megatron_balance.cost.network import Network
from megatron_balance.flow.parallel_schedule import SCHEDULES, Shape, TokenStep, volumes
from megatron_balance.flow.schedule_choice import ScheduleModel
from megatron_balance.simulate.engine import NOTHING
from megatron_balance.simulate.layers import RowExchange
from megatron_balance.simulate.network import Fabric, TeamNetwork
from tests.unit.simulated import SPEED, team

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 1024
HIDDEN = 512
TOPK = 2
ITEM = 2


def wire_of(schedule: str, hosts: int, mp: int, esp: int, node_size: int, saa: bool = False) -> RowExchange:
    ranks = hosts * esp
    _, measured = team(4 * ranks, node_size)
    links = resized(measured, hosts, max(1, node_size // esp))
    whole = resized(measured, ranks, node_size)
    direct = TokenStep.EP_ESP_ALL_TO_ALL in SCHEDULES[schedule]
    row_bytes = HIDDEN * ITEM
    return RowExchange(
        network=TeamNetwork(Fabric(ranks, node_size), np.arange(ranks), Network.of(whole)),
        profile=whole,
        models=(ExchangeModel.of(whole if direct else links),),
        steps=SCHEDULES[schedule],
        shards=esp,
        copies=mp,
        simultaneous=saa,
        token_bytes=TOKENS * row_bytes,
        topk=TOPK,
        row_bytes=row_bytes,
    )


def exchange_seconds(wire: RowExchange, hosts: int) -> float:
    """Return the seconds of a pass's collectives under even routing."""
    rows_BHE = np.full((1, hosts, hosts), TOKENS * TOPK * wire.shards // wire.copies // hosts)
    rows_HH = wire.repeated(rows_BHE)[0].astype(float)
    there = wire.exchange(rows_HH * wire.row_bytes)
    works = [there, wire.returning(there, 1), *wire.among_shards(rows_HH.sum(0)), *wire.ends()]
    return sum(work.alone for work in works)


@pytest.mark.parametrize(("hosts", "mp", "esp", "node_size"), [(4, 2, 2, 8), (4, 4, 2, 4), (8, 2, 4, 8), (8, 4, 1, 4)])
@pytest.mark.parametrize("schedule", ["s1", "s2", "megatron"])
@pytest.mark.parametrize("saa", [False, True])
def test_exchanges_alone_take_what_the_choice_of_schedules_predicts(
    schedule: str, saa: bool, hosts: int, mp: int, esp: int, node_size: int
) -> None:
    saa = saa and schedule == "s2"
    wire = wire_of(schedule, hosts, mp, esp, node_size, saa)
    shape = Shape(TOKENS, HIDDEN, TOKENS * TOPK, mp, esp)
    expected = ScheduleModel(wire.profile, mp, esp).seconds(schedule, shape, ITEM, saa)
    if schedule == "megatron":
        expected -= SPEED.seconds_per_token * (mp - 1) * shape.rows * esp / mp
    assert exchange_seconds(wire, hosts) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("mp", "esp"), [(1, 2), (2, 2), (4, 2), (2, 4), (4, 1)])
def test_rows_are_those_of_the_schedule(mp: int, esp: int) -> None:
    hosts = 4
    generator = np.random.default_rng(0)
    counts_BHE = generator.integers(0, 50, (2, hosts, 8))
    distinct = counts_BHE.sum((1, 2))
    for name in SCHEDULES:
        wire = wire_of(name, hosts, mp, esp, 8)
        repeated_BHE = wire.repeated(counts_BHE)
        times = mp if name in ("megatron", "baseline") else 1
        assert (repeated_BHE.sum((1, 2)) == times * distinct).all()
        assert (repeated_BHE.sum(1) == times * counts_BHE.sum(1)).all()
        if times > 1:
            # Hosts of tensor-parallel ranks with the same tokens send the same rows
            together = max(1, mp // esp)
            groups = repeated_BHE.reshape(2, hosts // together, together, 8)
            assert (groups == groups[:, :, :1]).all()


@pytest.mark.parametrize("name", [*SCHEDULES])
def test_collectives_exist_where_the_schedule_has_them(name: str) -> None:
    steps = {step for step, _ in volumes(name, Shape(TOKENS, HIDDEN, TOKENS * TOPK, 2, 2))}
    wire = wire_of(name, 4, 2, 2, 8)
    first, last = wire.ends()
    spread, collect = wire.among_shards(np.full(4, 8.0))
    assert (first is not NOTHING) == (name == "baseline")
    assert (last is not NOTHING) == (TokenStep.MP_ALL_GATHER in steps)
    assert (spread is not NOTHING) == (name == "megatron")
    assert (collect is not NOTHING) == (name in ("megatron", "baseline"))


def test_saa_hides_the_gather_where_levels_differ() -> None:
    plain, saa = (wire_of("s2", 4, 4, 1, 4, saa) for saa in (False, True))
    spread = [wire_of("s2", 8, 2, 1, 2, saa) for saa in (False, True)]
    # All ranks share a node: nothing can be hidden but latencies. On four nodes, the adapters hide the gather
    assert exchange_seconds(saa, 4) == pytest.approx(exchange_seconds(plain, 4), rel=0.05)
    gather = spread[0].ends()[1].alone
    assert exchange_seconds(spread[1], 8) == pytest.approx(exchange_seconds(spread[0], 8) - gather, rel=1e-6)


FLAGS = (
    "--num-layers 2 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 --bf16 "
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 4096 --moe-token-dispatcher-type alltoall "
    "--global-batch-size 16 --tensor-model-parallel-size 2 --expert-model-parallel-size 4 "
    "--expert-tensor-parallel-size 2 --disable-bias-linear"
)


def test_schedules_of_a_configuration_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "found.json"
    options = ["--cluster", "configs/clusters/h100.yaml", "--nodes", "2", "--iterations", "1", "--plan-ms", "1"]
    compare = ["--json", str(out), "--compare", "moe-parallel-schedule=baseline,megatron,s1,s2,auto"]
    assert simulate.main([*options, *compare, *FLAGS.split()]) == 0
    found = {one["label"]: one for one in json.loads(out.read_text())}
    # baseline and megatron compute every token on both of the tensor-parallel ranks that have it
    experts = {name: one["mean_seconds"]["experts"] for name, one in found.items()}
    assert experts["baseline"] == pytest.approx(experts["megatron"]) and experts["megatron"] > 1.4 * experts["s1"]
    assert experts["s2"] == pytest.approx(experts["s1"])
    seconds = {name: one["seconds"] for name, one in found.items()}
    assert seconds["baseline"] > seconds["megatron"] > seconds["s1"]
    assert seconds["auto"] == pytest.approx(min(seconds["s1"], seconds["s2"], seconds["megatron"]))
    for one in found.values():
        assert all(most <= 1 for _, most in one["busy"].values())
        assert one["misfit"] is None


def test_a_run_that_does_not_fit_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = tmp_path / "page.html"
    options = ["--cluster", "configs/clusters/h100.yaml", "--nodes", "2", "--iterations", "1", "--html", str(page)]
    assert simulate.main([*options, "--compare", "moe-ffn-hidden-size=4096,4000000", *FLAGS.split()]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "does not fit" in line]
    assert [line.partition(":")[0] for line in lines] == ["4000000"]
    assert page.read_text().count("does not fit") == 1
