"""training/data.py: which rank reads which sample, blends, vocabulary padding."""

import functools
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from megatron_balance.training.data import _end_with_the_rank, check_batch, microbatch_samples, padded_vocab_size
from megatron_balance.training.data_files import parse_blend

micro_batch_sizes = st.integers(1, 4)
rank_counts = st.integers(1, 5)
microbatches = st.integers(1, 6)
starts = st.integers(0, 50)
leftovers = st.integers(0, 50)


def readers(micro: int, ranks: int, count: int, consumed: int, left: int) -> list[list[list[int]]]:
    """Return every rank's microbatches from a dataset with `count` of them per rank after `consumed` samples."""
    step = micro * ranks
    total = consumed + count * step + left % step
    return [
        list(microbatch_samples(total, micro_batch_size=micro, rank=rank, ranks=ranks, consumed=consumed))
        for rank in range(ranks)
    ]


@given(micro_batch_sizes, rank_counts, microbatches, starts, leftovers)
def test_ranks_share_a_contiguous_range(micro: int, ranks: int, count: int, consumed: int, left: int) -> None:
    """Every sample is used at most once, and only the last incomplete microbatches are skipped."""
    batches = readers(micro, ranks, count, consumed, left)
    used = sorted(index for rank in batches for batch in rank for index in batch)
    assert used == list(range(consumed, consumed + count * micro * ranks))
    assert all(len(rank) == count and {*map(len, rank)} == {micro} for rank in batches)


@given(micro_batch_sizes, rank_counts, microbatches, st.integers(1, 4))
def test_global_batches_do_not_depend_on_the_number_of_ranks(micro: int, ranks: int, count: int, batches: int) -> None:
    size = micro * ranks * count

    def global_batches(ranks: int) -> list[list[int]]:
        """Return the sorted samples of each global batch."""
        per_rank = size // micro // ranks
        every = readers(micro, ranks, batches * per_rank, 0, 0)
        return [
            sorted(index for rank in every for batch in rank[first : first + per_rank] for index in batch)
            for first in range(0, batches * per_rank, per_rank)
        ]

    assert global_batches(ranks) == global_batches(1)


@given(micro_batch_sizes, rank_counts, st.integers(2, 6), leftovers, st.data())
def test_resuming_continues(micro: int, ranks: int, count: int, left: int, data: st.DataObject) -> None:
    done = data.draw(st.integers(1, count - 1))
    whole = readers(micro, ranks, count, 0, left)
    resumed = readers(micro, ranks, count - done, done * micro * ranks, left)
    assert resumed == [rank[done:] for rank in whole]


@pytest.mark.parametrize(("total", "consumed"), [(0, 0), (7, 0), (10, 3), (8, 8), (8, 9)])
def test_too_few_samples(total: int, consumed: int) -> None:
    message = (
        f"{total} samples, {consumed} of them consumed: .* 2 data-parallel ranks; lower --micro-batch-size .*more data"
    )
    with pytest.raises(ValueError, match=message):
        next(microbatch_samples(total, micro_batch_size=4, rank=0, ranks=2, consumed=consumed))


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("a", (["a"], None)),
        ("a b", (["a", "b"], None)),
        ("a b c", (["a", "b", "c"], None)),
        ("0.3 a 0.7 b", (["a", "b"], [0.3, 0.7])),
        ("1 a", (["a"], [1.0])),
        ("1e-1 a 2 7", (["a", "7"], [0.1, 2.0])),
        ("7", (["7"], None)),
        ("0.3 a 0.7", "--valid-data-path 0.3 a 0.7: give `weight prefix` pairs, or prefixes only"),
        *(
            (f"{weight} a 1 b", f"--valid-data-path {weight} a 1 b: give weights")
            for weight in ("0", "-1", "nan", "inf")
        ),
    ],
)
def test_blend(paths: str, expected: tuple[list[str], list[float] | None] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            parse_blend(paths.split(), "--valid-data-path")
    else:
        assert parse_blend(paths.split()) == expected


def test_the_padded_size_is_the_wanted_one() -> None:
    assert padded_vocab_size(100, 128, 2, 102) == 102
    for wanted in (98, 101):
        with pytest.raises(ValueError, match=f"--padded-vocab-size {wanted}: must be at least 100"):
            padded_vocab_size(100, 128, 2, wanted)


@given(st.integers(1, 10**6), st.integers(1, 512), st.integers(1, 8))
def test_padding_is_the_smallest(size: int, divisible_by: int, tensor_parallel: int) -> None:
    padded = padded_vocab_size(size, divisible_by, tensor_parallel)
    multiple = divisible_by * tensor_parallel
    assert padded % multiple == 0
    assert size <= padded < size + multiple


@pytest.mark.parametrize("name", ["tokens", "labels"])
@pytest.mark.parametrize("token", [-1, 10])
def test_a_token_outside_the_vocabulary_is_named_with_its_file(name: str, token: int) -> None:
    batch = {key: torch.arange(8).reshape(2, 4) for key in ("tokens", "labels")}
    alone = SimpleNamespace(dataset_path="alone")
    check_batch(batch, alone, 8)
    batch[name][1, 2] = token
    with pytest.raises(ValueError, match=rf"^alone\.bin: token {token} is outside the vocabulary of 10; give"):
        check_batch(batch, alone, 10)
    blend = SimpleNamespace(datasets=[SimpleNamespace(dataset_path=path) for path in "abc"])
    with pytest.raises(ValueError, match=r"^c\.bin: token"):
        check_batch(batch | {"dataset_id": torch.tensor([0, 2])}, blend, 10)


def test_a_signal_to_all_processes_leaves_loaders_to_the_rank() -> None:
    """SLURM signals all processes; only the worker's own parent ends the worker."""
    loader = DataLoader(range(64), num_workers=1, worker_init_fn=functools.partial(_end_with_the_rank, os.getpid()))
    others = {*multiprocessing.active_children()}
    samples = iter(loader)
    next(samples)
    (worker,) = {*multiprocessing.active_children()} - others
    stranger = os.spawnlp(os.P_WAIT, "sh", "sh", "-c", f"kill -TERM {worker.pid}")
    assert stranger == 0 and len(list(samples)) == 63
    others = {*multiprocessing.active_children()}
    samples = iter(loader)
    next(samples)
    (worker,) = {*multiprocessing.active_children()} - others
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(timeout=60)
    assert worker.exitcode == 0
