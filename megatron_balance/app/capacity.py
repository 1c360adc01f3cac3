"""Whether a layout fits a described cluster (configs/clusters): the number of nodes, and the memory of a GPU."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_balance.job.groups import Topology
from megatron_balance.profile.cluster import Cluster, read

GIB = 2**30

TIGHT = 0.1
"""Fraction of a GPU's memory below which what a dry run does not count may not fit into what remains."""

REMEDIES = {
    "parameters": "a larger --pipeline-model-parallel-size, --expert-model-parallel-size or "
    "--tensor-model-parallel-size",
    "gradients": "a larger --pipeline-model-parallel-size or --expert-model-parallel-size, or --grad-reduce-in-bf16",
    "optimizer": "--use-distributed-optimizer, more data-parallel ranks, or a larger --pipeline-model-parallel-size",
    "guests": "a smaller --balance-guest-slots, or --balance-policy none",
    "activations": "--recompute-granularity, a smaller --micro-batch-size, or tensor parallelism with "
    "--sequence-parallel",
}
"""What reduces each use of memory."""

Uses = Mapping[str, int]
"""Bytes of a rank by use, with the keys of `REMEDIES`."""


def read_cluster(flag: str, path: str, topology: Topology) -> Cluster:
    """Read the cluster in the file of a flag, and check that the job has room on its nodes.

    Raises:
        ValueError: the file cannot be read, or the job needs more GPUs than the cluster has; the error names the flag.
    """
    try:
        cluster = read(Path(path))
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from error
    gpus = int(cluster.gpus_per_node.value)
    nodes = cluster.num_nodes
    if topology.node_size > gpus:
        raise ValueError(
            f"{flag} {path}: its nodes have {gpus} GPUs, but this job has {topology.node_size} processes on a node; "
            f"set LOCAL_WORLD_SIZE={gpus}, or give --moe-comm-node-size {gpus}"
        )
    if nodes is not None and topology.num_nodes > nodes:
        raise ValueError(
            f"{flag} {path}: has {nodes:.0f} nodes, but this job has {topology.world_size} processes, "
            f"{topology.node_size} on a node; start at most {nodes * topology.node_size:.0f}"
        )
    return cluster


def verdict(stages: Sequence[Uses], cluster: Cluster, flag: str) -> str:
    """Return a sentence that says how much of a GPU's memory the largest stage leaves.

    Args:
        flag: the flag that named the cluster, and its value.

    Raises:
        ValueError: a stage needs more than a GPU has; the error names the largest use and what reduces it.
    """
    memory = cluster.memory
    if memory is None:
        return f"{flag}: does not give gpus[].memory_gb, so it is unknown whether the job fits"
    number, uses = max(enumerate(stages), key=lambda stage: sum(stage[1].values()))
    needed = sum(uses.values())
    amounts = f"stage {number} needs {needed / GIB:.2f} GiB, and a GPU has {memory / GIB:.2f} ({memory / 1e9:g} GB)"
    if needed > memory:
        most = max(uses, key=lambda use: uses[use])
        raise ValueError(
            f"{flag}: the job does not fit: {amounts}; {uses[most] / GIB:.2f} GiB are {most}, which these reduce: "
            f"{REMEDIES[most]}"
        )
    left = f"{(memory - needed) / GIB:.2f} GiB remain for what is not counted"
    barely = " barely" if memory - needed < TIGHT * memory else ""
    return f"{flag}: the job fits{barely}: {amounts}; {left}"
