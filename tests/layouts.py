"""Training layouts by their flags, and a covering array of them: any two choices meet in some layout.

python -m tests.layouts      # prints the array that `--slow` trains
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.planning.policies import registered
from tests.distributed.runs import BASE

Layout = Mapping[str, str]
"""Dimension -> choice."""

Choices = Mapping[str, Sequence[str]]
"""Dimension -> its choices; the first choice never rules out what others allow."""

Pair = frozenset[tuple[str, str]]
"""Choices (dimension, choice) in two dimensions."""

RANKS = 8
"""Maximum number of ranks."""

MICROBATCH = 2
"""Samples per microbatch."""

PLAIN = (
    f"--disable-bias-linear --swiglu --num-layers 4 --micro-batch-size {MICROBATCH} --seq-length 64 "
    "--moe-ffn-hidden-size 8 --moe-router-force-workload hot_experts"
)
"""Flags common to all layouts."""

FLAGS: Mapping[str, Mapping[str, str]] = {
    "replicas": {"1-replica": "", "2-replicas": "", "4-replicas": ""},
    "experts": {"EP2": "--expert-model-parallel-size 2", "EP4": "--expert-model-parallel-size 4"},
    "tensor": {
        "TP1": "",
        "TP2": "--tensor-model-parallel-size 2",
        "TP2-SP": "--tensor-model-parallel-size 2 --sequence-parallel",
    },
    "shards": {"ETP1": "--expert-tensor-parallel-size 1", "ETP2": "--expert-tensor-parallel-size 2"},
    "stages": {
        "PP1": "",
        "PP2": "--pipeline-model-parallel-size 2",
        "PP2-interleaved": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    },
    "microbatches": {"4-microbatches": "", "3-microbatches": "", "1-microbatch": ""},
    "policy": {
        "top2": "--balance-policy top2",
        "top3": "--balance-policy top3 --balance-guest-slots 3",
        **{name: f"--balance-policy {name}" for name in registered() if name not in ("top2", "top3", "none")},
        "none": "",
    },
    "overlap": {
        "blocking": "",
        "blockwise": "--balance-overlap blockwise",
        "exact": "--balance-overlap blockwise --balance-load exact",
        "exact-blocking": "--balance-load exact",
        "two-scales": "--balance-overlap blockwise --balance-inner-policy quota",
        "two-scales-blocking": "--balance-inner-policy quota",
    },
    "ownership": {"lend": "", "transfer": "--balance-ownership transfer"},
    "optimizer": {
        "whole": "",
        "whole-reduce": "--overlap-grad-reduce",
        "sharded": "--use-distributed-optimizer",
        "sharded-reduce": "--use-distributed-optimizer --overlap-grad-reduce",
        "sharded-gather": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    },
    "buckets": {"large-buckets": "", "small-buckets": "--ddp-bucket-size 1000"},
    "recomputation": {
        "kept": "",
        "recompute-moe": "--recompute-granularity selective --recompute-modules moe",
        "recompute-full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    },
    "chunks": {"1-chunk": "", "3-chunks": "--moe-comm-chunks 3 --moe-comm-order interleaved"},
    "passes": {"alone": "", "paired": "--overlap-moe-expert-parallel-comm"},
}
"""Dimension -> choice -> flags on top of `BASE` and `PLAIN`."""

CHOICES: Choices = {dimension: tuple(flags) for dimension, flags in FLAGS.items()}

LEARNED = ("replicas", "experts", "tensor", "shards", "stages", "microbatches")
"""Dimensions whose choices draw other weights or train on other samples."""


def layout_of(*choices: str, table: Choices = CHOICES) -> Layout:
    """Return the layout with these choices, and the first choice of every other dimension."""
    dimensions = {name: dimension for dimension, names in table.items() for name in names}
    return {dimension: names[0] for dimension, names in table.items()} | {dimensions[name]: name for name in choices}


FRUGAL = ("demi_s2", "demi_s3")
"""Policies that need not act: regardless of the profile, they weigh the bytes of tokens against those of experts."""


def must_act(layout: Layout) -> bool:
    """Return whether the policy has something to do on hot experts.

    demi_s1 moves an expert to the rank that has most of its tokens. Where the two tensor-parallel ranks, which route
    the same tokens, are the whole expert-parallel group, no rank has more than the other.
    """
    alike = (layout["tensor"], layout["experts"]) == ("TP2", "EP2")
    return layout["policy"] not in FRUGAL and not (layout["policy"] == "demi_s1" and alike)


def size(layout: Layout, dimension: str) -> int:
    """Return the number in a choice such as TP2-SP or 2-replicas."""
    return int(layout[dimension].partition("-")[0].lstrip("CEPT"))


def world_size(layout: Layout) -> int:
    """Return the number of ranks of a run; each replica has all experts."""
    return math.prod(size(layout, dimension) for dimension in ("replicas", "experts", "shards", "stages"))


def flags_of(layout: Layout) -> str:
    """Return the flags of a run in this layout."""
    data_parallel = world_size(layout) // (size(layout, "tensor") * size(layout, "stages"))
    samples = MICROBATCH * data_parallel * size(layout, "microbatches")
    settings = (FLAGS[dimension][choice] for dimension, choice in layout.items())
    return " ".join([PLAIN, f"--global-batch-size {samples}", *filter(None, settings)])


def reference(layout: Layout) -> str:
    """Return the flags of the run that this layout must follow: no policy and no optional feature."""
    kept = {dimension: layout[dimension] for dimension in LEARNED}
    if kept["tensor"] == "TP2":
        kept["tensor"] = "TP2-SP"
    return flags_of({**layout_of("none"), **kept})


@functools.cache
def refusal(world_size: int, flags: str) -> str | None:
    """Return the error message that refuses flags on top of `BASE`, or None if they are accepted."""
    try:
        parse_args(f"{BASE} {flags}".split(), Machine(world_size, cuda=False, transformer_engine=False, apex=False))
    except ValueError as error:
        return str(error)
    return None


def is_possible(layout: Layout) -> bool:
    """Return whether the command line accepts the layout, on at most `RANKS` ranks."""
    return world_size(layout) <= RANKS and refusal(world_size(layout), flags_of(layout)) is None


def covering(
    choices: Choices, allowed: Callable[[Layout], bool], first: Iterable[Layout] = ()
) -> tuple[list[Layout], list[Pair]]:
    """Return layouts in which any two choices of different dimensions meet, unless no layout may have both.

    The search is greedy and deterministic. Each layout begins with a pair that is still missing. In each other
    dimension, it takes the choice that covers the most missing pairs, and among equals the least used one.

    Args:
        choices: the choices of each dimension.
        allowed: whether a layout is allowed.
        first: layouts to begin with.

    Returns:
        The layouts, beginning with `first`, and all pairs that meet.
    """
    default = {dimension: names[0] for dimension, names in choices.items()}
    points = [(dimension, name) for dimension, names in choices.items() for name in names]
    pairs = [frozenset(pair) for pair in itertools.combinations(points, 2) if pair[0][0] != pair[1][0]]
    pairs = [pair for pair in pairs if allowed(default | dict(pair))]
    layouts = list(first)
    missing = dict.fromkeys(pairs)
    for layout in layouts:
        _strike(missing, layout)
    while missing:
        used = Counter(choice for layout in layouts for choice in layout.items())
        layout = dict(next(iter(missing)))
        for dimension in choices:
            if dimension not in layout:
                names = _by_worth(dimension, choices[dimension], layout, missing, used)
                layout[dimension] = next(name for name in names if allowed(default | layout | {dimension: name}))
        layouts.append({dimension: layout[dimension] for dimension in choices})
        _strike(missing, layouts[-1])
    return layouts, pairs


def _strike(missing: dict[Pair, None], layout: Layout) -> None:
    for pair in itertools.combinations(layout.items(), 2):
        missing.pop(frozenset(pair), None)


def _by_worth(
    dimension: str, names: Sequence[str], layout: Layout, missing: Collection[Pair], used: Counter
) -> list[str]:
    def worth(name: str) -> tuple[int, int]:
        met = sum(frozenset([(dimension, name), other]) in missing for other in layout.items())
        return met, -used[dimension, name]

    return sorted(names, key=worth, reverse=True)


REPLICAS = ("2-replicas", "1-microbatch")
GATHER = ("sharded-gather", "small-buckets")

QUICK = {
    "replicas-gather": layout_of(*REPLICAS, *GATHER, "pro_prophet", "blockwise"),
    "replicas-gather-blocking": layout_of(*REPLICAS, *GATHER, "flexmoe"),
    "replicas-gather-quota": layout_of(*REPLICAS, *GATHER, "quota", "blockwise"),
    "replicas-gather-transfer": layout_of(*REPLICAS, *GATHER, "demi", "blockwise", "transfer"),
    "replicas-gather-no-policy": layout_of(*REPLICAS, *GATHER, "none", "3-chunks"),
    "replicas-reduce": layout_of(
        *REPLICAS, "top2", "blockwise", "sharded-reduce", "small-buckets", "recompute-moe", "3-chunks"
    ),
    "replicas-whole-optimizer": layout_of(
        *REPLICAS, "demi_s2", "blockwise", "whole-reduce", "small-buckets", "recompute-full"
    ),
    "replicas-sharded-optimizer": layout_of(*REPLICAS, "demi_s3", "sharded", "3-chunks"),
    "replicas-tensor-parallel": layout_of("2-replicas", "TP2", "3-microbatches", "pro_prophet", *GATHER, "blockwise"),
    "stages": layout_of("PP2", "3-microbatches", "fastermoe", "blockwise", "transfer", "whole-reduce"),
    "interleaved": layout_of("PP2-interleaved", "top3", "blockwise", *GATHER),
    "interleaved-transfer": layout_of("PP2-interleaved", "demi_s1", "transfer", "sharded-reduce", "3-chunks"),
    "interleaved-exact": layout_of("PP2-interleaved", "quota", "exact", *GATHER),
    "stages-exact": layout_of("PP2", "3-microbatches", "flexmoe", "exact", "whole-reduce", "recompute-full"),
    "replicas-exact": layout_of(*REPLICAS, "top2", "exact", *GATHER, "recompute-moe", "3-chunks"),
    "interleaved-two-scales": layout_of("PP2-interleaved", "top2", "two-scales", *GATHER),
    "replicas-two-scales": layout_of(*REPLICAS, "flexmoe", "two-scales", *GATHER, "recompute-full", "3-chunks"),
    "replicas-exact-paired": layout_of("2-replicas", "quota", "exact", *GATHER, "3-chunks", "paired"),
    "replicas-two-scales-paired": layout_of("2-replicas", "top2", "two-scales", *GATHER, "recompute-full", "paired"),
    "interleaved-exact-paired": layout_of("PP2-interleaved", "quota", "exact", *GATHER, "recompute-moe", "paired"),
    "8-ranks-shards-exact": layout_of(*REPLICAS, "ETP2", "quota", "exact", *GATHER),
    "8-ranks-shards": layout_of(*REPLICAS, "ETP2", "top2", "blockwise", *GATHER),
}
"""Layouts with each policy, and with everything that affects the order of collectives. They share few references."""

FEWEST = ("replicas-gather-transfer", "interleaved-exact")
"""Layouts of `QUICK` that are trained without `--slow`."""


@functools.cache
def array() -> tuple[list[Layout], list[Pair]]:
    """Return `covering` of all possible layouts, beginning with `QUICK`."""
    return covering(CHOICES, is_possible, QUICK.values())


def name_of(layout: Layout, table: Choices = CHOICES) -> str:
    """Return the choices that are not the first of their dimension."""
    return ",".join(choice for dimension, choice in layout.items() if choice != table[dimension][0])


if __name__ == "__main__":
    layouts, pairs = array()
    print("\n".join(map(name_of, layouts)))
    print(f"{len(layouts)} layouts in which {len(pairs)} pairs of choices meet")
