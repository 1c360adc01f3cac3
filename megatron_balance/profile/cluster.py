"""Clusters as data, configs/clusters/*.yaml: what papers and data sheets say, and the profile that follows from it.

Every number stands beside its source, and what no source says is left out. Nothing here measures: rates are those of
data sheets, which a run does not reach.
"""

import dataclasses
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron_balance.files.reading import number_in, read_yaml, shown
from megatron_balance.messages import cleaned
from megatron_balance.profile.cluster_profile import COLLECTIVES, ClusterProfile, Fit, Throughput, builtin


@dataclass(frozen=True)
class Number:
    """A number and where it is from."""

    value: float
    source: str


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, and the nodes that have it."""

    name: str
    nodes: Number | None = None
    memory_gb: Number | None = None
    fp32_tflops: Number | None = None
    half_tflops: Number | None = None
    """Dense products of 16-bit numbers, added up in 32 bits."""


@dataclass(frozen=True)
class Link:
    """What GPUs send over; one GPU's share of it inside a node, one adapter between nodes."""

    name: str
    gb_per_second: Number
    """10^9 bytes in each direction."""
    latency_us: Number | None = None
    adapters: Number | None = None
    """Of a node's network; one if left out."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of as many GPUs each."""

    name: str
    gpus_per_node: Number
    gpus: tuple[Gpu, ...]
    node: Link
    """Between any two GPUs of a node."""
    pair: Link | None = None
    """Between the first and the second GPU of a node, the third and the fourth, ..."""
    network: Link | None = None
    """Between nodes."""

    @property
    def num_nodes(self) -> float | None:
        """None: as many as you like."""
        counts = [gpu.nodes.value for gpu in self.gpus if gpu.nodes is not None]
        return sum(counts) if len(counts) == len(self.gpus) else None


class Ranks(NamedTuple):
    """Where a job's ranks are."""

    num_ranks: int
    """D: expert-parallel size."""
    node_size: int
    """Expert-parallel ranks of one group on one node."""
    ranks_per_node: int
    """All ranks on one node."""
    expert_tensor_parallel: int = 1
    """Ranks next to each other that have shards of the same experts."""


WHOLE = {"nodes": 10**6, "gpus_per_node": 10**4, "adapters": 10**4}
"""Counts, from 1 to so many: the largest machines have tens of thousands of nodes (top500.org)."""

RANGES = {
    "gb_per_second": (1e-6, 1e5),  # 1 kB/s to 100 TB/s; NVLink 5.0 has 900 GB/s in each direction
    "latency_us": (1e-3, 1e7),  # what light takes for 30 cm, to 10 s
    "memory_gb": (1e-3, 1e6),
    "fp32_tflops": (1e-6, 1e6),  # a million to 10^18 operations per second
    "half_tflops": (1e-6, 1e6),
}
"""What a number can be, far beyond what there is: outside is a slip of units or of the keyboard."""


def read(path: Path) -> Cluster:
    """The cluster in a YAML file.

    Raises:
        ValueError: a file that cannot be read, or a field that is missing, unknown or no number with its source.
    """
    root = read_yaml(path)
    try:
        return _parse(Cluster, _plain(root), "")
    except ValueError as error:
        raise ValueError(f"{path}: {cleaned(error, 300)}") from error


def _plain(node: yaml.Node | None) -> Any:
    """What a YAML document holds; ValueError where a mapping has a key twice."""
    if isinstance(node, yaml.MappingNode):
        content: dict[Any, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"line {key.start_mark.line + 1}: a key is not a name")
            if key.value in content:
                raise ValueError(f"line {key.start_mark.line + 1}: {key.value}: is there twice; keep one of them")
            content[key.value] = _plain(value)
        return content
    if isinstance(node, yaml.SequenceNode):
        return [_plain(entry) for entry in node.value]
    return None if node is None else yaml.SafeLoader("").construct_object(node)


def _parse(wanted: Any, content: Any, where: str) -> Any:
    """`content` as a value of type `wanted`: a string, one of the dataclasses above, a tuple of them, or None."""
    if isinstance(wanted, types.UnionType):
        wanted = next(choice for choice in typing.get_args(wanted) if choice is not type(None))
    if typing.get_origin(wanted) is tuple:
        if not isinstance(content, list) or not content:
            raise ValueError(f"{where}: write a list with at least one entry")
        return tuple(_parse(typing.get_args(wanted)[0], entry, f"{where}[{i}]") for i, entry in enumerate(content))
    if wanted is str:
        if not isinstance(content, str) or not content:
            raise ValueError(f"{where}: {shown(content)} is not a text; write one")
        return content
    if wanted is float:
        name = where.split(".")[-2]
        low, high = (1, WHOLE[name]) if name in WHOLE else RANGES[name]
        return number_in(content, low, high, where, whole=name in WHOLE)
    if not isinstance(content, dict):
        fields = ", ".join(field.name for field in dataclasses.fields(wanted))
        raise ValueError(f"{where or 'the file'}: write a mapping of {fields}")
    hints, known = typing.get_type_hints(wanted), {field.name: field for field in dataclasses.fields(wanted)}
    dotted = f"{where}." if where else ""
    for name in content:
        if name not in known:
            raise ValueError(f"{dotted}{name}: is unknown; choose from {', '.join(known)}")
    for name, field in known.items():
        if field.default is dataclasses.MISSING and name not in content:
            raise ValueError(f"{dotted}{name}: is missing")
    return wanted(**{name: _parse(hints[name], value, f"{dotted}{name}") for name, value in content.items()})


