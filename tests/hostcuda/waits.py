"""Where the host waits for the device in an iteration, and how the number of waits scales.

python -m tests.hostcuda.waits [CASE ...]     # writes tests/golden/waits/CASE.txt
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from megatron.core import __version__ as megatron_core

from tests.hostcuda.checker import Place
from tests.hostcuda.ranks import DeviceRanks
from tests.hostcuda.runs import watched

GOLDEN = Path(__file__).parents[1] / "golden" / "waits"

WORLD_SIZE = 2

PLAIN = "--expert-model-parallel-size 2 --disable-bias-linear --swiglu"

BLOCKWISE = "--balance-policy top2 --balance-profile builtin --balance-overlap blockwise"
OPTIMIZER = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


class Case(NamedTuple):
    """A run and its machine."""

    flags: str
    machine: str = "bare"


CASES = {
    "bf16": Case("--bf16"),
    "float32": Case(""),
    "megatron": Case("--bf16 --moe-layer-impl megatron"),
    "blockwise": Case(f"--bf16 {BLOCKWISE} {OPTIMIZER}"),
    "chunks": Case("--bf16 --moe-comm-chunks 4 --moe-comm-order interleaved"),
    "recomputation": Case("--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "transformer_engine": Case("--bf16 --moe-permute-fusion", "te and apex"),
}

Waits = Mapping[tuple[str, Place], int]
"""(what waits, where) -> how often in an iteration."""

SIZES = ((2, 1), (3, 1), (2, 2), (3, 2))
"""(layers, microbatches) of the runs that show how waits scale."""

COLUMNS = ("layer and microbatch", "layer", "microbatch", "iteration")


def counted(ranks: DeviceRanks, case: Case, mutate: Callable | None = None) -> dict[tuple[int, int], Waits]:
    """Return the waits of the first rank's second iteration, for each of `SIZES`."""
    found = {}
    for layers, microbatches in SIZES:
        size = f"--num-layers {layers} --global-batch-size {2 * WORLD_SIZE * microbatches}"
        outcome = ranks.run(watched, f"{PLAIN} {case.flags} {size}", 2, mutate)[0]
        assert not outcome.complaints, outcome.complaints
        found[layers, microbatches] = outcome.synchronizations
    return found


def growth(found: Mapping[tuple[int, int], Waits]) -> dict[tuple[str, Place], tuple[int, ...]]:
    """Return (what waits, where) -> how often, by `COLUMNS`."""
    table = {}
    for key in sorted({key for waits in found.values() for key in waits}):
        few, deep, long, large = (found[size].get(key, 0) for size in SIZES)
        both = large - deep - long + few
        layer, microbatch = deep - few - both, long - few - 2 * both
        table[key] = both, layer, microbatch, few - 2 * layer - microbatch - 2 * both
    return table


def text(table: Mapping[tuple[str, Place], tuple[int, ...]]) -> str:
    """Return the table as text, with a row of sums."""
    head = "  ".join((*COLUMNS, "what waits, and where"))
    rows = [
        (*counts, f"{op}: {place}")
        for (op, place), counts in sorted(table.items(), key=lambda row: (row[1], row[0]), reverse=True)
    ]
    rows.append((*(sum(column) for column in zip(*table.values(), strict=True)), "all"))
    widths = [len(column) for column in COLUMNS]
    lines = (
        "  ".join((*(f"{count or '.':>{width}}" for count, width in zip(row, widths, strict=False)), row[-1]))
        for row in rows
    )
    return "\n".join((head, *lines)) + "\n"


def golden(name: str) -> Path:
    """Return the file of a case's table; each version of megatron-core names its functions differently."""
    return GOLDEN / f"{name}_{'.'.join(megatron_core.split('.')[:2])}.txt"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    GOLDEN.mkdir(exist_ok=True)
    for name in parser.parse_args().cases:
        ranks = DeviceRanks(WORLD_SIZE, CASES[name].machine)
        golden(name).write_text(text(growth(counted(ranks, CASES[name]))))
        print(f"{golden(name)}\n{golden(name).read_text()}")
        ranks.stop()
