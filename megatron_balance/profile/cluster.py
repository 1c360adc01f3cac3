"""Clusters as papers and data sheets describe them (configs/clusters/*.yaml), and the profiles derived from them.

Every number has a source. tools/bench/measured_cluster.py writes files with a GPU's measured rates.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from megatron_balance.files.reading import number_in, read_yaml
from megatron_balance.messages import cleaned
from megatron_balance.profile.cluster_profile import LAUNCHING, ClusterProfile, Fit, Throughput, builtin, from_links
from megatron_balance.profile.parsing import parse


@dataclass(frozen=True)
class SourcedNumber:
    """A number and its source."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU, and the number of nodes that have it."""

    name: str
    nodes: SourcedNumber | None = None
    memory_gb: SourcedNumber | None = None
    """10^9 bytes."""
    memory_gb_per_second: SourcedNumber | None = None
    """10^9 bytes per second that the device reads from and writes to its memory."""
    fp32_tflops: SourcedNumber | None = None
    half_tflops: SourcedNumber | None = None
    """Dense matrix products of 16-bit numbers, accumulated in 32 bits."""


@dataclass(frozen=True)
class Link:
    """A link between GPUs. Within a node: one GPU's share; between nodes: one adapter."""

    name: str
    gb_per_second: SourcedNumber
    """10^9 bytes per second in each direction."""
    latency_us: SourcedNumber | None = None
    adapters: SourcedNumber | None = None
    """Number of network adapters per node; default: 1."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes with equal numbers of GPUs, and the links between them."""

    name: str
    gpus_per_node: SourcedNumber
    gpus: tuple[Gpu, ...]
    node: Link
    """Link between any two GPUs of a node."""
    pair: Link | None = None
    """Link between the first and second GPU of a node, the third and fourth, and so on."""
    network: Link | None = None
    """Link between nodes."""
    measured: Any = None
    """Tables with measured rates and times of a GPU, for people."""

    def __post_init__(self) -> None:
        if not self.gpus:
            raise ValueError("gpus: has no entries; write at least one")

    @property
    def num_nodes(self) -> float | None:
        """Number of nodes; None if unlimited."""
        counts = self.of_gpus("nodes")
        return sum(counts) if counts else None

    @property
    def memory(self) -> float | None:
        """Bytes of the smallest GPU memory; None if any is not given."""
        sizes = self.of_gpus("memory_gb")
        return 1e9 * min(sizes) if sizes else None

    @property
    def memory_bandwidth(self) -> float | None:
        """Bytes per second of the slowest GPU memory; None if any is not given."""
        rates = self.of_gpus("memory_gb_per_second")
        return 1e9 * min(rates) if rates else None

    def of_gpus(self, name: str) -> list[float]:
        """Return a number of all kinds of GPUs; empty if any is not given."""
        numbers: list[SourcedNumber | None] = [getattr(gpu, name) for gpu in self.gpus]
        return [] if None in numbers else [number.value for number in numbers if number is not None]


class Ranks(NamedTuple):
    """Distribution of a job's ranks over nodes."""

    num_ranks: int
    """D, the expert-parallel size."""
    node_size: int
    """Number of ranks of one expert-parallel group on each node."""
    ranks_per_node: int
    """Number of all ranks on each node."""
    expert_tensor_parallel: int = 1
    """Number of consecutive ranks with shards of the same experts."""


RANGES = {
    "nodes": (1, 10**6),  # the largest machines have tens of thousands of nodes (top500.org)
    "gpus_per_node": (1, 10**4),
    "adapters": (1, 10**4),
    "gb_per_second": (1e-6, 1e5),  # 1 kB/s to 100 TB/s; NVLink 5.0 has 900 GB/s in each direction
    "latency_us": (1e-3, 1e7),  # the time light takes for 30 cm, to 10 s
    "memory_gb": (1e-3, 1e6),
    "memory_gb_per_second": (1e-3, 1e6),
    "fp32_tflops": (1e-6, 1e6),  # a million to 10^18 operations per second
    "half_tflops": (1e-6, 1e6),
}
"""Range of each number, far beyond existing hardware: a value outside has a wrong unit or a typing error."""


def is_cluster(path: Path) -> bool:
    """Return whether a file of `--balance-profile` describes a cluster, rather than being a measured profile."""
    return path.suffix in (".yaml", ".yml")


def read(path: Path) -> Cluster:
    """Read the cluster in a YAML file.

    Raises:
        ValueError: the file cannot be read, or a field is missing, unknown, or not a number with its source.
    """
    root = read_yaml(path)
    try:
        return parse(Cluster, _plain(root), _number, may_omit=True)
    except ValueError as error:
        raise ValueError(f"{path}: {cleaned(error, 300)}") from error


