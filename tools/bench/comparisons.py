"""The comparisons that iteration_time.py knows by name: models, clusters, and the runs that take turns."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from megatron_balance.workloads.synthetic import WORKLOADS
from slow_runs import MODEL, Cluster, Variant

if TYPE_CHECKING:
    from megatron_balance.training.run import Run


@dataclass(frozen=True)
class Comparison:
    """Runs that take turns, one iteration each, in every case."""

    common: str
    """Flags of all runs."""
    variants: Mapping[str, Variant]
    """The runs; the first is the one that the others are compared with."""
    cases: Mapping[str, str] = field(default_factory=lambda: {"": ""})
    """Additional flags of all runs, by case. A case is a job of its own."""
    cluster: Cluster = field(default_factory=Cluster)
    speeds: tuple[float | None, ...] = (None,)
    """GFLOP/s of the emulated devices, a table each; None: the ranks compute."""
    iterations: int = 20
    warmup: int = 10
    """Iterations before measuring: routing varies, and the allocator must see all sizes of tensors."""
    handling: bool = False
    """Whether the profile includes CPU times of messages, calls and codecs (`slow_runs.with_handling`)."""
    layer_only: bool = False
    """Whether attention and the reduction of gradients are left out, as in Parm's Table IV."""


def variants(flags: Mapping[str, str]) -> dict[str, Variant]:
    """Return variants that only flags tell apart."""
    return {name: Variant(line) for name, line in flags.items()}


def planned_in_full(run: "Run") -> None:
    """Let the planner account for Trans and Agg in full (Eq. 6), as if nothing were overlapped."""
    from megatron_balance.cost.model import Overlap

    for state in _balancer(run).layers.values():
        state.manager.cost = replace(state.manager.cost, overlap=Overlap(0.0, 0.0, experts=False))


def wait_at_start(run: "Run") -> None:
    """Move every wait to where its action starts, so that nothing is overlapped."""
    balancer = _balancer(run)
    original = balancer.schedule
    balancer.schedule = lambda microbatches: tuple(
        step._replace(waits=(*step.planning, *step.communication)) for step in original(microbatches)
    )


def _balancer(run: "Run") -> Any:
    assert run.balancer is not None, "a variant without a policy is not changed"
    return run.balancer


# The quick start's model computes for real. scripts/quickstart.sh must have built its corpus
QUICKSTART = "--yaml-cfg configs/quickstart.yaml"

ALLTOALLS = Comparison(
    QUICKSTART,
    variants({name: f"--moe-comm-alltoall {name}" for name in ("flat", "p2p", "1dh", "2dh", "pipe")}),
    cluster=Cluster(link_mbit=400.0),
)

CODECS = Comparison(
    QUICKSTART,
    variants(
        {"none": ""}
        | {name: f"--moe-comm-codec {name}" for name in ("bf16", "fp16", "fp8", "int8", "zfp")}
        | {
            f"{name}, all": f"--moe-comm-codec {name} --moe-comm-codec-directions all"
            for name in ("bf16", "fp16", "fp8", "int8", "zfp")
        }
    ),
    cluster=Cluster(link_mbit=400.0),
)

# A rank's rows are 2 MiB
CHUNKED = (
    f"{MODEL} --num-layers 2 --seq-length 512 --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 256 "
    "--moe-router-force-workload balanced"
)

CHUNKS = Comparison(
    CHUNKED,
    variants(
        {"1 chunk": ""}
        | {
            f"{order}, {chunks}": f"--moe-comm-chunks {chunks} --moe-comm-order {order}"
            for chunks, order in itertools.product((2, 4, 8), ("sequential", "interleaved", "optsche"))
        }
        | {"auto": "--moe-comm-chunks auto"}
    ),
    speeds=(3.0, 6.0, 12.0),
    iterations=7,
    warmup=2,
    handling=True,
)

# A rank's rows are 2 MiB with top-4, 4 MiB with top-8. With pipe, top-4 and two nodes, the network takes a third, half
# and two thirds of an iteration at these speeds
COPIES = Comparison(
    f"{MODEL} --num-layers 2 --seq-length 512 --num-experts 32 --moe-ffn-hidden-size 256 "
    "--moe-router-load-balancing-type none --moe-router-force-load-balancing",
    variants({name: f"--moe-comm-alltoall {name}" for name in ("pipe", "dedup")}),
    cases={f"top-{topk}": f"--moe-router-topk {topk}" for topk in (4, 8)},
    cluster=Cluster(ranks_per_node=4),
    speeds=(2.4, 4.8, 9.6),
    iterations=6,
    warmup=2,
)

# ScheMoE's Table 10: each variant has the flags of those before it
STEPS = {
    "naive": "--moe-comm-alltoall flat",
    "+ codec": "--moe-comm-codec int8 --moe-comm-codec-directions all",
    "+ pipe": "--moe-comm-alltoall pipe",
    "+ scheduling": "--moe-comm-chunks auto",
}
SCHEMOE = replace(
    CHUNKS, variants=variants(dict(zip(STEPS, itertools.accumulate(STEPS.values(), "{} {}".format), strict=True)))
)

# There are two hot experts, so that hot_experts, hot_rank and spread_hot_experts differ. An expert is 0.5 MiB, 21 ms at
# 200 Mbit/s; at 2.5 GFLOP/s attention takes 67 ms forward, experts 54 ms if loads are even
POLICIES = Comparison(
    f"{MODEL} --num-layers 2 --seq-length 256 --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 256",
    variants(
        {"none": "", "even routing": "--moe-router-force-workload balanced"}
        | {
            name: f"--balance-guest-slots 3 --balance-policy {name}"
            for name in ("fastermoe", "pro_prophet", "flexmoe", "quota", "demi", "top2")
        }
        | {
            f"{name}, transfer": f"--balance-guest-slots 3 --balance-policy {name} --balance-ownership transfer"
            for name in ("demi", "flexmoe")
        }
    ),
    cases={name: f"--moe-router-force-workload {name}" for name in WORKLOADS if name != "balanced"},
    speeds=(2.5,),
    iterations=6,
    warmup=3,
)

