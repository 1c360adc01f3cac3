"""What one watches: checks of its flags, profiles, memory, progress, garbage collection, Weights & Biases."""

import contextlib
import gc
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_balance.app.watching import memory_is_due, watching
from megatron_balance.cli.arguments import Parsed, parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.config.training_config import LogConfig, ProfilingConfig
from megatron_balance.device import memory
from megatron_balance.job.stall import Position
from megatron_balance.observe.balance import spread
from megatron_balance.observe.profiler import TorchProfiler, build_profiler, record_function
from megatron_balance.observe.progress_log import ProgressLog, first_job
from megatron_balance.training import loop
from megatron_balance.training.progress import Progress
from tests.unit.test_logging import FLAGS, report

CPU = Machine(world_size=2, cuda=False, transformer_engine=False, apex=False, wandb=True)
DATA = "--data-path a"


def parsed(flags: str, machine: Machine = CPU) -> Parsed:
    return parse_args(f"{FLAGS} {flags}".split(), machine)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--wandb-project p", "--wandb-project p: also give --wandb-save-dir or --save"),
        ("--wandb-project p --save s --wandb-exp-name=", "--wandb-exp-name: is empty"),
    ],
)
def test_mistakes(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parsed(flags)


@pytest.mark.parametrize(
    ("flags", "notice"),
    [
        ("--moe-per-layer-logging", "has no effect without --tensorboard-dir or --wandb-project"),
        ("--log-timers-to-tensorboard", "has no effect without --timing-log-level"),
        ("--profile-step-end 20", "has no effect without --profile"),
        ("--log-progress", "has no effect without --save"),
        ("--wandb-entity e", "has no effect without --wandb-project"),
        ("--log-device-memory-used", "has no effect without CUDA"),
        ("--profile --use-pytorch-profiler --tensorboard-dir t --profile-ranks 0 7", "no such rank among 2"),
    ],
)
def test_notices(flags: str, notice: str) -> None:
    assert [text for text in parsed(flags).notices if notice in text]


def test_weights_and_biases_are_enough() -> None:
    used = parsed("--log-memory-to-tensorboard --tensorboard-log-interval 3 --wandb-project p --save s")
    assert not any("has no effect" in text for text in used.notices)
    assert used.config.log.record_interval == 3 and parsed("").config.log.record_interval is None


def test_data_in_files(tmp_path: Path) -> None:
    blend = tmp_path / "blend.txt"
    splits = tmp_path / "splits.json"
    blend.write_text("0.3 code\n0.7 english\n")
    splits.write_text(json.dumps({"train": ["0.5", "a", 0.5, "b"], "valid": "c d", "test": []}))
    plain = FLAGS.replace("--mock-data", "")
    data = parse_args(f"{plain} --data-args-path {blend}".split(), CPU).config.data
    assert data.data_path == ["0.3", "code", "0.7", "english"]
    data = parse_args(f"{plain} --per-split-data-args-path {splits}".split(), CPU).config.data
    assert (data.train_data_path, data.valid_data_path, data.test_data_path) == (
        ["0.5", "a", "0.5", "b"],
        ["c", "d"],
        [],
    )
    for flags, message in (
        (f"--data-path x --data-args-path {blend}", "--data-args-path and --data-path: give one of them"),
        (f"--data-args-path {tmp_path / 'none'}", "--data-args-path"),
        (f"--per-split-data-args-path {blend}", "--per-split-data-args-path"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_args(f"{plain} {flags}".split(), CPU)
    splits.write_text(json.dumps({"train": [["a"]]}))
    with pytest.raises(ValueError, match=r"train is .*give a list, or a text"):
        parse_args(f"{plain} --per-split-data-args-path {splits}".split(), CPU)


def test_a_trace_has_the_iterations_and_our_spans(tmp_path: Path) -> None:
    config = ProfilingConfig(profile=True, use_pytorch_profiler=True, profile_step_start=3, profile_step_end=5)
    assert build_profiler(config, str(tmp_path), rank=1, done=0) is None
    profiler = build_profiler(config, str(tmp_path), rank=0, done=0)
    assert isinstance(profiler, TorchProfiler)
    for iteration in range(1, 7):
        with record_function(f"iteration {iteration}"):
            torch.ones(8, 8) @ torch.ones(8, 8)
        profiler.after_step(iteration)
    profiler.close()
    (path,) = tmp_path.glob("rank0.*.pt.trace.json")
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"iteration 3", "iteration 4", "ProfilerStep#3", "ProfilerStep#4", "aten::mm"} <= names
    assert not {"iteration 2", "iteration 5", "ProfilerStep#2", "ProfilerStep#5"} & names


def test_the_profiler_around_the_process_starts_and_stops_as_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda record_shapes: contextlib.nullcontext())
    config = ProfilingConfig(profile=True, profile_step_start=2, profile_step_end=4)
    profiler = build_profiler(config, None, rank=0, done=0)
    assert profiler is not None
    for iteration in range(1, 6):
        profiler.after_step(iteration)
        calls.append(str(iteration))
    profiler.close()
    assert calls == ["1", "start", "2", "3", "stop", "4", "5"]
    calls.clear()
    resumed = build_profiler(config, None, rank=0, done=2)
    assert resumed is not None
    resumed.close()
    assert calls == ["start", "stop"]


def test_a_history_of_memory_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observers: list[Callable] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda max_entries: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": []})
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    memory.record_history(tmp_path / "oom.pickle")
    memory.write_history(tmp_path / "snapshot.pickle")
    for observe in observers:
        observe(0, 1, 2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["oom.pickle", "snapshot.pickle"]
    assert pickle.loads((tmp_path / "oom.pickle").read_bytes()) == {"segments": []}


def test_a_trace_that_cannot_be_written_does_not_stop_training(tmp_path: Path, caplog) -> None:
    (tmp_path / "file").write_text("")
    config = ProfilingConfig(profile=True, use_pytorch_profiler=True, profile_step_start=1, profile_step_end=2)
    profiler = build_profiler(config, str(tmp_path / "file" / "traces"), rank=0, done=0)
    assert profiler is not None
    profiler.after_step(1)
    assert "--use-pytorch-profiler" in caplog.text and "training continues" in caplog.text


def test_when_memory_is_reported() -> None:
    def due(done: int, **settings: int) -> list[int]:
        return [one for one in range(done + 1, done + 13) if memory_is_due(one, done, LogConfig(**settings))]

    assert due(0, log_interval=5) == [1, 5]
    assert due(0, log_interval=1) == [1, 2]
    assert due(7, log_interval=4) == [8, 12]
    assert due(0, log_interval=2, log_memory_interval=4) == [1, 2, 4, 8, 12]


def test_the_line_of_memory() -> None:
    assert re.fullmatch(r"memory \(MB\) \| allocated: \d+\.\d\d \| max allocated: \d+\.\d\d", memory.line(True))
    assert memory.scalars().keys() == {"mem-allocated-bytes", "mem-max-allocated-bytes"}
    assert 0 < memory.allocated_bytes() <= memory.peak_bytes() * 1.1


def test_progress(tmp_path: Path) -> None:
    def job(samples: int) -> ProgressLog:
        return ProgressLog(tmp_path, samples, flops_per_sample=1e12, tokens_per_sample=1000, world_size=2)

    job(0).saved(5, 10_000)
    job(10_000).saved(7, 20_000)
    lines = [line.split("\t") for line in (tmp_path / "progress.txt").read_text().splitlines()]
    assert [line[3] for line in lines] == ["Starting job", "Saved checkpoint"] * 2
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line[0]) and line[2] == "# GPUs: 2" for line in lines)
    assert lines[3][4] == "Iteration: 7"
    assert lines[3][7:] == ["Floating-point operations: 2.00e+16", "Tokens (in billions): 0.02"]
    assert re.fullmatch(r"Cumulative throughput: \d+\.\d TFLOP/s/GPU", lines[3][6])


