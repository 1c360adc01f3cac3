"""workloads/forced_routing.py: which tokens a rank sees. Routers are in distributed/test_forced_routing.py."""

from itertools import product

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.training.data import microbatch_samples, on_context_rank
from megatron_balance.workloads.forced_routing import BatchPart

sizes = st.integers(1, 4)


@given(data_ranks=sizes, context_ranks=sizes, sequence_ranks=sizes, samples=sizes, microbatches=sizes, length=sizes)
def test_ranks_and_microbatches_see_every_token_once(
    data_ranks: int, context_ranks: int, sequence_ranks: int, samples: int, microbatches: int, length: int
) -> None:
    length *= 2
    seq_length = length * sequence_ranks * context_ranks
    seen: list[int] = []
    for data_rank, context_rank, sequence_rank in product(*map(range, (data_ranks, context_ranks, sequence_ranks))):
        part = BatchPart(
            seq_length=seq_length,
            data_rank=data_rank,
            data_ranks=data_ranks,
            sequence_rank=sequence_rank,
            sequence_ranks=sequence_ranks,
            context_rank=context_rank,
            context_ranks=context_ranks,
        )
        assert part.samples(samples * length) == samples
        for microbatch in range(microbatches):
            seen += part.tokens(microbatch, samples).ravel().tolist()
    assert sorted(seen) == list(range(data_ranks * samples * microbatches * seq_length))


@given(data_ranks=sizes, samples=sizes, microbatches=sizes)
def test_samples_are_those_that_the_data_loader_gives(data_ranks: int, samples: int, microbatches: int) -> None:
    batch = data_ranks * samples * microbatches
    for rank in range(data_ranks):
        part = BatchPart(seq_length=10, data_rank=rank, data_ranks=data_ranks)
        consumed = 3 * batch
        given_samples = list(
            microbatch_samples(9 * batch, micro_batch_size=samples, rank=rank, ranks=data_ranks, consumed=consumed)
        )
        for microbatch in range(microbatches):
            firsts = part.tokens(microbatch, samples)[:, 0] // 10
            assert firsts.tolist() == [sample - consumed for sample in given_samples[microbatch]]


@given(context_ranks=sizes, samples=sizes)
def test_tokens_of_context_parallel_ranks_are_those_of_their_data(context_ranks: int, samples: int) -> None:
    length = 4 * context_ranks
    batch_BS = torch.arange(samples * length).view(samples, length)
    for rank in range(context_ranks):
        part = BatchPart(seq_length=length, data_rank=0, data_ranks=1, context_rank=rank, context_ranks=context_ranks)
        given_BS = on_context_rank({"tokens": batch_BS}, rank, context_ranks)["tokens"]
        assert np.array_equal(part.tokens(0, samples), given_BS.numpy())
