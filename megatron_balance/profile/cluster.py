"""Clusters as papers and data sheets describe them (configs/clusters/*.yaml), and the profiles derived from them.

Every number has a source. tools/bench/measured_cluster.py writes files with a GPU's measured rates.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from megatron_balance.files.reading import number_in, read_yaml
from megatron_balance.messages import cleaned
from megatron_balance.profile.cluster_profile import LAUNCHING, ClusterProfile, Fit, Throughput, builtin, from_links
from megatron_balance.profile.kernel_times import Beside, Kernels, Passes, expert_passes, weights_passes
from megatron_balance.profile.parsing import parse


@dataclass(frozen=True)
class SourcedNumber:
    """A number and its source."""

    value: float
    source: str


NONE = SourcedNumber(0.0, "not given")
ONE = SourcedNumber(1.0, "not given")


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Rates and times that kernels of training reach on a GPU; see profile/kernel_times.py."""

    half_products: SourcedNumber
    """Fraction of `half_tflops` that large products reach."""
    fp8_products: SourcedNumber | None = None
    """Fraction of `fp8_tflops` that large products reach."""
    fp8_casts: SourcedNumber = NONE
    """See `Kernels.casts`."""
    half_width: SourcedNumber
    start_us: SourcedNumber
    backward: SourcedNumber
    uneven: SourcedNumber = NONE
    """See `Kernels.uneven`."""
    attention_forward_tflops: SourcedNumber
    attention_backward_tflops: SourcedNumber
    attention_half_keys: SourcedNumber = NONE
    """See `Kernels.half_keys`."""
    memory: SourcedNumber
    """Fraction of `memory_gb_per_second`."""
    launch_us: SourcedNumber
    host_us: SourcedNumber
    exchange_share: SourcedNumber
    """Fraction of the multiprocessors that an exchange takes."""
    exchange_beside: SourcedNumber = NONE
    """See `Beside.exchange`."""
    computation_beside: SourcedNumber | None = None
    """See `Beside.computation`; default: what the multiprocessors imply that are left."""


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
    fp8_tflops: SourcedNumber | None = None
    """Dense matrix products of 8-bit numbers, accumulated in 32 bits."""
    reached: Reached | None = None
    """None: products run at the rates above, and other kernels take no time."""


@dataclass(frozen=True)
class Link:
    """A link between GPUs. Within a node: one GPU's share; between nodes: one adapter."""

    name: str
    gb_per_second: SourcedNumber
    """10^9 bytes per second in each direction."""
    latency_us: SourcedNumber | None = None
    adapters: SourcedNumber = ONE
    """Number of network adapters per node."""
    flex_gb_per_second: SourcedNumber | None = None
    """Rate that the flex dispatcher reaches; default: `gb_per_second`."""
    flex_one_node_gb_per_second: SourcedNumber | None = None
    """Its rate if all ranks of a group are on one node; default: `flex_gb_per_second`."""
    flex_latency_us: SourcedNumber | None = None
    """Its latency; default: that of a message."""


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
    error: SourcedNumber | None = None
    """Median error of the iteration times that were predicted for published runs on this cluster."""

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


BACKWARD_ATTENTION = 2.5
"""Products of attention's backward pass over those of its forward pass: it repeats one and has four others."""

