"""Builds runs that train in turns: on an emulated cluster (testbed.py, emulated.py), or on this machine as it is.

On an emulated cluster, messages are real, and attention and experts sleep like a device with one FLOP rate. The
planners' profile describes exactly that device and network. The models of all runs are in the same processes.
"""

import functools
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
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
"""Flags of the models on emulated devices; these models leave little real computation."""

MESSAGE_SECONDS = 0.3e-3
"""Seconds of an empty message over gloo."""


@dataclass(frozen=True)
class Cluster:
    """The machine on which the runs train: nodes, links and devices."""

    nodes: int = 2
    ranks_per_node: int = 2
    link_mbit: float | None = 200.0
    """Mbit/s of each node's link, in each direction; None: one node, which is this machine."""
    gflops: float | None = None
    """1e9 operations per second of each emulated device; None: the ranks compute."""
    bus_mbit: float | None = None
    """Mbit/s within each node; None: not limited."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def flags(self) -> str:
        """Flags of a run in which all ranks share the experts."""
        return f"--expert-model-parallel-size {self.world_size} --moe-comm-node-size {self.ranks_per_node}"

    def __str__(self) -> str:
        if self.link_mbit is None:
            return f"{self.world_size} ranks on this machine"
        bus = "" if self.bus_mbit is None else f", {self.bus_mbit:g} inside nodes"
        device = "" if self.gflops is None else f", {self.gflops:g} GFLOP/s, EMULATED"
        return f"{self.nodes}x{self.ranks_per_node}, links of {self.link_mbit:g} Mbit/s{bus}{device}"


class Variant(NamedTuple):
    """One of the runs that take turns."""

    flags: str
    change: "Callable[[Run], None] | None" = None
    """Change that is applied to the built run."""


def device_of(config: "RunConfig", gflops: float) -> EmulatedDevice:
    """Return a device with one FLOP rate: T_FNEC follows from the experts' throughput, as the planner assumes."""
    from megatron_balance.profile.flops import attention_flops, mlp_flops

    transformer = config.transformer
    length = config.model.seq_length
    samples = config.train.micro_batch_size
    assert length is not None and samples is not None and transformer.moe_ffn_hidden_size is not None
    expert = mlp_flops(transformer, transformer.moe_ffn_hidden_size) / transformer.expert_tensor_parallel_size
    attention = samples * length * attention_flops(transformer, length)
    return EmulatedDevice(expert / (gflops * 1e9), attention / (gflops * 1e9))


def profile_of(device: EmulatedDevice, nodes: int, node_size: int, link_mbit: float) -> ClusterProfile:
    """Return the profile that `tools/profile_cluster.py` would measure there; bytes within a node are free.

    A message between nodes has its node's link for itself, or shares it with the messages of the node's other ranks.
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
    bench = GroupBench(
        stopwatch=Stopwatch(world, host, REPEATS),
        groups={everyone: world},
        passes=functools.partial(expert_passes, experts),
        dtype=transformer.params_dtype,
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
) -> "dict[str, Run]":
    """Build every variant's run on this rank, from `common` and its own flags; rank 0 writes the profile.

    Args:
        handling: whether the profile includes CPU times, by `with_handling` of the last variant.
    """
    from megatron_balance.device import cpu, quiet

    quiet.silence_expected_warnings()
    cpu.install()
    import torch.distributed as dist

    from megatron_balance.build.profiles import measure_schedules
    from megatron_balance.cli.arguments import parse_args
    from megatron_balance.cli.checks import Machine
    from megatron_balance.cost.exchange import resized
    from megatron_balance.flow.experts import GroupedExperts
    from megatron_balance.job.layout import build_groups

    machine = Machine.here(dist.get_world_size())
    lines = {name: f"{common} {variant.flags}" for name, variant in variants.items()}
    if cluster.gflops is None:
        return ranks.build(lines, machine)
    assert cluster.link_mbit is not None, "an emulated device needs an emulated network"
    config = parse_args(common.split(), machine).config
    device = device_of(config, cluster.gflops)
    known = profile_of(device, cluster.nodes, cluster.ranks_per_node, cluster.link_mbit)
    if handling:
        (plain,) = ranks.build({"": common}, machine).values()
        emulate(plain.model, device)
        modules = (module for chunk in plain.model for module in chunk.modules())
        measured = next(module for module in modules if isinstance(module, GroupedExperts))
        known = with_handling(known, parse_args([*lines.values()][-1].split(), machine).config, measured)
    hosts = config.transformer.expert_model_parallel_size
    shards = config.transformer.expert_tensor_parallel_size
    known = resized(known, hosts, min(hosts, max(1, cluster.ranks_per_node // shards)))
    if any("--moe-parallel-schedule auto" in line for line in lines.values()):
        known = replace(known, parallel=measure_schedules(config, build_groups(config.transformer, config.train.seed)))
    if dist.get_rank() == 0:
        known.save(profile)
    # The other variants do not read a profile
    readers = ("--balance-policy", "--moe-comm-chunks", "--moe-parallel-schedule auto")
    told = {
        name: f"{line} --balance-profile {profile}"
        for name, line in lines.items()
        if any(reader in line for reader in readers)
    }
    runs = ranks.build(lines | told, machine)
    for name, run in runs.items():
        emulate(run.model, device, log=lambda line: None)
        if (change := variants[name].change) is not None:
            change(run)
    return runs


@contextmanager
def jobs(cluster: Cluster) -> Iterator[Callable[..., list[Any]]]:
    """Set up a cluster for jobs, and print the machine's load averages at the end.

    Yields `job(task, *args, turns=...)`, which calls `task(profile, *args)` on every rank and returns all results.
    `profile` is the path where `build` writes the cluster's profile. `turns`, the number of iterations of all variants,
    determines the time limit.
    """
    multiprocessing.set_forkserver_preload(["torch.distributed"])
    before, *_ = os.getloadavg()
    with (
        tempfile.TemporaryDirectory() as directory,
        Testbed(cluster.nodes, cluster.ranks_per_node, cluster.link_mbit, cluster.bus_mbit) as testbed,
    ):

        def job(task: Callable[..., Any], *args: Any, turns: int) -> list[Any]:
            return testbed.run(task, Path(directory) / "profile.json", *args, timeout=120 + 20.0 * turns)

        yield job
    after, *_ = os.getloadavg()
    print(f"machine: {os.cpu_count()} CPUs, load average {before:.2f} before and {after:.2f} after", flush=True)


def sums_over_layers(report: "StepReport", names: Iterable[str]) -> list[float]:
    """Return the sum over layers of each of these fields of the reports; zeros without a policy."""
    return [sum(getattr(layer, name) for layer in report.balance.values()) for name in names]