def _plain(node: yaml.Node | None) -> Any:
    """Return the content of a YAML document; raise ValueError if a mapping has the same key twice."""
    if isinstance(node, yaml.MappingNode):
        content: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"line {key.start_mark.line + 1}: a key is not a name")
            if key.value in content:
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value}: appears twice; keep one of them")
            content[key.value] = _plain(value)
        return content
    if isinstance(node, yaml.SequenceNode):
        return [_plain(entry) for entry in node.value]
    return None if node is None else yaml.SafeLoader("").construct_object(node)


def _number(value: Any, where: str) -> Any:
    low, high = RANGES[where.split(".")[-2]]
    is_count = low == 1
    return number_in(value, low, high, where, whole=is_count)


def load_profile(path: Path, ranks: Ranks, hidden: int, ffn: int, dtype_bytes: int = 2) -> ClusterProfile:
    """Return the profile of the cluster in a file, for `--balance-profile`; see `read` and `profile_of`."""
    try:
        cluster = read(path)
    except ValueError as error:
        raise ValueError(f"--balance-profile {error}") from error
    try:
        return profile_of(cluster, ranks, hidden, ffn, dtype_bytes)
    except ValueError as error:
        raise ValueError(f"--balance-profile {path}: {error}") from error


def profile_of(cluster: Cluster, ranks: Ranks, hidden: int, ffn: int, dtype_bytes: int = 2) -> ClusterProfile:
    """Return the profile of a job on this cluster; `builtin` gives numbers missing in the file, mostly latencies.

    A job takes the first nodes, in the order of the file. Without numbers of nodes, all nodes have the slowest GPU. A
    backward pass takes as long as two forward passes (Pro-Prophet Eq. 3). A node's adapters are shared by the messages
    of all expert-parallel groups that leave the node; a message uses at most one adapter.

    Args:
        hidden, ffn: width of the model, and inner width of a rank's part of one expert.
        dtype_bytes: size of the numbers that experts compute with and send.

    Raises:
        ValueError: the job is larger than the cluster, or the file lacks a required number.
    """
    nodes = -(-ranks.num_ranks // ranks.node_size)
    if ranks.ranks_per_node > cluster.gpus_per_node.value:
        raise ValueError(
            f"gpus_per_node: {cluster.gpus_per_node.value}, but this job has {ranks.ranks_per_node} ranks on a node; "
            "give the number there would be with --moe-comm-node-size"
        )
    if nodes > 1 and cluster.network is None:
        raise ValueError(f"network: is missing, but expert-parallel ranks are on {nodes} nodes")
    if cluster.num_nodes is not None and nodes > cluster.num_nodes:
        raise ValueError(f"gpus[].nodes: {cluster.num_nodes} nodes, but expert-parallel ranks are on {nodes}")
    base = builtin(ranks.num_ranks, ranks.node_size, hidden, ffn, dtype_bytes)
    near = base.link("p2p", "intra")
    far = base.link("p2p", "inter")
    together = ranks.node_size * ranks.expert_tensor_parallel <= 2
    near = _line(cluster.pair if cluster.pair is not None and together else cluster.node, near.alpha)
    shared = far
    if cluster.network is not None:
        groups = ranks.ranks_per_node / ranks.node_size
        far, shared = (_line(cluster.network, far.alpha, senders) for senders in (groups, ranks.ranks_per_node))
    tflops_D = _tflops(cluster, ranks, dtype_bytes)
    mean = sum(tflops_D) / len(tflops_D)
    per_token = 4 * hidden * ffn / (1e12 * mean)
    return from_links(
        ranks.num_ranks,
        ranks.node_size,
        near,
        far,
        shared=shared,
        forward=Throughput(per_token, base.forward.overhead, 0.0, 0.0),
        backward=Throughput(2 * per_token, base.backward.overhead, 0.0, 0.0),
        host=LAUNCHING,
        rates=() if len(set(tflops_D)) == 1 else tuple(tflops / mean for tflops in tflops_D),
    )


def _line(link: Link, alpha: float, senders: float = 1) -> Fit:
    """Return the alpha-beta line of a link whose adapters are shared by `senders`; each sender uses one adapter."""
    latency = alpha if link.latency_us is None else link.latency_us.value * 1e-6
    sharers = max(1.0, senders / (link.adapters.value if link.adapters is not None else 1))
    return Fit(latency, sharers / (link.gb_per_second.value * 1e9), 0.0, 0.0)


def _tflops(cluster: Cluster, ranks: Ranks, dtype_bytes: int) -> list[float]:
    name = "half_tflops" if dtype_bytes <= 2 else "fp32_tflops"
    rates = cluster.of_gpus(name)
    if not rates:
        missing = [getattr(gpu, name) for gpu in cluster.gpus].index(None)
        raise ValueError(f"gpus[{missing}].{name}: is missing, but experts compute with {8 * dtype_bytes} bits")
    counts = cluster.of_gpus("nodes")
    if not counts:
        return [min(rates)] * ranks.num_ranks
    by_node = np.repeat(rates, [int(count) for count in counts]).tolist()
    return [by_node[rank // ranks.node_size] for rank in range(ranks.num_ranks)]
