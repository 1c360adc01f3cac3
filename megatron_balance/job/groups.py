"""Process groups as values, and which ranks share a node."""

import contextlib
import datetime
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")

Members = tuple[int, ...]
"""Some ranks of an expert-parallel group by their numbers inside it, ascending."""

BACKSTOP_SECONDS = 6.0
"""Collectives time out this much after `--distributed-timeout-minutes`: first the hang guard names the stalled rank."""


@dataclass(frozen=True)
class Topology:
    """Which ranks share a node: rank r lives on node r // node_size."""

    world_size: int
    node_size: int

    def node_of(self, rank: int) -> int:
        return rank // self.node_size

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.node_size)


def expert_node_size(topology: Topology, expert_parallel: int, expert_tensor_parallel: int) -> int:
    """How many ranks of an expert-parallel group share a node.

    The i-th rank of such a group then lives on the group's node i // size. (megatron-core numbers expert tensor
    parallel ranks first and expert-parallel ones next.)

    Raises:
        ValueError: nodes cut the groups into unequal parts.
    """
    block = expert_parallel * expert_tensor_parallel
    firsts = [rank for rank in range(topology.world_size) if rank % block < expert_tensor_parallel]
    size = expert_parallel
    for first in firsts:
        ranks = range(first, first - first % block + block, expert_tensor_parallel)
        shares = [len(list(run)) for _, run in itertools.groupby(ranks, topology.node_of)]
        if first == 0:
            size = shares[0]
        if any(share != size for share in shares[:-1]) or shares[-1] > size:
            raise ValueError(
                f"--moe-comm-node-size {topology.node_size} (default: the launcher's processes per node): nodes cut "
                f"the expert-parallel group of ranks {[*ranks]} unevenly; choose a multiple or a divisor of {block}"
            )
    return size


def world() -> dist.ProcessGroup:
    """Return the default process group: every rank of the job."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@contextlib.contextmanager
def imagined_job(rank: int, world_size: int) -> Iterator[None]:
    """One rank of a job whose other ranks do not exist.

    Groups are made as in a real job. Collectives return at once, and what they bring from other ranks means nothing;
    the functions below answer for those ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def is_imagined() -> bool:
    """Whether the other ranks of the job do not exist."""
    return dist.get_backend() == "fake"


def _from_all(value: object, job: dist.ProcessGroup) -> list[Any]:
    """What every rank of the job gives; those who do not exist give what this one does."""
    values: list[Any] = [value] * job.size()
    if not is_imagined():
        dist.all_gather_object(values, value, group=job)
    return values


def backend_minutes(timeout_minutes: float) -> float:
    """After how long the backend ends a collective."""
    return timeout_minutes + BACKSTOP_SECONDS / 60


def new_twin(
    group: dist.ProcessGroup, job: dist.ProcessGroup, timeout_minutes: float | None = None
) -> dist.ProcessGroup:
    """A group of the same ranks for operations that keep an order of their own; every rank of the job calls it.

    Arguments as of `new_sub_groups`.
    """
    everyone = tuple(range(group.size()))
    return _new_groups(group, job, [everyone], timeout_minutes, "TWIN")[everyone]


def new_group_of_like(
    value: object, job: dist.ProcessGroup, timeout_minutes: float | None = None, name: str | None = None
) -> dist.ProcessGroup:
    """The ranks of the job that call this with an equal value; every rank of the job calls it. `name` is for people."""
    values = _from_all(value, job)
    timeout = None if timeout_minutes is None else datetime.timedelta(minutes=backend_minutes(timeout_minutes))
    own: dist.ProcessGroup | None = None
    for kind in dict.fromkeys(values):
        alike = [rank for rank, other in enumerate(values) if other == kind]
        group = dist.new_group(alike, timeout=timeout, group_desc=name)
        own = group if kind == value else own
    assert own is not None
    return own


def new_sub_groups(
    ep_group: dist.ProcessGroup,
    job: dist.ProcessGroup,
    wanted: Iterable[Members],
    timeout_minutes: float | None = None,
) -> dict[Members, dist.ProcessGroup]:
    """The groups of `wanted` members that this rank belongs to, itself the expert-parallel group.

    Every rank of the job has to call it with the same `wanted`: `new_group` asks all of them to create all groups in
    one order, those of other expert-parallel groups too. Its `use_local_synchronization` would ask members only, but it
    names a group by the number of groups that a rank is in, which pipeline stages do not agree about.

    Args:
        job: the default process group.
        timeout_minutes: `--distributed-timeout-minutes`; None: the backend's own.
    """
    everyone = tuple(range(ep_group.size()))
    shapes = sorted(set(wanted) - {everyone})
    return {everyone: ep_group} | _new_groups(ep_group, job, shapes, timeout_minutes, "PART")


def _new_groups(
    ep_group: dist.ProcessGroup,
    job: dist.ProcessGroup,
    shapes: Iterable[Members],
    timeout_minutes: float | None,
    suffix: str,
) -> dict[Members, dist.ProcessGroup]:
    every = _from_all(dist.get_process_group_ranks(ep_group), job)
    timeout = None if timeout_minutes is None else datetime.timedelta(minutes=backend_minutes(timeout_minutes))
    created: dict[Members, dist.ProcessGroup] = {}
    for ranks in sorted(set(map(tuple, every))):
        for members in shapes:
            chosen = [ranks[member] for member in members]
            group = dist.new_group(chosen, timeout=timeout, group_desc=f"{ep_group.group_desc}_{suffix}")
            if job.rank() in chosen:
                created[members] = group
    return created


@dataclass(frozen=True)
class NodeGroups:
    """An expert-parallel group and the two ways in which nodes divide it.

    Its rank r is number r % node_size on node r // node_size; the last node may be smaller.
    """

    ep: dist.ProcessGroup
    node_size: int

    intra: dist.ProcessGroup | None
    """The ranks of this rank's node; None: it is alone there."""

    inter: dist.ProcessGroup | None
    """The ranks that have this rank's number on their nodes; None: no other node has one."""

    @property
    def node(self) -> int:
        return self.ep.rank() // self.node_size

    @property
    def local(self) -> int:
        return self.ep.rank() % self.node_size


def new_node_groups(
    ep_group: dist.ProcessGroup, job: dist.ProcessGroup, node_size: int, timeout_minutes: float | None = None
) -> NodeGroups:
    """Create the groups that nodes of `node_size` expert-parallel ranks divide `ep_group` into.

    Every rank of the job calls it; arguments as of `new_sub_groups`.
    """
    everyone = tuple(range(ep_group.size()))
    nodes = [everyone[first : first + node_size] for first in everyone[::node_size]]
    counterparts = [everyone[local::node_size] for local in range(node_size)]
    wanted = [members for members in (*nodes, *counterparts) if len(members) > 1]
    created = new_sub_groups(ep_group, job, wanted, timeout_minutes)
    node, local = divmod(ep_group.rank(), node_size)
    return NodeGroups(ep_group, node_size, created.get(nodes[node]), created.get(counterparts[local]))


def on_first_rank(action: Callable[[], Result]) -> Result:
    """Call `action` on the job's rank 0 only; every rank gets its result, or raises its error."""
    if is_imagined():
        return action()
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # whatever it is, all ranks have to know
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
