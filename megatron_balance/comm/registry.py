"""All-to-alls by name."""

from collections.abc import Callable

import torch.distributed as dist

from megatron_balance.comm.alltoall import AllToAll, FlatAllToAll, NodeAllToAll, P2PAllToAll, default_all_to_all
from megatron_balance.comm.auto import AutoAllToAll
from megatron_balance.comm.hierarchical import OneDimensionalAllToAll, TwoDimensionalAllToAll
from megatron_balance.comm.pipelined import PipelinedAllToAll
from megatron_balance.config.flags import named
from megatron_balance.job.groups import NodeGroups
from megatron_balance.profile.cluster_profile import ClusterProfile

ALL_TO_ALLS: dict[str, type[AllToAll]] = {
    "flat": FlatAllToAll,
    "p2p": P2PAllToAll,
    "1dh": OneDimensionalAllToAll,
    "2dh": TwoDimensionalAllToAll,
    "pipe": PipelinedAllToAll,
    "auto": AutoAllToAll,
}


def find_all_to_all(name: str) -> type[AllToAll]:
    """Return the all-to-all class with a name in ALL_TO_ALLS, or `package.module:Class`.

    Raises:
        ValueError: there is no such name, module or class, or it is not an AllToAll.
    """
    flag = f"--moe-comm-alltoall {name}"
    found = named("--moe-comm-alltoall", name, {"default": None, **ALL_TO_ALLS})
    if not (isinstance(found, type) and issubclass(found, AllToAll)):
        raise ValueError(f"{flag}: is not a subclass of megatron_balance.comm.alltoall.AllToAll or NodeAllToAll")
    return found


def load_all_to_all(
    name: str,
    ep_group: dist.ProcessGroup,
    *,
    nodes: Callable[[], NodeGroups],
    profile: Callable[[], ClusterProfile],
    log: Callable[[str], None] | None = None,
) -> AllToAll:
    """Construct the all-to-all of an expert-parallel group; every rank of the job calls this with the same name.

    Subclasses of NodeAllToAll are constructed from `nodes()`, all others from the group.

    Args:
        nodes: creates the node groups on every rank of the job; called only if they are needed.
        profile: returns the profile that `auto` predicts from; called only for `auto`.
        log: called with a line about each choice of `auto`, on the ranks that pass it.

    Raises:
        ValueError: see `find_all_to_all`, or the all-to-all does not support the sizes of the nodes.
    """
    if name == "default" or ep_group.size() == 1:
        return default_all_to_all(ep_group)
    found = find_all_to_all(name)
    if found is AutoAllToAll:
        return AutoAllToAll(nodes(), profile(), log)
    return found(nodes()) if issubclass(found, NodeAllToAll) else found(ep_group)
