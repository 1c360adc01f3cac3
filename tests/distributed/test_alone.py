"""pretrain_gpt_moe.py without a launcher: a single process is a complete job, guarded like any other."""

import os
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.distributed.jobs import Ended, Job
from tests.distributed.runs import BASE


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
