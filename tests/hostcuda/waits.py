"""Where the host waits for the device in an iteration, what it queues there, and how these numbers scale.

python -m tests.hostcuda.waits [CASE ...]     # writes tests/golden/waits/CASE.txt and tests/golden/work/CASE.txt

Routing is even, so that the bytes are the same on every machine and in every layer.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import __version__ as megatron_core
from megatron.core.transformer.moe.router import TopKRouter

from megatron_balance.training.run import Run
from tests.hostcuda.checker import WORK, Place
from tests.hostcuda.ranks import USUAL, DeviceRanks
from tests.hostcuda.runs import watched

GOLDEN = Path(__file__).parents[1] / "golden"

WORLD_SIZE = 2

PLAIN = "--expert-model-parallel-size 2 --disable-bias-linear --swiglu"

BLOCKWISE = "--balance-policy top2 --balance-profile builtin --balance-overlap blockwise"
FLEX = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
OPTIMIZER = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


class Case(NamedTuple):
    """A run and its machine."""

    flags: str
    machine: str = USUAL


CASES = {
    "bf16": Case("--bf16"),
    "float32": Case(""),
    "megatron": Case("--bf16 --moe-layer-impl megatron"),
    "blockwise": Case(f"--bf16 {BLOCKWISE} {OPTIMIZER}"),
    "exact": Case(f"--bf16 --balance-policy top2 --balance-load exact --balance-overlap blockwise {OPTIMIZER}"),
    "two_scales": Case(f"--bf16 {BLOCKWISE} --balance-inner-policy quota {OPTIMIZER}"),
    "chunks": Case("--bf16 --moe-comm-chunks 4 --moe-comm-order interleaved"),
    "dedup": Case("--bf16 --moe-comm-alltoall dedup --moe-comm-node-size 1"),
    "dedup_exact": Case(
        "--bf16 --moe-comm-alltoall dedup --moe-comm-node-size 1 --balance-policy top2 --balance-load exact "
        f"--balance-profile builtin --balance-overlap blockwise {OPTIMIZER}"
    ),
    "recomputation": Case("--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "transformer_engine": Case("--bf16 --moe-permute-fusion", "te and apex"),
    "flex_counted": Case(f"--bf16 {FLEX} --moe-flex-rows counted", "deep_ep"),
    "flex": Case(f"--bf16 {FLEX} --moe-flex-rows bound", "deep_ep"),
    "flex_blockwise": Case(
        f"--bf16 {FLEX} --moe-flex-rows bound {BLOCKWISE} --balance-token-split proportional {OPTIMIZER}", "deep_ep"
    ),
}

Counts = Mapping[tuple[str, Any], int]
"""(what, where) -> how much of it in an iteration. Waits are listed by function; work, by kind and file of ours."""

KINDS = ("waits", "work")
"""The tables of a case, and their directories."""

SIZES = ((2, 1), (3, 1), (2, 2), (3, 2))
"""(layers, microbatches) of the runs that show how waits scale."""

COLUMNS = ("layer and microbatch", "layer", "microbatch", "iteration")


def counted(ranks: DeviceRanks, case: Case) -> dict[str, dict[tuple[int, int], Counts]]:
    """Return kind of table -> size -> counts of the first rank's second iteration, for each of `SIZES`."""
    found: dict[str, dict[tuple[int, int], Counts]] = {kind: {} for kind in KINDS}
    for layers, microbatches in SIZES:
        size = f"--num-layers {layers} --global-batch-size {2 * WORLD_SIZE * microbatches}"
        outcome = ranks.run(watched, f"{PLAIN} {case.flags} {size}", 2, route_evenly)[0]
        assert not outcome.complaints, outcome.complaints
        found["waits"][layers, microbatches] = outcome.synchronizations
        found["work"][layers, microbatches] = by_file(outcome.work)
    return found


