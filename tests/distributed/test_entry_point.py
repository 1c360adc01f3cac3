"""pretrain_gpt_moe.py as a user starts it: under torchrun, and as a single process, which is a complete job."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.distributed.jobs import Ended, Job
from tests.distributed.runs import BASE

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"^ \[[\d :.-]+\] iteration +(\d+)/ +\d+ \| consumed samples: +(\d+) \|"
    r" elapsed time per iteration \(ms\): [\d.]+ \|"
    r" learning rate: [\d.E+-]+ \| global batch size: +\d+ \| lm loss: ([\d.E+-]+) \|",
    re.MULTILINE,
)


def launch(flags: str) -> subprocess.CompletedProcess:
    """Run the entry point under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, "pretrain_gpt_moe.py", *BASE.split(), *flags.split()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess, Path]:
    """A run of one process with all logging and recording."""
    events = tmp_path_factory.mktemp("events")
    flags = (
        "--global-batch-size 8 --train-iters 9 "
        "--log-interval 2 --eval-interval 3 --eval-iters 2 --exit-interval 6 --log-tokens-per-expert "
        f"--tensorboard-dir {events}"
    )
    return launch(flags), events


def test_it_trains_evaluates_and_stops_at_the_exit_interval(finished) -> None:
    process, _ = finished
    assert process.returncode == 0, process.stderr[-3000:]
    lines = LINE.findall(process.stdout)
    assert [(int(iteration), int(samples)) for iteration, samples, _ in lines] == [(2, 16), (4, 32), (6, 48)]
    assert [float(loss) for _, _, loss in lines] == sorted((float(loss) for _, _, loss in lines), reverse=True)
    assert len(re.findall(r"validation loss at iteration [36] \| lm loss value: [\d.E+-]+ \|", process.stdout)) == 2
    assert "exiting at iteration 6" in process.stdout


def test_it_prints_nothing_that_nobody_can_act_on(finished) -> None:
    process, _ = finished
    assert "Warning" not in process.stderr
    assert "DEPRECATED" not in process.stderr
    assert "CPU RNG state" not in process.stderr


def test_it_records_to_tensorboard(finished) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, events = finished
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    wanted = {"lm loss", "learning-rate", "batch-size", "grad-norm", "loss-scale", "iteration-time", "throughput"}
    assert wanted | {"load_balancing_loss", "z_loss", "lm loss validation"} <= set(tags)
    assert len(accumulator.Scalars("lm loss")) == 6


MISTAKE = "--expert-model-parallel-size 3"
NAMED = f"{MISTAKE} x --expert-tensor-parallel-size 1"
REMEDY = "must divide the number of processes (2); change them"


def test_every_rank_names_a_mistake_and_its_remedy(tmp_path: Path) -> None:
    ended = Job(2, f"{BASE} {MISTAKE}", tmp_path).wait()
    assert all(ended.codes)
    for text in ended.output:
        assert NAMED in text and REMEDY in text
        assert "Traceback" not in text and "ValueError" not in text


def without_a_launcher(rank: int) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def alone(flags: str, directory: Path) -> Ended:
    return Job(1, flags, directory, without_a_launcher).wait()


def test_one_process_trains(tmp_path: Path) -> None:
    ended = alone(f"{BASE} --train-iters 2 --log-interval 1", tmp_path)
    assert ended.codes == [0], ended.text
    assert "iteration        2/       2" in ended.text


def test_it_ends_with_the_file_of_a_token_that_only_training_meets(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    tokens = np.full(100_000, 300, np.uint16)
    # The parts of the data that are checked before a run
    for place in range(8):
        first = (len(tokens) - 4096) * place // 7
        tokens[first : first + 4096] = 1
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    ended = alone(BASE.replace("--mock-data", f"--data-path {prefix} --split 1,0,0"), tmp_path)
    assert ended.codes == [1]
    assert f"ValueError: {prefix}.bin: token 300 is outside the vocabulary of 128; give" in ended.text
    assert "IndexError" not in ended.text
    assert "rank 0 failed with ValueError: " in ended.text.splitlines()[-1]
