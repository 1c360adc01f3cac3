"""Parm's Tables IV and V, and the average of its Fig. 7.

A capacity pads every expert to the same number of rows, f times those of even routing. Numbers have 32 bits. The
baseline is DeepSpeed-MoE's order of steps, `--moe-parallel-schedule baseline`. All P ranks hold the shards of P / N_ESP
experts. Of the paper's configured layers, those in the middle of its ranges are simulated, with both of its f. The gate
is top-2, which the paper does not say.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from reproduction.simulated import Job, System, simulated
from reproduction.tables import Found, Table, found

TOPK = 2
FACTORS = (1.2, 2.4)
"""f of Table III."""

BATCH, LENGTH, WIDTH = 4, 1024, 2048
"""B, L, and H / N_ESP and M / N_ESP: the middle of Table III's ranges."""


class Testbed(NamedTuple):
    """Ranks of one of the paper's clusters."""

    cluster: str
    nodes: int
    ranks: int


A = Testbed("parm_a.yaml", 1, 8)
B8, B16, B32 = (Testbed("parm_b.yaml", ranks // 4, ranks) for ranks in (8, 16, 32))

TABLE_IV = {
    (2, 2): {"s1": (2.10, 2.62, 2.46), "s2": (1.99, 2.42, 2.20), "auto": (2.10, 2.62, 2.46)},
    (2, 4): {"s1": (2.24, 3.37, 2.85), "s2": (2.41, 3.05, 2.44), "auto": (2.41, 3.37, 2.85)},
    (4, 2): {"s1": (3.72, 4.18, 4.12), "s2": (3.21, 3.58, 3.81), "auto": (3.70, 4.18, 4.12)},
    (4, 4): {"s1": (4.19, 5.77, 5.08), "s2": (4.12, 5.38, 4.82), "auto": (4.20, 5.77, 5.08)},
}
"""N_MP, N_ESP -> schedule -> speedups over the baseline on testbed A, and on 8 and 16 GPUs of testbed B."""

FIG_7 = 4.91
"""Average speedup of Parm on 32 GPUs of testbed B, with N_MP = N_ESP = 4."""

TABLE_V = {("BERT-Base", 512): (3.06, 2.98), ("GPT-2", 1024): (3.08, 3.15)}
"""Model, tokens per sequence -> speedups of Parm over the baseline on testbeds A and B; N_MP = N_ESP = 4."""


def _system(schedule: str, factor: float) -> System:
    """Return a schedule with which every source sends each expert `factor` times its rows, padding included."""
    return System(f"--moe-parallel-schedule {schedule}", lambda counts_BDE: np.ceil(factor * counts_BDE).astype(int))


def _job(testbed: Testbed, tensor: int, shards: int, flags: str) -> Job:
    experts = testbed.ranks // shards
    replicas = testbed.ranks // tensor
    layout = (
        f"--tensor-model-parallel-size {tensor} --expert-tensor-parallel-size {shards} --num-experts {experts} "
        f"--expert-model-parallel-size {experts} --moe-router-topk {TOPK} --micro-batch-size {BATCH} "
        f"--global-batch-size {BATCH * replicas}"
    )
    return Job(model="gpt2_moe", flags=f"{layout} {flags}", cluster=testbed.cluster, nodes=testbed.nodes)


def _layer(testbed: Testbed, tensor: int, shards: int) -> Job:
    width = WIDTH * shards
    shape = f"--num-layers 1 --hidden-size {width} --moe-ffn-hidden-size {width} --num-attention-heads 16"
    return _job(testbed, tensor, shards, f"{shape} --seq-length {LENGTH} --max-position-embeddings {LENGTH}")


def _speedups(
    testbed: Testbed, tensor: int, shards: int, schedules: Sequence[str], iterations: int
) -> Iterator[tuple[str, float]]:
    """Yield each schedule's mean speedup of a layer over the baseline."""
    job = _layer(testbed, tensor, shards)
    base = {factor: simulated(job, _system("baseline", factor), iterations).moe for factor in FACTORS}
    for schedule in schedules:
        times = {factor: simulated(job, _system(schedule, factor), iterations).moe for factor in FACTORS}
        yield schedule, statistics.mean(base[factor] / times[factor] for factor in FACTORS)


def _table_iv(iterations: int) -> Iterator[Found]:
    for (tensor, shards), papers in TABLE_IV.items():
        for index, (name, testbed) in enumerate({"A": A, "B, 8 GPUs": B8, "B, 16 GPUs": B16}.items()):
            label = f"{name}, N_MP={tensor}, N_ESP={shards}"
            for schedule, ours in _speedups(testbed, tensor, shards, [*papers], iterations):
                yield found(label, "parm" if schedule == "auto" else schedule, papers[schedule][index], ours)


def _fig_7(iterations: int) -> Iterator[Found]:
    for _, ours in _speedups(B32, 4, 4, ["auto"], iterations):
        yield found("B, 32 GPUs, N_MP=4, N_ESP=4", "parm", FIG_7, ours)


def _table_v(iterations: int) -> Iterator[Found]:
    for (model, length), papers in TABLE_V.items():
        for paper, (name, testbed) in zip(papers, {"A": A, "B": B32}.items(), strict=True):
            job = _job(testbed, 4, 4, f"--seq-length {length} --max-position-embeddings {length}")
            base, ours = (
                simulated(job, _system(one, FACTORS[0]), iterations).iteration for one in ("baseline", "auto")
            )
            yield found(f"{model}, testbed {name}", "parm", paper, base / ours)


TABLES = {
    "parm_iv": Table("Parm, Table IV: one MoE layer, average speedup over DeepSpeed-MoE", _table_iv),
    "parm_fig_7": Table("Parm, Fig. 7: one MoE layer, average speedup over DeepSpeed-MoE", _fig_7),
    "parm_v": Table("Parm, Table V: whole models, speedup over DeepSpeed-MoE", _table_v),
}
