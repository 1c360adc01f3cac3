"""One source's part of a dispatch plan, computed on the device from a load that the host does not have.

The result equals `DispatchPlan` with one source per host. In shapes, X counts the experts with several hosts, K
is the maximum number of hosts of an expert, and B is 2: tokens to send and to receive.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megatron_balance.device.host_memory import to_device
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SplitName
from megatron_balance.placement.tables import MOST_TOKENS


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """Arguments of a dispatch plan whose load is on the device; see `DispatchPlan` for the other fields."""

    placement: Placement
    load: Callable[[], torch.Tensor]
    """Returns the load matrix [D, E]; called only if the plan depends on the load."""
    split: SplitName
    node_size: int


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """Tables of a placement on a device."""

    shared_X: torch.Tensor
    """Experts with several hosts."""
    shares_XD: torch.Tensor
    ranks_XK: torch.Tensor
    """Hosts of each of these experts; rows are padded with their last host."""
    is_host_XK: torch.Tensor
    """False for padding."""
    physicals_EK: torch.Tensor
    """See `Tables`."""

    @classmethod
    def of(cls, placement: Placement, device: torch.device) -> "DeviceTables":
        tables = placement.tables
        hosts_E = np.diff(tables.first_E)
        shared_X = np.flatnonzero(hosts_E > 1)
        ranks_XK = tables.physicals_EK[shared_X] // placement.slots_per_rank
        is_host_XK = np.arange(ranks_XK.shape[1]) < hosts_E[shared_X, None]
        arrays = shared_X, tables.shares_ED[shared_X], ranks_XK, is_host_XK, tables.physicals_EK
        return cls(*(to_device(torch.from_numpy(array), device) for array in arrays))


def tokens_until(counts_DE: torch.Tensor, tables: DeviceTables, source: int, node_size: int) -> torch.Tensor:
    """Return [E, K]: how many of the source's tokens for an expert go to its first k + 1 hosts. Experts with one host
    get MOST_TOKENS."""
    counts_XD = counts_DE[:, tables.shared_X].T
    quotas_XD = _largest_remainder(counts_XD.sum(1), tables.shares_XD)
    local_XD = torch.minimum(counts_XD, quotas_XD)
    moved_BXD = torch.stack([counts_XD, quotas_XD]) - local_XD
    near_BXD = _within_nodes(moved_BXD, node_size)
    tokens_XK = local_XD[:, source, None] * ((tables.ranks_XK == source) & tables.is_host_XK)
    for out_XD, in_XD in (near_BXD, moved_BXD - near_BXD):
        tokens_XK = tokens_XK + _paired(out_XD, in_XD.gather(1, tables.ranks_XK) * tables.is_host_XK, source)
    until_EK = counts_DE.new_full(tables.physicals_EK.shape, MOST_TOKENS)
    return until_EK.index_copy_(0, tables.shared_X, tokens_XK.cumsum(1))


def _largest_remainder(amount_X: torch.Tensor, weight_XD: torch.Tensor) -> torch.Tensor:
    total = weight_XD.sum(1, keepdim=True).clamp(min=1)
    product_XD = amount_X[:, None] * weight_XD
    part_XD = product_XD // total
    order_XD = (part_XD * total - product_XD).argsort(dim=1, stable=True)
    return part_XD + (order_XD.argsort(1) < amount_X[:, None] - part_XD.sum(1, keepdim=True))


def _within_nodes(moved_BXD: torch.Tensor, node_size: int) -> torch.Tensor:
    ranks = moved_BXD.shape[-1]
    if node_size >= ranks:
        return moved_BXD
    node_D = torch.arange(ranks, device=moved_BXD.device) // node_size
    total_BXN = moved_BXD.new_zeros(*moved_BXD.shape[:2], -(-ranks // node_size)).index_add_(2, node_D, moved_BXD)
    part_XD = total_BXN.amin(0)[:, node_D]
    total_BXD = total_BXN.clamp(min=1)[..., node_D]
    until_BXD = moved_BXD.cumsum(2) - (total_BXN.cumsum(2) - total_BXN)[..., node_D]
    return until_BXD * part_XD // total_BXD - (until_BXD - moved_BXD) * part_XD // total_BXD


def _paired(out_XD: torch.Tensor, in_XK: torch.Tensor, source: int) -> torch.Tensor:
    """Return the source's tokens for each host: sources and hosts are matched in order along one line of tokens."""
    own = out_XD[:, source, None]
    out_end = out_XD[:, : source + 1].sum(1, keepdim=True)
    in_end_XK = in_XK.cumsum(1)
    first_XK = torch.maximum(out_end - own, in_end_XK - in_XK)
    return (torch.minimum(out_end, in_end_XK) - first_XK).clamp(min=0)
