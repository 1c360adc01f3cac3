"""training/logging.py and observe/routing.py: output for people and scrapers."""

import copy
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.config.run_config import RunConfig
from megatron_balance.cost.calibration import Factors
from megatron_balance.observe.balance import LayerReport, tensorboard_scalars
from megatron_balance.observe.routing import LoadRecorder
from megatron_balance.training.logging import RunLog, flops_per_sample, moe_layer_pattern
from megatron_balance.training.progress import Progress, StepReport

FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 4 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 100 --mock-data --tokenizer-type NullTokenizer --vocab-size 31 --log-interval 2"
)
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8"


def run_config(flags: str = "") -> RunConfig:
    machine = Machine(world_size=1, cuda=False, transformer_engine=False, apex=False)
    return parse_args(f"{FLAGS} {flags}".split(), machine).config


def report(iteration: int, loss: float = 6.25, **changes: object) -> StepReport:
    values = {
        "losses": {"lm loss": loss, "load_balancing_loss": 1.0},
        **{"grad_norm": 0.5571, "learning_rate": 1e-4, "loss_scale": 1.0, "global_batch_size": 32},
        **{"consumed_samples": 32 * iteration, "skipped": False, "seconds": 0.25},
    }
    return StepReport(iteration=iteration, **(values | changes))


def printed(
    log: RunLog, reports: list[StepReport], progress: Progress, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    for one in reports:
        log.step(one, progress)
    return capsys.readouterr().out.splitlines()


FLOAT = r"(-?\d\.\d{6}E[+-]\d{2}|NAN|-?INF)"
LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\]"
    r" iteration (?P<iteration>[ \d]{8})/(?P<iterations>[ \d]{8}) \|"
    r" consumed samples: (?P<samples>[ \d]{12}) \|"
    r" elapsed time per iteration \(ms\): (?P<milliseconds>\d+\.\d) \|"
    r"( throughput per GPU \(TFLOP/s/GPU\): (?P<throughput>\d+\.\d) \|)?"
    rf" learning rate: (?P<learning_rate>{FLOAT}) \|"
    r" global batch size: (?P<batch>[ \d]{5}) \|"
    rf" lm loss: (?P<loss>{FLOAT}) \|"
    rf"( load_balancing_loss: (?P<balance>{FLOAT}) \|)?"
    r" loss scale: (?P<scale>\d+\.\d) \|"
    r"( grad norm: (?P<norm>\d+\.\d{3}) \|)?"
    r" number of skipped iterations: (?P<skipped>[ \d]{3}) \|"
    r" number of nan iterations: (?P<nan>[ \d]{3}) \|"
    r"( max/mean load: (?P<before>\d+\.\d\d) -> (?P<after>\d+\.\d\d) \| planned: (?P<planned>\d+\.\d\d) \|"
    r" hosts added: (?P<hosts>\d+(\.\d+)?) \| experts moved: (?P<moved>\d+(\.\d+)?) \|"
    r" plan \(ms\): (?P<plan>\d+\.\d) \| trans\+agg \(MB\): (?P<megabytes>\d+\.\d) \|"
    r" waited for plan/trans/agg \(ms\): \d+\.\d/\d+\.\d/\d+\.\d \|"
    r" measured/predicted exchange/experts/trans/agg: (?P<factors>[^ ]+) \|)?"
)
"""Megatron's training log line as a scraper reads it; with a policy, our fields follow."""


def fields(line: str) -> dict[str, str | None]:
    match = LINE.fullmatch(line)
    assert match, line
    return match.groupdict()