def route_evenly(run: Run) -> None:
    """Make token t choose the experts t, t + 1, ... modulo their number."""
    for module in run.model[0].modules():
        if isinstance(module, TopKRouter):
            assert module.config.num_moe_experts is not None
            module.gating = _even(module.config.num_moe_experts, module.gating)


def _even(experts: int, gating: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    row_E = -torch.arange(experts, dtype=torch.float32)
    table_EE = torch.stack([row_E.roll(expert) for expert in range(experts)]).cuda()

    def even(input: torch.Tensor) -> torch.Tensor:
        logits = gating(input)
        preferred = table_EE.repeat(logits.numel() // table_EE.numel(), 1).view(logits.shape)
        return (logits * 0 + preferred).to(logits.dtype)

    return even


def by_file(work: Mapping[tuple[str, Place], int]) -> Counts:
    """Add up work by the file of our innermost function, without that of `route_evenly`."""
    found: Counter[tuple[str, str]] = Counter()
    for (kind, place), amount in work.items():
        if not place.function.startswith(f"{Path(__file__).stem}."):
            found[kind, place.ours.split(".")[0]] += amount
    return found


def growth(found: Mapping[tuple[int, int], Counts]) -> dict[tuple[str, Any], tuple[int, ...]]:
    """Return (what, where) -> how much, by `COLUMNS`."""
    table = {}
    for key in sorted({key for counts in found.values() for key in counts}):
        few, deep, long, large = (found[size].get(key, 0) for size in SIZES)
        both = large - deep - long + few
        layer = deep - few - both
        microbatch = long - few - 2 * both
        table[key] = both, layer, microbatch, few - 2 * layer - microbatch - 2 * both
    return table


def waits_text(table: Mapping[tuple[str, Any], tuple[int, ...]]) -> str:
    """Return a table of waits as text, with a row of sums."""
    rows = [
        (*counts, f"{op}: {place}")
        for (op, place), counts in sorted(table.items(), key=lambda row: (row[1], row[0]), reverse=True)
    ]
    rows.append((*(sum(column) for column in zip(*table.values(), strict=True)), "all"))
    return _text("what waits, and where", rows)


def work_text(table: Mapping[tuple[str, Any], tuple[int, ...]]) -> str:
    """Return a table of work as text, with a row of sums after each kind."""
    rows: list[tuple] = []
    for kind in WORK:
        of_kind = {file: counts for (one, file), counts in table.items() if one == kind and any(counts)}
        rows += [(*of_kind[file], f"{kind}: {file}") for file in sorted(of_kind)]
        rows.append((*map(sum, zip(*of_kind.values(), strict=True)), f"{kind}: all") if of_kind else (*[0] * 4, kind))
    return _text("what is queued, and in which file of ours", rows)


def _text(title: str, rows: Iterable[tuple]) -> str:
    widths = [len(column) for column in COLUMNS]
    lines = (
        "  ".join((*(f"{count or '.':>{width}}" for count, width in zip(row, widths, strict=False)), row[-1]))
        for row in rows
    )
    return "\n".join(("  ".join((*COLUMNS, title)), *lines)) + "\n"


TEXT = {"waits": waits_text, "work": work_text}


def texts(ranks: DeviceRanks, case: Case) -> dict[str, str]:
    """Return the tables of a case, by kind."""
    return {kind: TEXT[kind](growth(found)) for kind, found in counted(ranks, case).items()}


def golden(kind: str, name: str) -> Path:
    """Return the file of a case's table; each version of megatron-core names its functions differently."""
    return GOLDEN / kind / f"{name}_{'.'.join(megatron_core.split('.')[:2])}.txt"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    for name in parser.parse_args().cases:
        ranks = DeviceRanks(WORLD_SIZE, CASES[name].machine)
        for kind, table in texts(ranks, CASES[name]).items():
            golden(kind, name).parent.mkdir(exist_ok=True)
            golden(kind, name).write_text(table)
            print(f"{golden(kind, name)}\n{table}")
        ranks.stop()
