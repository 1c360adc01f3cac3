"""What balancing costs visibly, with its Plan, Trans and Agg hidden and not, on a slow network (testbed.py).

    python tools/bench/overlap_time.py [--nodes 2] [--ranks-per-node 2] [--link-mbit 200] [--gflops 10]
                                       [--variants NAME ...] [--timeline DIR] [flags of the run ...]

The ablation of Pro-Prophet (Fig. 14 and 15). Attention and experts compute by sleeping (emulated.py) on a device of one
FLOP rate, messages are real, and the planner is given exactly that device and network as its profile. Models of all
variants live in the same processes and take turns, one iteration each. Printed of each, as medians over iterations and
jobs: an iteration's time on the slowest rank; what Plan, Trans and Agg exposed of themselves in it, summed over layers,
mean over ranks; the megabytes that Trans and Agg moved, over all links. Then checks; exit code 1 says that one failed.
"""

import argparse
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ranks
from emulated import BACKWARD_RATIO, EmulatedDevice, emulate
from namespaces import TestbedUnavailable
from overlap_checks import (
    FULL,
    MUTANT,
    NONE,
    PLANNER,
    SCHEDULER,
    Job,
    Outcome,
    Sample,
    checks,
    lines,
    slowest,
    trans_share,
)
from testbed import Testbed

from megatron_balance.placement.cost_model import Overlap
from megatron_balance.profile.cluster_profile import COLLECTIVES, GROUPS, ClusterProfile, Fit, Throughput

if TYPE_CHECKING:
    from megatron_balance.config import RunConfig
    from megatron_balance.training.loop import Run

COMMON = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --micro-batch-size 1 "
    "--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 1024 "
    "--moe-token-dispatcher-type alltoall --moe-router-force-workload hot_experts "
    "--position-embedding-type none --normalization RMSNorm --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --optimizer sgd --clip-grad 0 --lr 1e-3 --train-iters 1000 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-workers 0"
)
"""An expert is 2 MiB, 84 ms at 200 Mbit/s; at 10 GFLOP/s attention lasts 40 ms forward, experts 54 ms where loads are
even. Later flags win."""

BALANCE = "--balance-guest-slots 3 --balance-policy"
"""With fewer guest slots top3 would be top2."""

MESSAGE_SECONDS = 0.3e-3
"""What a message of no bytes takes over gloo."""


def without_eq_8(run: "Run") -> None:
    """Let the planner pay for Trans and Agg in full, as if the scheduler hid nothing."""
    for state in _balancer(run).layers.values():
        state.manager.cost = replace(state.manager.cost, overlap=Overlap(0.0, 0.0, experts=False))


def wait_at_issue(run: "Run") -> None:
    """Move every wait to where its operation is issued, so that nothing can be hidden."""
    from megatron_balance.timeline.lower import wait_at_once

    balancer = _balancer(run)
    original = balancer.schedule
    balancer.schedule = lambda microbatches: wait_at_once(original(microbatches))


def _balancer(run: "Run") -> Any:
    assert run.balancer is not None, "a variant without a policy is not changed"
    return run.balancer


class Variant(NamedTuple):
    flags: str
    change: Callable[["Run"], None] | None = None
    """Made to the run once it is built."""


PRO_PROPHET = f"{BALANCE} pro_prophet"

VARIANTS = {
    NONE: Variant(""),
    "top2": Variant(f"{BALANCE} top2"),
    "top3": Variant(f"{BALANCE} top3"),
    PLANNER: Variant(PRO_PROPHET),
    SCHEDULER: Variant(f"{PRO_PROPHET} --balance-overlap blockwise", without_eq_8),
    FULL: Variant(f"{PRO_PROPHET} --balance-overlap blockwise"),
    MUTANT: Variant(f"{PRO_PROPHET} --balance-overlap blockwise", wait_at_issue),
}


class Flops(NamedTuple):
    """Forward passes of one layer, in floating-point operations."""

    attention: int
    """Of a token: projections, and scores and values of a causal core."""

    expert: int
    """Of a row in one expert."""

    @classmethod
    def of(cls, hidden: int, query: int, kv: int, sequence: int, ffn: int, gated: bool) -> "Flops":
        """
        Args:
            hidden: width of the model.
            query, kv: widths of all heads' queries, and of all groups' keys (or values).
            sequence: tokens of a sample; a causal core looks at half of them.
            ffn: an expert's inner width; `gated` units have a third matrix.
        """
        projections = 2 * hidden * (query + 2 * kv) + 2 * query * hidden
        return cls(projections + 2 * sequence * query, (6 if gated else 4) * hidden * ffn)


def device_of(config: "RunConfig", gflops: float) -> EmulatedDevice:
    """A device of one FLOP rate: T_FNEC follows from the experts' throughput, as the planner estimates it."""
    transformer, length, samples = config.transformer, config.model.seq_length, config.train.micro_batch_size
    assert length is not None and samples is not None and transformer.moe_ffn_hidden_size is not None
    assert transformer.kv_channels is not None and transformer.num_query_groups is not None
    flops = Flops.of(
        hidden=transformer.hidden_size,
        query=transformer.num_attention_heads * transformer.kv_channels,
        kv=transformer.num_query_groups * transformer.kv_channels,
        sequence=length,
        ffn=transformer.moe_ffn_hidden_size,
        gated=transformer.gated_linear_unit,
    )
    flops_per_second = gflops * 1e9
    return EmulatedDevice(flops.expert / flops_per_second, samples * length * flops.attention / flops_per_second)


