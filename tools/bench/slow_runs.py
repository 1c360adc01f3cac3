"""Shared parts of benchmarks that train on a slow network (testbed.py) with an emulated device (emulated.py).

Messages are real; attention and experts sleep like a device with one FLOP rate. The planner's profile is exactly that
device and network. Models of all variants are in the same processes and take turns.
"""

import argparse
import functools
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ranks
from emulated import BACKWARD_RATIO, EmulatedDevice, emulate
from megatron_balance.profile.cluster_profile import (
    LEVELS,
    ClusterProfile,
    CodecTimes,
    Fit,
    Throughput,
    fit,
    from_links,
)
from testbed import Testbed

if TYPE_CHECKING:
    from megatron_balance.config.run_config import RunConfig
    from megatron_balance.flow.experts import GroupedExperts
    from megatron_balance.training.progress import StepReport
    from megatron_balance.training.run import Run

MODEL = (
    "--hidden-size 256 --num-attention-heads 4 --micro-batch-size 1 --moe-router-pre-softmax "
    "--moe-token-dispatcher-type alltoall --position-embedding-type none --normalization RMSNorm "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --optimizer sgd --clip-grad 0 --lr 1e-3 "
    "--train-iters 1000 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 --num-workers 0"
)
"""Common flags of all these models, which leave little real computation."""

MESSAGE_SECONDS = 0.3e-3
"""Seconds of an empty message over gloo."""


@dataclass(frozen=True)
class Cluster:
    """Emulated devices on slow links."""

    nodes: int
    ranks_per_node: int
    link_mbit: float
    """Mbit/s of each node's link, in each direction."""
    gflops: float
    """1e9 operations per second of each device."""
    bus_mbit: float | None = None
    """Mbit/s within each node; None: not limited."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Cluster":
        """Construct the cluster from the options of `add_options`."""
        return cls(args.nodes, args.ranks_per_node, args.link_mbit, args.gflops, args.bus_mbit)

    @property
    def flags(self) -> str:
        """Flags of a run in which all ranks share the experts."""
        experts = f"--expert-model-parallel-size {self.nodes * self.ranks_per_node}"
        return f"{experts} --moe-comm-node-size {self.ranks_per_node}"

    def __str__(self) -> str:
        bus = "" if self.bus_mbit is None else f", {self.bus_mbit:g} inside nodes"
        links = f"links of {self.link_mbit:g} Mbit/s{bus}"
        return f"{self.nodes}x{self.ranks_per_node}, {links}, {self.gflops:g} GFLOP/s, EMULATED"


def add_options(parser: argparse.ArgumentParser, gflops: float) -> None:
    """Add the cluster's options; `gflops` is the default of --gflops."""
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--link-mbit", type=float, default=200.0)
    parser.add_argument("--bus-mbit", type=float, help="Mbit/s within each node; default: the loopback's rate")
    parser.add_argument("--gflops", type=float, default=gflops, help="1e9 operations per second of the emulated device")


class Variant(NamedTuple):
    """One of the runs that take turns."""

    flags: str
    change: "Callable[[Run], None] | None" = None
    """Change that is applied to the built run."""


class Flops(NamedTuple):
    """Floating-point operations of one layer's forward pass."""

    attention: int
    """Operations per token: projections, and scores and values of causal attention."""

    expert: int
    """Operations per row in one expert."""

    @classmethod
    def of(cls, hidden: int, query: int, kv: int, sequence: int, ffn: int, gated: bool) -> "Flops":
        """
        Args:
            hidden: width of the model.
            query: width of all heads' queries.
            kv: width of all groups' keys, and of their values.
            sequence: tokens of a sample; a token attends to half of them on average.
            ffn: an expert's inner width.
            gated: whether the expert has a third matrix.
        """
        projections = 2 * hidden * (query + 2 * kv) + 2 * query * hidden
        return cls(projections + 2 * sequence * query, (6 if gated else 4) * hidden * ffn)


def device_of(config: "RunConfig", gflops: float) -> EmulatedDevice:
    """Return a device with one FLOP rate: T_FNEC follows from the experts' throughput, as the planner assumes."""
    transformer = config.transformer
    length = config.model.seq_length
    samples = config.train.micro_batch_size
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
    expert = flops.expert / transformer.expert_tensor_parallel_size
    return EmulatedDevice(expert / flops_per_second, samples * length * flops.attention / flops_per_second)


def profile_of(device: EmulatedDevice, nodes: int, node_size: int, link_mbit: float) -> ClusterProfile:
    """Return the profile that `tools/profile_cluster.py` would measure there; bytes within a node are free.

    A message between nodes has its node's link for itself, or shares it with those of the node's other ranks.
    """
    message = Fit(MESSAGE_SECONDS, 8 / (link_mbit * 1e6), 0.0, 0.0)
    forward = Throughput(device.expert_seconds_per_token, 0.0, 0.0, 0.0)
    return from_links(
        nodes * node_size,
        node_size,
        message._replace(beta=0.0),
        message,
        shared=message._replace(beta=node_size * message.beta),
        forward=forward,
        backward=forward._replace(seconds_per_token=BACKWARD_RATIO * forward.seconds_per_token),
    )


