"""ScheMoE's Tables 7 and 10.

A capacity pads every expert to the same number of rows, so routing is even. Numbers have 32 bits. Tutel and FasterMoE
exchange within nodes first, then between nodes, as the paper says of NCCL's all-to-all (section 7). Tutel has the
number of chunks with the shortest time, and FasterMoE two; one is exchanged while another one computes. int8 stands for
ZFP on a GPU, where we have none: both send a quarter of the bytes.
"""

from collections.abc import Iterator

from reproduction.simulated import Job, System, simulated
from reproduction.tables import Found, Table, found

CODEC = "--moe-comm-codec int8 --moe-comm-codec-directions all"
PIPE = "--moe-comm-alltoall pipe"
FLAT = "--moe-comm-alltoall flat"
SCHEDULED = "--moe-comm-chunks auto --moe-comm-order optsche"

TUTEL = System(f"{FLAT} --moe-comm-chunks auto --moe-comm-order interleaved")
FASTERMOE = System(f"{FLAT} --moe-comm-chunks 2 --moe-comm-order interleaved")
SCHEMOE = System(f"{CODEC} {PIPE} {SCHEDULED}")

TABLE_7 = {12: (497, 506, 454), 16: (623, 640, 552), 20: (769, 845, 658), 24: (864, 1003, 774)}
"""Layers -> milliseconds of a step of Tutel, FasterMoE and ScheMoE."""

TABLE_10 = {
    "ScheMoE-Z": (1264, f"{CODEC} {FLAT}"),
    "ScheMoE-ZP": (1110, f"{CODEC} {PIPE}"),
    "ScheMoE": (1019, SCHEMOE.flags),
}
"""Variant -> milliseconds of a step of one layer, and its flags."""

NAIVE = 2401
"""Milliseconds of the variant without any of them."""


def _job(model: str, sequences: int, flags: str) -> Job:
    batch = f"--micro-batch-size {sequences} --global-batch-size {32 * sequences} --expert-model-parallel-size 32"
    return Job(model=model, flags=f"{batch} {flags}", cluster="schemoe.yaml", nodes=8)


def _table_7(iterations: int) -> Iterator[Found]:
    for layers, (tutel, faster, ours) in TABLE_7.items():
        # 136 sequences of 31 tokens are 4216 tokens
        job = _job(f"ct_moe_{layers}", 136, "--seq-length 31 --max-position-embeddings 31")
        base = simulated(job, TUTEL, iterations).iteration
        yield found(f"x={layers}", "fastermoe", tutel / faster, base / simulated(job, FASTERMOE, iterations).iteration)
        yield found(f"x={layers}", "schemoe", tutel / ours, base / simulated(job, SCHEMOE, iterations).iteration)


def _table_10(iterations: int) -> Iterator[Found]:
    # f = 1.2 makes 2458 rows of 2048 tokens; k=1, with which an all-to-all has the 640 MB of section 6.5
    shape = "--num-layers 1 --hidden-size 8192 --moe-ffn-hidden-size 8192 --num-attention-heads 64 --moe-router-topk 1"
    job = _job("ct_moe_12", 8, f"{shape} --seq-length 2458 --max-position-embeddings 2458")
    base = simulated(job, System(FLAT), iterations).moe
    yield found("milliseconds", "Naive", NAIVE, 1e3 * base)
    for name, (paper, flags) in TABLE_10.items():
        yield found("speedup", name, NAIVE / paper, base / simulated(job, System(flags), iterations).moe)


TABLES = {
    "schemoe_7": Table("ScheMoE, Table 7: CT-MoE-x on 32 GPUs, speedup of a step over Tutel", _table_7),
    "schemoe_10": Table("ScheMoE, Table 10: one layer on 32 GPUs, speedup over Naive", _table_10),
}