def test_the_first_job_of_this_size() -> None:
    def line(time: str, ranks: int, *rest: str) -> str:
        return "\t".join([f"2026-01-01 00:00:{time}", "Job ID: ", f"# GPUs: {ranks}", *rest])

    saved = ("Saved checkpoint", "", "", "", "Floating-point operations: 5.00e+15")
    start = ("Starting job",)
    lines = [line("01", 2, *start), line("02", 4, *start), line("03", 4, *saved), "torn", line("04", 2, *start)]
    found = first_job("\n".join([*lines, line("05", 2, *start)]), 2)
    assert found is not None and found[1] == 5e15
    assert found == first_job("\n".join(lines), 2) and first_job("", 2) is None


def test_garbage_is_collected_when_asked(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))
    monkeypatch.setattr(loop, "_forward_backward", lambda *_, **__: collected.append(-1) or [])
    one = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    for flags, expected in (("--manual-gc --manual-gc-interval 2", [2, 2, 2, -1, 0]), ("", [-1])):
        collected.clear()
        config = parsed(f"--eval-interval 1 {flags}").config
        groups = SimpleNamespace(ep=one, dp=one, pp=one)
        run = SimpleNamespace(config=config, progress=Progress(), groups=groups, balancer=None, model=[], recorded=None)
        run.position = Position()
        with watching(run) as after_step:
            assert gc.isenabled() == (not flags)
            for iteration in (1, 2, 3):
                after_step(report(iteration))
            loop.evaluate(run, [])
        assert gc.isenabled() and collected == expected


def test_spread_of_experts() -> None:
    import numpy as np

    assert spread(np.array([1, 1, 4, 2])) == (0.5, 2.0, pytest.approx(1.5**0.5 / 2))
    assert spread(np.zeros(4)) == (1.0, 1.0, 0.0)
