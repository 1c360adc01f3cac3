"""Features by their flags, and which pairs of them work together: the table of docs/features.md.

python -m tests.features      # prints the table
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from tests.distributed.runs import BASE


class Feature(NamedTuple):
    """Flags on top of `BASE` and `PLAIN`."""

    flags: str
    learns: bool = False
    """Whether the flags train a different model: other initial weights, or dropped tokens."""


PLAIN = (
    "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    "--disable-bias-linear --swiglu --global-batch-size 8 --num-layers 4 --moe-router-force-workload hot_experts"
)
"""Flags common to all runs; tensor parallelism gives step orders something to order."""

FEATURES = {
    "sequence parallelism": Feature("--sequence-parallel"),
    "expert shards": Feature("--expert-tensor-parallel-size 2", learns=True),
    "baseline": Feature("--moe-parallel-schedule baseline"),
    "s1": Feature("--moe-parallel-schedule s1"),
    "s2": Feature("--moe-parallel-schedule s2"),
    "all-to-all": Feature("--moe-comm-alltoall pipe"),
    "dedup": Feature("--moe-comm-alltoall dedup --moe-comm-node-size 1"),
    "codec": Feature("--moe-comm-codec fp8 --moe-comm-codec-directions all"),
    "chunks": Feature("--moe-comm-chunks 3 --moe-comm-order interleaved"),
    "paired passes": Feature("--overlap-moe-expert-parallel-comm"),
    "policy": Feature("--balance-policy top2"),
    "exact plans": Feature("--balance-policy top2 --balance-load exact"),
    "two time scales": Feature("--balance-policy top2 --balance-inner-policy quota"),
    "certified passes": Feature("--balance-policy top2 --balance-load exact --balance-certify 0.5"),
    "blockwise overlap": Feature("--balance-policy top2 --balance-overlap blockwise"),
    "calibrated plans": Feature("--balance-policy top2 --balance-calibrate on --balance-log-dir unused"),
    "ownership": Feature("--balance-policy demi --balance-ownership transfer"),
    "distributed optimizer": Feature("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "context parallelism": Feature("--context-parallel-size 2"),
    "multi-token prediction": Feature("--mtp-num-layers 1 --position-embedding-type rope", learns=True),
    "pipeline": Feature("--pipeline-model-parallel-size 2", learns=True),
    "interleaved pipeline": Feature(
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", learns=True
    ),
    "full recomputation": Feature("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "layer recomputation": Feature("--recompute-granularity selective --recompute-modules moe"),
    "capacity": Feature("--moe-expert-capacity-factor 8", learns=True),
    "allgather": Feature("--moe-token-dispatcher-type allgather"),
    "megatron's layer": Feature("--moe-layer-impl megatron --sequence-parallel"),
    "documents apart": Feature("--reset-attention-mask", learns=True),
}

PAIRS = tuple(itertools.combinations(FEATURES, 2))


def flags_of(*names: str) -> str:
    """Return the flags of a run with these features."""
    return " ".join([PLAIN, *(FEATURES[name].flags for name in names)])


def reference(*names: str) -> str:
    """Return the flags of the run that such a run must follow."""
    learning = {name for name in names if FEATURES[name].learns}
    return " ".join([PLAIN, "--sequence-parallel", *(FEATURES[name].flags for name in names if name in learning)])


def alternatives(one: str, other: str) -> bool:
    """Return whether the two features give one flag different values."""
    values = [dict(_settings(FEATURES[name].flags)) for name in (one, other)]
    return any(values[0][flag] != values[1][flag] for flag in values[0].keys() & values[1].keys())


def _settings(flags: str) -> Iterator[tuple[str, str]]:
    for setting in flags.split("--")[1:]:
        flag, _, value = setting.strip().partition(" ")
        yield flag, value


def world_size(*names: str) -> int:
    """Return the number of ranks of a run with these features."""
    wide = {"expert shards", "context parallelism"} & {*names}
    return 8 if wide and any("pipeline" in name for name in names) else 4


def refusal(*names: str) -> str | None:
    """Return the error message that refuses these features together, or None if they work."""
    try:
        parse_args(
            f"{BASE} {flags_of(*names)}".split(),
            Machine(world_size(*names), cuda=False, transformer_engine=False, apex=False),
        )
    except ValueError as error:
        return str(error)
    return None


def together() -> list[tuple[str, str]]:
    """Return the pairs of features that train together."""
    return [pair for pair in PAIRS if not alternatives(*pair) and refusal(*pair) is None]


def table() -> list[str]:
    """Return Markdown: a row and a column for each feature, followed by the refusals."""
    names = list(FEATURES)
    rows = [f"| | {' | '.join(str(number) for number in range(1, len(names)))} |", "|---" * len(names) + "|"]
    refusals: dict[str, int] = {}
    for number, one in enumerate(names):
        cells = []
        for other in names[:number]:
            said = None if alternatives(other, one) else refusal(other, one)
            mark = "or" if alternatives(other, one) else "+"
            cells.append(mark if said is None else f"[{refusals.setdefault(said, len(refusals) + 1)}]")
        rows.append(f"| {number + 1} {one} | {' | '.join([*cells, *[''] * (len(names) - 1 - number)])} |")
    return [*rows, "", *(f"{number}. `{said}`" for said, number in refusals.items())]


if __name__ == "__main__":
    print("\n".join(table()))