RANGES = {
    "nodes": (1, 10**6),  # the largest machines have tens of thousands of nodes (top500.org)
    "gpus_per_node": (1, 10**4),
    "adapters": (1, 10**4),
    # 1 kB/s to 100 TB/s; NVLink 5.0 has 900 GB/s in each direction
    **dict.fromkeys(("gb_per_second", "flex_gb_per_second", "flex_one_node_gb_per_second"), (1e-6, 1e5)),
    # The time light takes for 30 cm, to 10 s
    **dict.fromkeys(("latency_us", "flex_latency_us", "start_us", "launch_us", "host_us"), (1e-3, 1e7)),
    **dict.fromkeys(("memory_gb", "memory_gb_per_second"), (1e-3, 1e6)),
    # A million to 10^18 operations per second
    **dict.fromkeys(("fp32_tflops", "half_tflops", "fp8_tflops"), (1e-6, 1e6)),
    **dict.fromkeys(("attention_forward_tflops", "attention_backward_tflops"), (1e-6, 1e6)),
    **dict.fromkeys(("half_products", "fp8_products", "memory"), (1e-3, 1)),
    "exchange_share": (0, 0.9),
    **dict.fromkeys(("exchange_beside", "computation_beside"), (0, 10)),
    "error": (0, 10),
    "fp8_casts": (1, 1e4),
    **dict.fromkeys(("half_width", "attention_half_keys"), (0, 1e5)),
    "uneven": (0, 10),
    "backward": (0.1, 10),
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


def load_profile(
    path: Path, ranks: Ranks, hidden: int, ffn: int, dtype_bytes: int = 2, experts: int = 1
) -> ClusterProfile:
    """Return the profile of the cluster in a file, for `--balance-profile`; see `read` and `profile_of`."""
    try:
        cluster = read(path)
    except ValueError as error:
        raise ValueError(f"--balance-profile {error}") from error
    try:
        return profile_of(cluster, ranks, hidden, ffn, dtype_bytes, experts)
    except ValueError as error:
        raise ValueError(f"--balance-profile {path}: {error}") from error


def profile_of(
    cluster: Cluster, ranks: Ranks, hidden: int, ffn: int, dtype_bytes: int = 2, experts: int = 1
) -> ClusterProfile:
    """Return the profile of a job on this cluster; `builtin` gives numbers missing in the file, mostly latencies.

    A job takes the first nodes, in the order of the file. Without numbers of nodes, all nodes have the slowest GPU. If
    the file does not say what kernels reach, a backward pass takes as long as two forward passes (Pro-Prophet Eq. 3). A
    node's adapters are shared by the messages of all expert-parallel groups that leave the node; a message uses at most
    one adapter.

    Args:
        hidden, ffn: width of the model, and half of the weights of a rank's part of one expert, per hidden channel.
        dtype_bytes: size of the numbers that experts compute with.
        experts: number of a rank's experts.

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
    passes = Passes(per_token, 2 * per_token)
    overheads = Passes(base.forward.overhead, base.backward.overhead)
    kernels = _kernels(cluster, mean, dtype_bytes)
    if kernels is not None:
        passes = expert_passes(kernels, hidden, ffn)
        overheads = weights_passes(kernels, experts, 2 * hidden * ffn, products=2)
    throughputs = [Throughput(*line, 0.0, 0.0) for line in zip(passes, overheads, strict=True)]
    flex = None
    if cluster.node.flex_gb_per_second is not None:
        node = cluster.node
        if nodes == 1 and node.flex_one_node_gb_per_second is not None:
            node = replace(node, flex_gb_per_second=node.flex_one_node_gb_per_second)
        flex = {"intra": _flex_line(node, near), "inter": _flex_line(cluster.network or node, far)}
    return from_links(
        ranks.num_ranks,
        ranks.node_size,
        near,
        far,
        shared=shared,
        forward=throughputs[0],
        backward=throughputs[1],
        host=LAUNCHING,
        rates=() if len(set(tflops_D)) == 1 else tuple(tflops / mean for tflops in tflops_D),
        flex=flex,
        kernels=kernels,
    )


def _flex_line(link: Link, line: Fit) -> Fit:
    """Return the line of the flex dispatcher over a link with this line."""
    alpha = line.alpha if link.flex_latency_us is None else link.flex_latency_us.value * 1e-6
    slower = 1.0 if link.flex_gb_per_second is None else link.gb_per_second.value / link.flex_gb_per_second.value
    return Fit(alpha, slower * line.beta, 0.0, 0.0)


def _kernels(cluster: Cluster, tflops: float, dtype_bytes: int) -> Kernels | None:
    """Return the speed of the slowest GPU's kernels; None if any GPU's is not given."""
    kinds = [gpu.reached for gpu in cluster.gpus if gpu.reached is not None]
    bandwidth = cluster.memory_bandwidth
    if len(kinds) < len(cluster.gpus) or bandwidth is None:
        return None
    found = kinds[0]
    share = found.half_products if dtype_bytes > 1 else found.fp8_products
    if share is None:
        raise ValueError("gpus[].reached.fp8_products: is missing, but experts compute with 8 bits")
    occupied = found.exchange_share.value / (1 - found.exchange_share.value)
    return Kernels(
        product=Passes(1.0, found.backward.value).times(1e-12 / (tflops * share.value)),
        half_width=found.half_width.value,
        start=1e-6 * found.start_us.value,
        uneven=found.uneven.value,
        attention=Passes(
            1e-12 / found.attention_forward_tflops.value,
            BACKWARD_ATTENTION * 1e-12 / found.attention_backward_tflops.value,
        ),
        half_keys=found.attention_half_keys.value,
        memory=bandwidth * found.memory.value,
        launch=1e-6 * found.launch_us.value,
        host=1e-6 * found.host_us.value,
        occupied=occupied,
        beside=Beside(
            found.exchange_beside.value,
            occupied if found.computation_beside is None else found.computation_beside.value,
        ),
        casts=found.fp8_casts.value if dtype_bytes == 1 else 0.0,
    )


def _line(link: Link, alpha: float, senders: float = 1) -> Fit:
    """Return the alpha-beta line of a link whose adapters are shared by `senders`; each sender uses one adapter."""
    latency = alpha if link.latency_us is None else link.latency_us.value * 1e-6
    sharers = max(1.0, senders / link.adapters.value)
    return Fit(latency, sharers / (link.gb_per_second.value * 1e9), 0.0, 0.0)


def _tflops(cluster: Cluster, ranks: Ranks, dtype_bytes: int) -> list[float]:
    name = {1: "fp8_tflops", 2: "half_tflops"}.get(dtype_bytes, "fp32_tflops")
    rates = cluster.of_gpus(name)
    if not rates:
        missing = [getattr(gpu, name) for gpu in cluster.gpus].index(None)
        raise ValueError(f"gpus[{missing}].{name}: is missing, but experts compute with {8 * dtype_bytes} bits")
    counts = cluster.of_gpus("nodes")
    if not counts:
        return [min(rates)] * ranks.num_ranks
    by_node = np.repeat(rates, [int(count) for count in counts]).tolist()
    return [by_node[rank // ranks.node_size] for rank in range(ranks.num_ranks)]
