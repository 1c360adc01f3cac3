"""tools/bench/chunk_time.py: the compared variants, and the table of measurements."""

from itertools import pairwise

import chunk_time
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine

Measured = chunk_time.Measured
PLAIN = chunk_time.PLAIN


def test_all_orders_of_all_numbers_of_chunks_are_compared() -> None:
    variants = chunk_time.variants_of([2, 4])
    orders = [f"{order} {degree}" for degree in (2, 4) for order in chunk_time.ORDERS]
    assert list(variants) == [PLAIN, *orders, "auto"]
    machine = Machine(world_size=4, cuda=False, transformer_engine=False, apex=False)
    asked = set()
    for variant in (*variants.values(), *chunk_time.ablation("fp8").values()):
        line = f"{chunk_time.COMMON} --expert-model-parallel-size 4 {variant.flags}"
        comm = parse_args(line.split(), machine)[0].comm
        asked.add((comm.moe_comm_chunks, comm.moe_comm_order, comm.moe_comm_codec, comm.moe_comm_alltoall))
    assert len(asked) == len(variants) + len(chunk_time.ablation("fp8"))


def test_the_ablation_adds_up() -> None:
    flags = [variant.flags for variant in chunk_time.ablation("zfp").values()]
    assert flags[0] == "--moe-comm-alltoall flat" and all(after.startswith(before) for before, after in pairwise(flags))
    assert "--moe-comm-codec zfp" in flags[1] and "--moe-comm-alltoall pipe" in flags[2]
    assert flags[3].endswith("--moe-comm-chunks auto")


def measured(plain: float, chunked: float) -> object:
    return Measured({PLAIN: [plain] * 3, "sequential 2": [chunked] * 3, "auto": [plain / 2] * 3}, "2/4", 0.8)


def test_an_iteration_lasts_as_long_as_on_its_slowest_rank() -> None:
    by_rank = [Measured({PLAIN: [1.0, 4.0]}, "2", 0.8), Measured({PLAIN: [3.0, 2.0]}, "2", 0.8)]
    assert chunk_time.job_of(by_rank).seconds == {PLAIN: [3.0, 4.0]}


def test_a_row_has_ratios_of_jobs() -> None:
    assert chunk_time.heads([PLAIN, "sequential 2", "auto"])[0] == (
        "| GFLOP/s | network / experts | 1 chunk, ms | sequential 2 | auto | auto / best of others |"
    )
    row = chunk_time.row(6.0, [measured(1.0, 1.2), measured(2.0, 2.2), measured(3.0, 3.0)])
    assert row == ("| 6 | 0.80 | 2000 | 1.100 (1.000-1.200) | 0.500 (0.500-0.500): 2/4 | 0.500 (0.500-0.500) |")
    slow = [Measured({PLAIN: [1.0], "sequential 2": [0.8], "auto": [0.9]}, chosen, 0.8) for chosen in ("2", "4", "2")]
    assert chunk_time.row(3.0, slow).endswith("| 0.900 (0.900-0.900): 2, 4 | 1.125 (1.125-1.125) |")
