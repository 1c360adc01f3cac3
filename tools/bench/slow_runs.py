"""Training on a slow network (testbed.py) with an emulated device (emulated.py): what benches of iterations share.

Messages are real; attention and experts compute by sleeping, on a device of one FLOP rate. The planner is given exactly
that device and network as its profile. Models of all variants live in the same processes and take turns.
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
from testbed import Testbed

from megatron_balance.profile.cluster_profile import COLLECTIVES, GROUPS, ClusterProfile, CodecTimes, Fit, Throughput

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
"""What all these models have in common: little that is really computed."""

MESSAGE_SECONDS = 0.3e-3
"""What a message of no bytes takes over gloo."""


@dataclass(frozen=True)
class Cluster:
    """Emulated devices on slow links."""

    nodes: int
    ranks_per_node: int
    link_mbit: float
    """Mbit/s of each node, either way."""
    gflops: float
    """1e9 operations per second of each device."""
    bus_mbit: float | None = None
    """Mbit/s inside each node; None: bytes there are free."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Cluster":
        """As given by the options of `add_options`."""
        return cls(args.nodes, args.ranks_per_node, args.link_mbit, args.gflops, args.bus_mbit)

    @property
    def flags(self) -> str:
        """Of a run in which all ranks share the experts."""
        experts = f"--expert-model-parallel-size {self.nodes * self.ranks_per_node}"
        return f"{experts} --moe-comm-node-size {self.ranks_per_node}"

    def __str__(self) -> str:
        bus = "" if self.bus_mbit is None else f", {self.bus_mbit:g} inside nodes"
        links = f"links of {self.link_mbit:g} Mbit/s{bus}"
        return f"{self.nodes}x{self.ranks_per_node}, {links}, {self.gflops:g} GFLOP/s, EMULATED"


def add_options(parser: argparse.ArgumentParser, gflops: float) -> None:
    """The cluster's options; `gflops` is the default."""
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--link-mbit", type=float, default=200.0)
    parser.add_argument("--bus-mbit", type=float, help="Mbit/s inside each node; default: as much as the loopback")
    parser.add_argument("--gflops", type=float, default=gflops, help="1e9 operations per second of the emulated device")


class Variant(NamedTuple):
    """One of the runs that take turns."""

    flags: str
    change: "Callable[[Run], None] | None" = None
    """Made to the run once it is built."""


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
    expert = flops.expert / transformer.expert_tensor_parallel_size
    return EmulatedDevice(expert / flops_per_second, samples * length * flops.attention / flops_per_second)


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


def with_handling(profile: ClusterProfile, config: "RunConfig", experts: "GroupedExperts") -> ClusterProfile:
    """`profile`, and what a message, a call of the emulated experts and the run's codec take of the host's CPU.

    Ranks share a few cores, so small chunks cost more here than their bytes and operations say. Measured on all ranks
    at once, as `tools/profile_cluster.py` does. What a byte takes stays: short messages that are measured one by one
    find the links' token buckets full.
    """
    import torch
    import torch.distributed as dist

    from megatron_balance.comm.codecs import load_codec
    from megatron_balance.measure.measure import REPEATS, throughput
    from megatron_balance.measure.probes import codec_passes, expert_passes
    from megatron_balance.measure.stopwatch import GroupBench, Stopwatch

    transformer, world, host = config.transformer, dist.group.WORLD, torch.device("cpu")
    codecs = {}
    if (name := config.comm.moe_comm_codec) != "none":
        rows = {"hidden": transformer.hidden_size, "dtype": transformer.params_dtype, "device": host}
        codecs[name] = functools.partial(codec_passes, load_codec(name), **rows)
    assert config.model.seq_length is not None and config.train.micro_batch_size is not None and world is not None
    load = config.train.micro_batch_size * config.model.seq_length * transformer.moe_router_topk
    tokens, everyone = [load // part for part in (16, 8, 4, 2, 1)], tuple(range(profile.num_ranks))
    passes = functools.partial(expert_passes, experts)
    stopwatch, dtype = Stopwatch(world, host, REPEATS), transformer.params_dtype
    bench = GroupBench(stopwatch=stopwatch, groups={everyone: world}, passes=passes, dtype=dtype, codecs=codecs)
    (message,) = bench.communicate("p2p", everyone, [4096])
    links = {
        collective: {kind: line._replace(alpha=message) for kind, line in lines.items()}
        for collective, lines in profile.links.items()
    }
    forward, backward = (throughput(tokens, seconds) for seconds in bench.compute(tokens))
    coded = {
        name: CodecTimes(*(throughput(tokens, seconds) for seconds in bench.code(name, tokens))) for name in codecs
    }
    return replace(profile, links=links, forward=forward, backward=backward, codecs=coded)


def build(
    variants: Mapping[str, Variant], common: str, profile: Path, cluster: Cluster, handling: bool = False
) -> "tuple[dict[str, Run], EmulatedDevice]":
    """Every variant's run on this rank, `common` flags first. Rank 0 writes the profile that is read.

    Args:
        handling: whether the profile knows what CPUs take, `with_handling` of the last variant.
    """
    from megatron_balance.device import cpu, quiet

    quiet.silence_expected_warnings()
    cpu.install()
    import torch.distributed as dist

    from megatron_balance.cli.arguments import parse_args
    from megatron_balance.cli.checks import Machine
    from megatron_balance.flow.experts import GroupedExperts

    machine = Machine.here(dist.get_world_size())
    device = device_of(parse_args(common.split(), machine)[0], cluster.gflops)
    known = profile_of(device, cluster.nodes, cluster.ranks_per_node, cluster.link_mbit)
    lines = {name: f"{common} {variant.flags}" for name, variant in variants.items()}
    if handling:
        (plain,) = ranks.build({"": common}, machine).values()
        emulate(plain.model, device)
        modules = (module for chunk in plain.model for module in chunk.modules())
        experts = next(module for module in modules if isinstance(module, GroupedExperts))
        known = with_handling(known, parse_args([*lines.values()][-1].split(), machine)[0], experts)
    if dist.get_rank() == 0:
        known.save(profile)
    # Others have nobody to read it
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
    """A place to run jobs; prints in the end how calm the machine was.

    Yields `job(task, *args, turns=...)`, which calls `task(profile, *args)` on every rank and returns what each one
    returned. `profile` is where `build` is to write the cluster's profile. `turns`, the iterations of all variants,
    says how long to wait.
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
    """Of each of these fields of the layers' reports; zeros without a policy."""
    return [sum(getattr(layer, name) for layer in report.balance.values()) for name in names]


def slowest(by_rank: Iterable[Sequence[Any]]) -> list[Any]:
    """One sample of each iteration, from all ranks': `seconds` are the slowest rank's, the rest is the same on all."""
    return [
        samples[0]._replace(seconds=max(sample.seconds for sample in samples)) for samples in zip(*by_rank, strict=True)
    ]
