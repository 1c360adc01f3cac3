"""workloads/forced_routing.py: which tokens a rank sees. Routers are in distributed/test_forced_routing.py."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.training.data import MicrobatchSampler
from megatron_balance.workloads.forced_routing import BatchPart

sizes = st.integers(1, 4)


@given(data_ranks=sizes, sequence_ranks=sizes, samples=sizes, microbatches=sizes, length=sizes)
def test_ranks_and_microbatches_see_every_token_once(
    data_ranks: int, sequence_ranks: int, samples: int, microbatches: int, length: int
) -> None:
    seq_length = length * sequence_ranks
    seen: list[int] = []
    for data_rank in range(data_ranks):
        for sequence_rank in range(sequence_ranks):
            part = BatchPart(
                seq_length=seq_length,
                data_rank=data_rank,
                data_ranks=data_ranks,
                sequence_rank=sequence_rank,
                sequence_ranks=sequence_ranks,
            )
            assert part.samples(samples * length) == samples
            for microbatch in range(microbatches):
                seen += chain.from_iterable(part.token_ranges(microbatch, samples))
    assert sorted(seen) == list(range(data_ranks * samples * microbatches * seq_length))


@given(data_ranks=sizes, samples=sizes, microbatches=sizes)
def test_samples_are_those_that_the_data_loader_gives(data_ranks: int, samples: int, microbatches: int) -> None:
    batch = data_ranks * samples * microbatches
    for rank in range(data_ranks):
        part, consumed = BatchPart(seq_length=10, data_rank=rank, data_ranks=data_ranks), 3 * batch
        given_samples = list(
            MicrobatchSampler(
                9 * batch, micro_batch_size=samples, rank=rank, ranks=data_ranks, consumed_samples=consumed
            )
        )
        for microbatch in range(microbatches):
            firsts = [tokens.start // 10 for tokens in part.token_ranges(microbatch, samples)]
            assert firsts == [sample - consumed for sample in given_samples[microbatch]]