def profile_of(device: EmulatedDevice, nodes: int, node_size: int, link_mbit: float) -> ClusterProfile:
    """What `tools/profile_cluster.py` would find there: bytes inside a node are free.

    In a round of Trans a rank sends one message, which has the link for itself as in the profile's ring of messages. In
    an all-to-all every rank of a node sends (D - n) of its D - 1 parts through the one link, n ranks of D.
    """
    num_ranks, byte_seconds = nodes * node_size, 8 / (link_mbit * 1e6)
    message = Fit(MESSAGE_SECONDS, byte_seconds, 0.0, 0.0)
    shared = node_size * (num_ranks - node_size) / (num_ranks - 1)
    lines = dict.fromkeys(COLLECTIVES, message) | {"all_to_all": message._replace(beta=shared * byte_seconds)}
    forward = Throughput(device.expert_seconds_per_token, 0.0, 0.0, 0.0)
    backward = forward._replace(seconds_per_token=BACKWARD_RATIO * forward.seconds_per_token)
    links: Mapping[str, Mapping[str, Fit]] = {kind: dict.fromkeys(GROUPS, line) for kind, line in lines.items()}
    return ClusterProfile(num_ranks, node_size, links, forward, backward)


def measure(
    variants: dict[str, Variant], common: str, profile: Path, args: argparse.Namespace
) -> tuple[dict[str, Outcome], float]:
    """Task of every rank; returns its CPU seconds too. Rank 0 writes the profile that the planner reads."""
    from megatron_balance.device import cpu, quiet

    quiet.silence_expected_warnings()
    cpu.install()
    import torch.distributed as dist

    from megatron_balance.arguments import parse_args
    from megatron_balance.checks import Machine
    from megatron_balance.observe.timeline import Timeline

    machine = Machine.here(dist.get_world_size())
    device = device_of(parse_args(common.split(), machine)[0], args.gflops)
    if dist.get_rank() == 0:
        profile_of(device, args.nodes, args.ranks_per_node, args.link_mbit).save(profile)
    told = {name: f"{variant.flags} --balance-profile {profile}" for name, variant in variants.items() if variant.flags}
    runs = ranks.build({name: f"{common} {told.get(name, '')}" for name in variants}, machine)
    for name, run in runs.items():
        emulate(run.model, device)
        if (change := variants[name].change) is not None:
            change(run)
        if args.timeline is not None and run.balancer is not None:
            run.balancer.timeline = Timeline(args.timeline / re.sub(r"[^a-z0-9]+", "-", name), dist.get_rank())
    reports = ranks.take_turns(runs, args.iterations)
    for run in runs.values():
        if run.balancer is not None and run.balancer.timeline is not None:
            run.balancer.timeline.flush()
    assert device.attention_seconds is not None
    outcomes = {
        name: Outcome([Sample.of(report) for report in steps], device.attention_seconds, _estimate(runs[name]))
        for name, steps in reports.items()
    }
    return outcomes, time.process_time()


def _estimate(run: "Run") -> float | None:
    """The planner's T_FNEC."""
    if run.balancer is None:
        return None
    cost = next(iter(run.balancer.layers.values())).manager.cost
    return None if cost.overlap is None else cost.overlap.forward


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--link-mbit", type=float, default=200.0)
    parser.add_argument("--gflops", type=float, default=10.0, help="1e9 operations per second of the emulated device")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--iterations", type=int, default=20, help="measured iterations per variant")
    parser.add_argument("--repeats", type=int, default=3, help="jobs")
    parser.add_argument(
        "--timeline", type=Path, help="directory for timelines as of --balance-timeline, by variant; of the last job"
    )
    args, extra = parser.parse_known_args()
    common = f"{COMMON} {' '.join(extra)} --expert-model-parallel-size {args.nodes * args.ranks_per_node}"
    common += f" --moe-comm-node-size {args.ranks_per_node}"
    multiprocessing.set_forkserver_preload(["torch.distributed"])
    jobs: list[Job] = []
    try:
        with (
            tempfile.TemporaryDirectory() as directory,
            Testbed(args.nodes, args.ranks_per_node, args.link_mbit) as testbed,
            ranks.noise() as elsewhere,
        ):
            profile = Path(directory) / "profile.json"
            variants = {name: VARIANTS[name] for name in args.variants}
            patience = 120 + 20.0 * (args.iterations + ranks.WARMUP) * len(variants)
            for _ in range(args.repeats):
                task = (measure, variants, common, profile, args)
                by_rank, cpu_seconds = zip(*testbed.run(*task, timeout=patience), strict=True)
                elsewhere += cpu_seconds
                jobs.append(slowest(by_rank))
    except TestbedUnavailable as error:
        print(f"overlap_time.py: {error}", file=sys.stderr)
        return 2
    print(
        f"\n{args.nodes}x{args.ranks_per_node}, links of {args.link_mbit:g} Mbit/s, {args.gflops:g} GFLOP/s, EMULATED"
    )
    print("\n".join(lines(jobs)))
    if PLANNER in jobs[0]:
        print(trans_share(jobs))
    found = list(checks(jobs))
    print("\n".join(map(str, found)))
    return 0 if all(check.passed for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