def with_handling(profile: ClusterProfile, config: "RunConfig", experts: "GroupedExperts") -> ClusterProfile:
    """Add to `profile` the CPU time of a message, of a call of the emulated experts, and of the run's codec.

    Ranks share a few cores, so small chunks cost more here than their bytes and operations suggest. The times are
    measured on all ranks at the same time, as by `tools/profile_cluster.py`. The time per byte is not measured, because
    short messages pass the links' token buckets without delay.
    """
    import torch
    import torch.distributed as dist

    from megatron_balance.comm.codecs import load_codec
    from megatron_balance.measure.measure import COUNTS, REPEATS, experts_speed, throughput
    from megatron_balance.measure.operations import codec_passes, expert_passes
    from megatron_balance.measure.stopwatch import GroupBench, Stopwatch

    transformer = config.transformer
    world = dist.group.WORLD
    host = torch.device("cpu")
    codecs = {}
    if (name := config.comm.moe_comm_codec) != "none":
        rows = {"hidden": transformer.hidden_size, "dtype": transformer.params_dtype, "device": host}
        codecs[name] = functools.partial(codec_passes, load_codec(name), **rows)
    assert config.model.seq_length is not None and config.train.micro_batch_size is not None and world is not None
    load = config.train.micro_batch_size * config.model.seq_length * transformer.moe_router_topk
    tokens = [load // part for part in (16, 8, 4, 2, 1)]
    everyone = tuple(range(profile.num_ranks))
    passes = functools.partial(expert_passes, experts)
    stopwatch = Stopwatch(world, host, REPEATS)
    dtype = transformer.params_dtype
    bench = GroupBench(
        stopwatch=stopwatch,
        groups={everyone: world},
        passes=passes,
        dtype=dtype,
        node_size=profile.node_size,
        codecs=codecs,
    )
    (message,) = bench.seconds("p2p", everyone, [4096])
    batches = fit(COUNTS, bench.seconds("messages", everyone, COUNTS))
    links = {
        collective: {kind: line._replace(alpha=message) for kind, line in lines.items()}
        for collective, lines in profile.links.items()
    }
    links["all_to_all"]["ep"] = profile.link("all_to_all")._replace(alpha=batches.seconds(profile.num_ranks - 1))
    messages = dict.fromkeys(LEVELS, batches)
    _, forward, backward = experts_speed(tokens, *bench.compute(tokens))
    coded = {
        name: CodecTimes(*(throughput(tokens, seconds) for seconds in bench.code(name, tokens))) for name in codecs
    }
    return replace(profile, links=links, messages=messages, forward=forward, backward=backward, codecs=coded)


def build(
    variants: Mapping[str, Variant], common: str, profile: Path, cluster: Cluster, handling: bool = False
) -> "tuple[dict[str, Run], EmulatedDevice]":
    """Build every variant's run on this rank, from `common` and its own flags; rank 0 writes the profile.

    Args:
        handling: whether the profile includes CPU times, by `with_handling` of the last variant.
    """
    from megatron_balance.device import cpu, quiet

    quiet.silence_expected_warnings()
    cpu.install()
    import torch.distributed as dist

    from megatron_balance.cli.arguments import parse_args
    from megatron_balance.cli.checks import Machine
    from megatron_balance.cost.exchange import resized
    from megatron_balance.flow.experts import GroupedExperts

    machine = Machine.here(dist.get_world_size())
    device = device_of(parse_args(common.split(), machine)[0], cluster.gflops)
    known = profile_of(device, cluster.nodes, cluster.ranks_per_node, cluster.link_mbit)
    lines = {name: f"{common} {variant.flags}" for name, variant in variants.items()}
    if handling:
        (plain,) = ranks.build({"": common}, machine).values()
        emulate(plain.model, device)
        modules = (module for chunk in plain.model for module in chunk.modules())
        measured = next(module for module in modules if isinstance(module, GroupedExperts))
        known = with_handling(known, parse_args([*lines.values()][-1].split(), machine)[0], measured)
    if dist.get_rank() == 0:
        experts = parse_args(common.split(), machine)[0].transformer.expert_model_parallel_size
        resized(known, experts, min(experts, cluster.ranks_per_node)).save(profile)
    # The other variants do not read a profile
    told = {
        name: f"{line} --balance-profile {profile}"
        for name, line in lines.items()
        if "--balance-policy" in line or "--moe-comm-chunks" in line
    }
    runs = ranks.build(lines | told, machine)
    for name, run in runs.items():
        emulate(run.model, device)
        if (change := variants[name].change) is not None:
            change(run)
    return runs, device


@contextmanager
def jobs(cluster: Cluster) -> Iterator[Callable[..., list[Any]]]:
    """Set up a cluster for jobs, and print the load of the machine at the end.

    Yields `job(task, *args, turns=...)`, which calls `task(profile, *args)` on every rank and returns all results.
    `profile` is the path where `build` writes the cluster's profile. `turns`, the number of iterations of all variants,
    determines the time limit.
    """
    multiprocessing.set_forkserver_preload(["torch.distributed"])
    with (
        tempfile.TemporaryDirectory() as directory,
        Testbed(cluster.nodes, cluster.ranks_per_node, cluster.link_mbit, cluster.bus_mbit) as testbed,
        ranks.noise() as elsewhere,
    ):
        profile = Path(directory) / "profile.json"

        def job(task: Callable[..., Any], *args: Any, turns: int) -> list[Any]:
            by_rank = testbed.run(_with_cpu_seconds, task, profile, *args, timeout=120 + 20.0 * turns)
            results, cpu_seconds = zip(*by_rank, strict=True)
            elsewhere.extend(cpu_seconds)
            return list(results)

        yield job


def _with_cpu_seconds(task: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    return task(*args), time.process_time()


def sums_over_layers(report: "StepReport", names: Iterable[str]) -> list[float]:
    """Return the sum over layers of each of these fields of the reports; zeros without a policy."""
    return [sum(getattr(layer, name) for layer in report.balance.values()) for name in names]


def slowest(by_rank: Iterable[Sequence[Any]]) -> list[Any]:
    """Combine all ranks' samples of each iteration: `seconds` are the slowest rank's, other fields are equal."""
    return [
        samples[0]._replace(seconds=max(sample.seconds for sample in samples)) for samples in zip(*by_rank, strict=True)
    ]