def load_profile(path: Path, ranks: Ranks, hidden: int, ffn: int, dtype_bytes: int = 2) -> ClusterProfile:
    """`profile_of` the cluster in a file, for `--balance-profile`.

    Raises:
        ValueError: as of `read` and of `profile_of`.
    """
    try:
        cluster = read(path)
    except ValueError as error:
        raise ValueError(f"--balance-profile {error}") from error
    try:
        return profile_of(cluster, ranks, hidden, ffn, dtype_bytes)
    except ValueError as error:
        raise ValueError(f"--balance-profile {path}: {error}") from error


def profile_of(cluster: Cluster, ranks: Ranks, hidden: int, ffn: int, dtype_bytes: int = 2) -> ClusterProfile:
    """The profile of a job on this cluster; what the file does not say, latencies above all, is as `builtin` has it.

    - Experts compute at the rate of the slowest kind of GPU; a backward takes two forwards (Pro-Prophet Eq. 3).
    - A rank sends inside its node at the link's rate. A node's adapters serve the messages that leave it, of all
      expert-parallel groups at the same time, and one message has at most one adapter.
    - Of what a rank sends in an all-to-all, (D - node_size) / (D - 1) leaves the node; levels follow each other, as in
      ScheMoE's Eq. 17. All other operations of a group pass each link once, and wait for the slowest of them; an
      all-reduce passes it twice.

    Args:
        hidden, ffn: width of the model, and of a rank's part of one expert, as of `builtin`.
        dtype_bytes: size of the numbers that experts compute with and send.

    Raises:
        ValueError: the job is larger than the cluster, or the file does not say what it takes.
    """
    _check(cluster, ranks)
    base = builtin(ranks.num_ranks, ranks.node_size, hidden, ffn, dtype_bytes)
    near, far = base.link("p2p", "intra"), base.link("p2p", "inter")
    together = ranks.node_size * ranks.expert_tensor_parallel <= 2
    near = _line(cluster.pair if cluster.pair is not None and together else cluster.node, near.alpha)
    shared = far
    if cluster.network is not None:
        groups = ranks.ranks_per_node / ranks.node_size
        far, shared = (_line(cluster.network, far.alpha, senders) for senders in (groups, ranks.ranks_per_node))
    links = {kind: {"intra": near, "inter": far, "ep": near} for kind in COLLECTIVES}
    if ranks.num_ranks > ranks.node_size:
        crossing = (ranks.num_ranks - ranks.node_size) / (ranks.num_ranks - 1)
        for lines in links.values():
            lines["ep"] = far._replace(beta=max(near.beta, far.beta))
        links["all_to_all"]["ep"] = far._replace(beta=(1 - crossing) * near.beta + crossing * shared.beta)
    links["all_reduce"] = {kind: line._replace(beta=2 * line.beta) for kind, line in links["all_reduce"].items()}
    per_token = 4 * hidden * ffn / (1e12 * _tflops(cluster, dtype_bytes))
    return ClusterProfile(
        ranks.num_ranks,
        ranks.node_size,
        links,
        Throughput(per_token, base.forward.overhead, 0.0, 0.0),
        Throughput(2 * per_token, base.backward.overhead, 0.0, 0.0),
    )


def _check(cluster: Cluster, ranks: Ranks) -> None:
    if ranks.ranks_per_node > cluster.gpus_per_node.value:
        raise ValueError(
            f"gpus_per_node: {cluster.gpus_per_node.value}, but this job has {ranks.ranks_per_node} ranks on a node; "
            "say with --moe-comm-node-size how many there would be"
        )
    nodes = -(-ranks.num_ranks // ranks.node_size)
    if nodes > 1 and cluster.network is None:
        raise ValueError(f"network: is missing, but expert-parallel ranks are on {nodes} nodes")
    if cluster.num_nodes is not None and nodes > cluster.num_nodes:
        raise ValueError(f"gpus[].nodes: {cluster.num_nodes} nodes, but expert-parallel ranks are on {nodes}")


def _line(link: Link, alpha: float, senders: float = 1) -> Fit:
    """A link's line where so many senders share its adapters; each of them uses one."""
    latency = alpha if link.latency_us is None else link.latency_us.value * 1e-6
    sharers = max(1.0, senders / (link.adapters.value if link.adapters is not None else 1))
    return Fit(latency, sharers / (link.gb_per_second.value * 1e9), 0.0, 0.0)


def _tflops(cluster: Cluster, dtype_bytes: int) -> float:
    name = "half_tflops" if dtype_bytes <= 2 else "fp32_tflops"
    rates: list[float] = []
    for index, gpu in enumerate(cluster.gpus):
        rate: Number | None = getattr(gpu, name)
        if rate is None:
            raise ValueError(f"gpus[{index}].{name}: is missing, but experts compute with {8 * dtype_bytes} bits")
        rates.append(rate.value)
    return min(rates)