# An expert is 2 MiB, 84 ms at 200 Mbit/s; at 10 GFLOP/s attention takes 40 ms forward, experts 54 ms if loads are even.
# With fewer guest slots, top3 would equal top2
PRO_PROPHET = "--balance-guest-slots 3 --balance-policy pro_prophet"
OVERLAP = Comparison(
    f"{MODEL} --num-layers 4 --seq-length 512 --num-experts 8 --moe-router-topk 1 --moe-ffn-hidden-size 1024 "
    "--moe-router-force-workload hot_experts",
    {
        "none": Variant(""),
        "top2": Variant("--balance-guest-slots 3 --balance-policy top2"),
        "top3": Variant("--balance-guest-slots 3 --balance-policy top3"),
        "planner": Variant(PRO_PROPHET),
        "planner and scheduler": Variant(f"{PRO_PROPHET} --balance-overlap blockwise", planned_in_full),
        "full": Variant(f"{PRO_PROPHET} --balance-overlap blockwise"),
        "full, waits at once": Variant(f"{PRO_PROPHET} --balance-overlap blockwise", wait_at_start),
    },
    speeds=(10.0,),
)


def layout(mp: int, esp: int, ranks: int) -> str:
    """Return the flags of N_MP x N_ESP ranks, of which all share the experts."""
    return (
        f"--tensor-model-parallel-size {mp} --expert-tensor-parallel-size {esp} "
        f"--expert-model-parallel-size {ranks // esp}"
    )


# Parm's Table III, scaled to this network: one layer, padded to its capacity. B, L, M, H and f are the paper's letters
PADDED = (
    f"{MODEL} --max-position-embeddings 4096 --moe-router-load-balancing-type none "
    "--moe-router-force-workload balanced --moe-pad-expert-input-to-capacity --moe-router-topk 1"
)
SHAPES = {
    f"{mp}x{esp}, B={batch} L={length} M={width} H={inner} f={factor}": (
        f"{layout(mp, esp, 8)} --num-layers 1 --num-experts 8 --micro-batch-size {batch} --seq-length {length} "
        f"--hidden-size {width} --moe-ffn-hidden-size {inner} --moe-expert-capacity-factor {factor}"
    )
    for mp, esp in itertools.product((2, 4), (2, 4))
    for batch, length, width, inner in ((4, 256, 256, 256), (2, 512, 256, 512), (2, 256, 512, 256))
    for factor in (1.2, 2.4)
}
SCHEDULES = Comparison(
    PADDED,
    variants({name: f"--moe-parallel-schedule {name}" for name in ("baseline", "megatron", "s1", "s2", "auto")}),
    cases=SHAPES,
    cluster=Cluster(ranks_per_node=4, bus_mbit=800.0),
    speeds=(6.0,),
    iterations=10,
    warmup=1,
    layer_only=True,
)

# Parm's Table V: GPT-2 with a third of its layers and half of its width
GPT2 = replace(
    SCHEDULES,
    cases={
        "GPT-2": f"{layout(4, 4, 8)} --num-layers 4 --num-experts 2 --micro-batch-size 2 --seq-length 256 "
        "--hidden-size 384 --moe-ffn-hidden-size 1536 --num-attention-heads 12 --moe-expert-capacity-factor 1.2"
    },
    layer_only=False,
)

SMALL = (
    "--num-layers 2 --num-attention-heads 4 --hidden-size 256 --num-experts 8 --moe-token-dispatcher-type alltoall "
    "--lr 1e-3 --train-iters 1000 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-workers 0 "
    "--attention-dropout 0 --hidden-dropout 0"
)
LAYER = Comparison(
    f"{SMALL} --seq-length 128 --micro-batch-size 4 --moe-aux-loss-coeff 1e-2",
    variants({name: f"--moe-layer-impl {name}" for name in ("megatron", "balanced")}),
    cases={"GELU with bias": "", "SwiGLU": "--swiglu --disable-bias-linear --moe-ffn-hidden-size 512"},
    cluster=Cluster(1, 4, None),
)

# Experts compute 2048 tokens per rank, twice, which is most of an iteration
POLICIES_HERE = Comparison(
    f"{SMALL} --moe-ffn-hidden-size 1024 --moe-router-topk 2 --seq-length 256 --micro-batch-size 4",
    variants(
        {"none": "", "none again": "", "even routing": "--moe-router-force-workload balanced"}
        | {
            name: f"--balance-profile auto --balance-guest-slots 3 --balance-policy {name}"
            for name in ("pro_prophet", "fastermoe", "flexmoe", "quota", "top2", "top3")
        }
        | {
            "quota, transfer": "--balance-profile auto --balance-guest-slots 3 --balance-policy quota "
            "--balance-ownership transfer"
        }
    ),
    cases={
        name: f"--moe-router-force-workload {name}" for name in ("balanced", "hot_experts", "hot_rank", "zero_load")
    },
    cluster=Cluster(1, 2, None),
)

COMPARISONS = {
    "alltoalls": ALLTOALLS,
    "codecs": CODECS,
    "chunks": CHUNKS,
    "copies": COPIES,
    "schemoe": SCHEMOE,
    "policies": POLICIES,
    "policies-here": POLICIES_HERE,
    "overlap": OVERLAP,
    "schedules": SCHEDULES,
    "gpt2": GPT2,
    "layer": LAYER,
}