def test_log_line(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(run_config(), 100, 128)
    lines = printed(log, [report(9, 6.0), report(10, 6.5)], Progress(iteration=10, consumed_samples=320), capsys)
    assert len(lines) == 1
    assert lines[0].split("]", 1)[1] == (
        " iteration       10/     100 | consumed samples:          320 | elapsed time per iteration (ms): 250.0 |"
        " learning rate: 1.000000E-04 | global batch size:    32 | lm loss: 6.250000E+00 |"
        " load_balancing_loss: 1.000000E+00 | loss scale: 1.0 | grad norm: 0.557 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    assert fields(lines[0])["loss"] == "6.250000E+00"


NAN = float("nan")


def balance(**changes: float) -> LayerReport:
    """Return the report of a layer that balancing improved."""
    numbers = dict.fromkeys(LayerReport._fields, 0.0)
    numbers |= {
        "ratio_before": 2.5,
        "ratio_after": 1.25,
        "ratio_planned": 1.02,
        "certified": NAN,
        "rb": 4.0,
        "hosts_added": 3.0,
        "plan_seconds": 2e-4,
    }
    return LayerReport(**(numbers | {"trans_bytes": 4e6, "agg_bytes": 2e6} | changes))


IDLE = balance(ratio_after=2.5, hosts_added=0.0, plan_seconds=0.0, trans_bytes=0.0, agg_bytes=0.0)


class Case(NamedTuple):
    """Reports, and fields of the lines that they give."""

    reports: list[StepReport]
    expected: list[dict[str, str | None]]
    progress: Progress = Progress()
    flags: str = ""


LINES = {
    "due every log interval": Case(
        [report(iteration, loss=float(iteration)) for iteration in range(1, 6)],
        [{"iteration": f"{last:8d}", "loss": f"{last - 0.5:.6E}"} for last in (2, 4)],
    ),
    "times are averaged": Case([report(1, seconds=0.1), report(2, seconds=0.3)], [{"milliseconds": "200.0"}]),
    "skipped iterations do not count into losses": Case(
        [report(1, NAN, skipped=True), report(2, 4.0), report(3, skipped=True), report(4, skipped=True)],
        [{"loss": f"{4:.6E}", "skipped": "  1"}, {"loss": f"{0:.6E}", "skipped": "  0"}],
        Progress(skipped_iterations=1),
    ),
    "nan iterations": Case([report(1), report(2, NAN)], [{"nan": "  1", "loss": "NAN"}], Progress(nan_iterations=1)),
    "no norm and no auxiliary loss": Case(
        [report(2, grad_norm=None, losses={"lm loss": 2.0})], [{"norm": None, "balance": None}]
    ),
    # The report of the second iteration averages two of them, that of the fifth three
    "balance of iterations without a report": Case(
        [
            report(1),
            report(2, balance={1: balance(hosts_added=1.0, experts_moved=5.0)}),
            *(report(3), report(4)),
            report(5, balance={1: balance(hosts_added=6.0, ratio_before=3.5)}),
        ],
        [{"before": "3.00", "hosts": "4", "moved": "2"}],
        flags="--log-interval 5",
    ),
    "balance that did nothing": Case(
        [report(n, balance={2: IDLE}) for n in (1, 2)],
        [{"before": "2.50", "after": "2.50", "hosts": "0", "megabytes": "0.0"}],
    ),
    "throughput": Case(
        [report(2, global_batch_size=8, seconds=0.5)], [{"throughput": "32.0"}], flags="--log-throughput"
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_fields(alone: None, capsys, name: str) -> None:
    reports, expected, progress, flags = LINES[name]
    log = RunLog(run_config(flags), 5, 128)
    log.flops_per_sample = 2e12
    # The log resets counters
    found = [fields(line) for line in printed(log, reports, copy.copy(progress), capsys)]
    assert [{name: line[name] for name in one} for line, one in zip(found, expected, strict=True)] == expected


def test_balance_comes_after_upstreams_fields(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    reports = [
        report(1, balance={1: balance(), 2: balance(ratio_before=3.5)}),
        report(
            2,
            balance={1: balance(experts_moved=2.0), 2: balance(hosts_added=4.0)},
            calibration=Factors(exchange=1.5, experts=2.0, agg=0.25),
        ),
        report(3),
        report(4),
    ]
    with_policy, without = printed(RunLog(run_config(), 5, 128), reports, Progress(), capsys)
    assert with_policy.split(" number of nan iterations:   0 |")[1] == (
        " max/mean load: 2.75 -> 1.25 | planned: 1.02 | hosts added: 6.5 | experts moved: 1 | plan (ms): 0.4 |"
        " trans+agg (MB): 12.0 | waited for plan/trans/agg (ms): 0.0/0.0/0.0 |"
        " measured/predicted exchange/experts/trans/agg: 1.5/2/1/0.25 |"
    )
    names = ("before", "after", "planned", "hosts", "moved", "plan", "megabytes")
    assert [fields(with_policy)[name] for name in names] == ["2.75", "1.25", "1.02", "6.5", "1", "0.4", "12.0"]
    assert [fields(without)[name] for name in names] == [None] * 7


def test_evaluation(alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(run_config(), 5, 128)
    log.evaluation("validation", Progress(iteration=7), {"lm loss": 2.0})
    log.evaluation("test", Progress(iteration=7), {"lm loss": 100.0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (" validation loss at iteration 7 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 |")
    assert "lm loss PPL: 4.851652E+08" in lines[1]


@pytest.fixture
def recording(alone: None, tmp_path: Path):
    """`recording(flags)`: a log that writes to TensorBoard, and the values and iterations that it writes, by name."""

    def of(flags: str = "") -> tuple[RunLog, dict[str, list[tuple[float, int]]]]:
        log = RunLog(run_config(f"--tensorboard-dir {tmp_path / 'events'} {flags}"), 5, 128)
        recorded = defaultdict(list)
        log.writers[0].add_scalar = lambda name, *value: recorded[name].append(value)
        return log, recorded

    return of


def test_tensorboard_keys(recording) -> None:
    log, recorded = recording("--tensorboard-log-interval 2")
    with log:
        for iteration in (1, 2, 3):
            log.step(report(iteration), Progress())
    names = ["lm loss", "load_balancing_loss", "learning-rate", "batch-size", "grad-norm", "loss-scale"]
    expected = {name: [2] for name in (*names, "iteration-time", "throughput")} | {
        f"{one} vs samples": [64] for one in names
    }
    assert {name: [at for _, at in found] for name, found in recorded.items()} == expected


def test_tensorboard_has_every_layers_balance(recording) -> None:
    log, recorded = recording()
    log.step(report(2), Progress())
    assert not any(name.startswith("moe/") for name in recorded)
    layers = {1: balance(), 3: balance(ratio_after=1.75)}
    log.step(report(3, balance=layers), Progress())
    found = {name: values for name, values in recorded.items() if name.startswith("moe/")}
    assert found == {name: [(value, 3)] for name, value in tensorboard_scalars(layers, Factors()).items()}
    assert recorded["lm loss"] == [(6.25, 2), (6.25, 3)]


def test_tensorboard_keys_on_demand(recording) -> None:
    flags = "--no-log-loss-scale-to-tensorboard --log-world-size-to-tensorboard --log-validation-ppl-to-tensorboard"
    log, recorded = recording(flags)
    log.step(report(1), Progress())
    log.evaluation("validation", Progress(iteration=1), {"lm loss": 2.0})
    assert "loss-scale" not in recorded and recorded["world-size"] == [(1, 1)]
    assert recorded["lm loss validation ppl"] == [(pytest.approx(7.389056), 1)]


def test_a_run_that_fails_keeps_its_numbers(alone: None, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(run_config(f"--tensorboard-dir {tmp_path}"), 5, 128)
    ended: list[bool] = []
    log.writers.append(SimpleNamespace(add_scalars=lambda *_: None, close=lambda failed: ended.append(failed)))
    with pytest.raises(FloatingPointError), log:
        log.step(report(1, loss=2.5), Progress())
        raise FloatingPointError
    assert ended == [True]
    events = EventAccumulator(str(tmp_path)).Reload()
    for tag, step in (("lm loss", 1), ("lm loss vs samples", 32)):
        assert [(event.step, event.value) for event in events.Scalars(tag)] == [(step, 2.5)]


def test_only_the_last_rank_speaks(alone: None, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    log = RunLog(run_config(f"--tensorboard-dir {tmp_path}"), 5, 128)
    assert printed(log, [report(2)], Progress(), capsys) == []
    assert log.writers == []


ATTENTION = 4 * 8 * 8
"""Weights of one layer's query, key, value and output projections."""

SCORES = 2 * 4 * 8
"""Multiplications of one token's scores and their weighted sum, over 4 positions."""

OUTPUT = 8 * 32
"""Weights of the output layer."""


@pytest.mark.parametrize(
    ("flags", "per_token"),
    [
        ("", 2 * (ATTENTION + SCORES + 2 * 8 * 32) + OUTPUT),
        ("--swiglu --ffn-hidden-size 16", 2 * (ATTENTION + SCORES + 3 * 8 * 16) + OUTPUT),
        (
            "--group-query-attention --num-query-groups 1",
            2 * (2 * 8 * 8 + 2 * 8 * 4 + SCORES + 2 * 8 * 32) + OUTPUT,
        ),
        (MOE, 2 * (ATTENTION + SCORES + 2 * 2 * 8 * 8 + 8 * 4) + OUTPUT),
        (
            f"{MOE} --swiglu --ffn-hidden-size 16 --moe-layer-freq [0,1]",
            2 * (ATTENTION + SCORES) + 3 * 8 * 16 + (2 * 3 * 8 * 8 + 8 * 4) + OUTPUT,
        ),
        (
            f"{MOE} --moe-shared-expert-intermediate-size 24 --disable-bias-linear",
            2 * (ATTENTION + SCORES + 2 * 2 * 8 * 8 + 2 * 8 * 24 + 8 * 4) + OUTPUT,
        ),
    ],
)
def test_flops_per_sample(flags: str, per_token: int) -> None:
    """A sample has 4 tokens; a multiplication counts as two operations, once forward and twice backward."""
    assert flops_per_sample(run_config(flags), vocab_size=32) == 2 * 3 * 4 * per_token


@pytest.mark.parametrize(
    ("experts", "frequency", "expected"),
    [
        (None, 1, [0, 0, 0, 0]),
        (8, 1, [1, 1, 1, 1]),
        (8, 2, [1, 0, 1, 0]),
        (8, 3, [1, 0, 0, 1]),
        (8, [0, 1, 1, 0], [0, 1, 1, 0]),
    ],
)
def test_moe_layer_pattern(experts: int | None, frequency: int | list[int], expected: list[int]) -> None:
    config = SimpleNamespace(num_layers=4, num_moe_experts=experts, moe_layer_freq=frequency, mtp_num_layers=None)
    assert moe_layer_pattern(config) == expected
    config.mtp_num_layers = 2
    assert moe_layer_pattern(config) == [*expected, expected[-1], expected[-1]]


def table(loads: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    recorder = LoadRecorder([])
    monkeypatch.setattr(recorder, "gather", lambda groups: loads)
    return recorder.table(None).splitlines()


def test_load_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert table({1: [30, 10, 20, 20], 12: [20, 20, 20, 20]}, monkeypatch)[1:] == [
        "layer |     e0     e1     e2     e3 | max/mean",
        "-" * 46,
        "    1 |     30     10     20     20 |     1.50",
        "   12 |     20     20     20     20 |     1.00",
    ]
    # Large counts widen all lines
    lines = table({1: [123456789, 0]}, monkeypatch)
    assert lines[3] == "    1 | 123456789         0 |     2.00"
    assert len({len(line) for line in lines[1:]}) == 1
    for loads in ({}, {1: [0, 0]}):
        assert len(table(loads, monkeypatch)) == 3 + len(loads)


def test_load_is_counted_in_training_passes_with_gradients_only() -> None:
    recorder = LoadRecorder([])
    routing_map = torch.tensor([[True, False], [True, True]])
    router = SimpleNamespace(training=True, layer_number=3)
    with torch.no_grad():
        recorder._count(router, None, (torch.ones(2, 2), routing_map))
    recorder._count(SimpleNamespace(training=False, layer_number=4), None, (torch.ones(2, 2), routing_map))
    assert recorder.counts == {}
    recorder._count(router, None, (torch.ones(2, 2), routing_map))
    assert {layer: counts.tolist() for layer, counts in recorder.counts.items()} == {3: [2, 1]}
