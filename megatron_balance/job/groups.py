"""Create process groups, and determine which ranks share a node."""

import contextlib
import datetime
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

Result = TypeVar("Result")

BACKSTOP_SECONDS = 6.0
"""Time by which the backend's timeout exceeds `--distributed-timeout-minutes`, for the hang guard to act first."""


@dataclass(frozen=True)
class Topology:
    """Assignment of ranks to nodes: rank r is on node r // node_size."""

    world_size: int
    node_size: int

    def node_of(self, rank: int) -> int:
        return rank // self.node_size

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.node_size)


def expert_node_size(topology: Topology, expert_parallel: int, expert_tensor_parallel: int) -> int:
    """Return the number of ranks of an expert-parallel group on each node: the group's rank i is on its node i // size.

    Raises:
        ValueError: the nodes divide the groups into unequal parts.
    """
    # megatron-core numbers expert-tensor-parallel ranks first and expert-parallel ranks next
    block = expert_parallel * expert_tensor_parallel
    size = 0
    for first in (rank for rank in range(topology.world_size) if rank % block < expert_tensor_parallel):
        ranks = range(first, first - first % block + block, expert_tensor_parallel)
        shares = [len(list(run)) for _, run in itertools.groupby(ranks, topology.node_of)]
        size = size or shares[0]
        if any(share != size for share in shares[:-1]) or shares[-1] > size:
            raise ValueError(
                f"--moe-comm-node-size {topology.node_size} (default: the launcher's processes per node): nodes divide "
                f"the expert-parallel group of ranks {[*ranks]} unevenly; choose a multiple or a divisor of {block}"
            )
    return size


def sequence_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Return which of a sequence's 2 * ranks equal chunks a context-parallel rank holds, in its order.

    A token attends to all earlier tokens, so a chunk from either end gives all ranks the same work. Transformer Engine
    expects this order.
    """
    return rank, 2 * ranks - 1 - rank


@contextlib.contextmanager
def imagined_job(rank: int, world_size: int) -> Iterator[None]:
    """Inside the block, act as one rank of a job whose other ranks do not exist.

    Collectives return at once with meaningless data. The functions below assume equal values on all ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_imagined() -> bool:
    """Return whether the job's other ranks do not exist."""
    return dist.get_backend() == "fake"


def gather(value: Result) -> list[Result]:
    """Return every rank's value, by rank. Collective. Ranks that do not exist contribute this rank's value."""
    values = [value] * dist.get_world_size()
    if not is_imagined():
        dist.all_gather_object(values, value)
    return values


def backend_minutes(timeout_minutes: float) -> float:
    """Return the backend's timeout for collectives, in minutes."""
    return timeout_minutes + BACKSTOP_SECONDS / 60


def new_group(members: Sequence[int], timeout_minutes: float | None, name: str) -> dist.ProcessGroup | None:
    """Create a group of these ranks. Every rank of the job calls it with the members of its own group; a rank without a
    group passes none, and gets None.

    All ranks create all groups in the same order. (`use_local_synchronization` would involve only members. But it names
    a group after the number of groups that a rank is in, which differs between pipeline stages.)

    Args:
        timeout_minutes: `--distributed-timeout-minutes`; None: the backend's default.
        name: for people.
    """
    timeout = None if timeout_minutes is None else datetime.timedelta(minutes=backend_minutes(timeout_minutes))
    own = tuple(members)
    created = {
        ranks: dist.new_group(list(ranks), timeout=timeout, group_desc=name) for ranks in sorted({*gather(own)} - {()})
    }
    return cast(dist.ProcessGroup | None, created.get(own))


def new_twin(group: dist.ProcessGroup, timeout_minutes: float | None = None) -> dist.ProcessGroup:
    """Create a second group of the same ranks, whose operations have their own order; called like `new_group`."""
    twin = new_group(dist.get_process_group_ranks(group), timeout_minutes, f"{group.group_desc}_TWIN")
    assert twin is not None
    return twin


@dataclass(frozen=True)
class NodeGroups:
    """An expert-parallel group and its subgroups within and across nodes.

    Rank r of the group has the local rank r % node_size on node r // node_size. The last node may be smaller.
    """

    ep: dist.ProcessGroup
    node_size: int

    intra: dist.ProcessGroup | None
    """The ranks on this rank's node; None if this rank is alone."""
    inter: dist.ProcessGroup | None
    """The ranks with this rank's local rank on all nodes; None if this rank is the only one."""

    @property
    def node(self) -> int:
        return self.ep.rank() // self.node_size

    @property
    def local(self) -> int:
        return self.ep.rank() % self.node_size


def new_node_groups(ep_group: dist.ProcessGroup, node_size: int, timeout_minutes: float | None = None) -> NodeGroups:
    """Create the groups within and across nodes of `node_size` expert-parallel ranks; called like `new_group`."""
    ranks = dist.get_process_group_ranks(ep_group)
    node, local = divmod(ep_group.rank(), node_size)

    def part(members: list[int]) -> dist.ProcessGroup | None:
        if len(members) == len(ranks):
            return ep_group
        return new_group(members if len(members) > 1 else (), timeout_minutes, f"{ep_group.group_desc}_PART")

    within = part(ranks[node * node_size : (node + 1) * node_size])
    return NodeGroups(ep_group, node_size, within, part(ranks[local::node_size]))


def on_first_rank(action: Callable[[], Result]) -> Result:
    """Call `action` on the job's rank 0 only; return its result, or raise its error, on every rank."""
    if is_imagined():
        return action()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # every rank raises it below
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
