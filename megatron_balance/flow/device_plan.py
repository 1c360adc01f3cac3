"""The part of a dispatch plan that concerns one source, computed on the device from a load that the host does not know.

It is that of `make_dispatch_plan` for `proportional` and one source per host; see `placement/splits.py` for the rules.
In shapes, M counts the experts with several hosts, and K is the largest number of hosts of one.
"""

from dataclasses import dataclass

import numpy as np
import torch

from megatron_balance.device.host_memory import to_device
from megatron_balance.placement.placement import MOST_TOKENS, Placement


@dataclass(frozen=True, eq=False)
class DeviceTables:
    """What a placement alone determines, on a device."""

    shared_M: torch.Tensor
    """The experts with several hosts."""
    shares_MD: torch.Tensor
    ranks_MK: torch.Tensor
    """Their hosts; each row ends in copies of its last one."""
    is_host_MK: torch.Tensor
    """Whether this is a host, not a copy of one."""
    physicals_EK: torch.Tensor
    """As in `Tables`."""

    @classmethod
    def of(cls, placement: Placement, device: torch.device) -> "DeviceTables":
        tables = placement.tables
        hosts_E = np.diff(tables.first_E)
        shared_M = np.flatnonzero(hosts_E > 1)
        ranks_MK = tables.physicals_EK[shared_M] // placement.slots_per_rank
        is_host_MK = np.arange(ranks_MK.shape[1]) < hosts_E[shared_M, None]
        arrays = shared_M, tables.shares_ED[shared_M], ranks_MK, is_host_MK, tables.physicals_EK
        return cls(*(to_device(torch.from_numpy(array), device) for array in arrays))


def tokens_until(counts_DE: torch.Tensor, tables: DeviceTables, source: int, node_size: int) -> torch.Tensor:
    """Return [E, K]: of the source's tokens for an expert, how many go to its first k + 1 hosts.

    Experts with one host have as many as there can be.
    """
    counts_MD = counts_DE[:, tables.shared_M].T
    quotas_MD = _largest_remainder(counts_MD.sum(1), tables.shares_MD)
    local_MD = torch.minimum(counts_MD, quotas_MD)
    moved_2MD = torch.stack([counts_MD, quotas_MD]) - local_MD
    near_2MD = _within_nodes(moved_2MD, node_size)
    tokens_MK = local_MD[:, source, None] * ((tables.ranks_MK == source) & tables.is_host_MK)
    for out_MD, in_MD in (near_2MD, moved_2MD - near_2MD):
        tokens_MK = tokens_MK + _paired(out_MD, in_MD.gather(1, tables.ranks_MK) * tables.is_host_MK, source)
    until_EK = counts_DE.new_full(tables.physicals_EK.shape, MOST_TOKENS)
    return until_EK.index_copy_(0, tables.shared_M, tokens_MK.cumsum(1))


def _largest_remainder(amount_M: torch.Tensor, weight_MD: torch.Tensor) -> torch.Tensor:
    total_M1 = weight_MD.sum(1, keepdim=True).clamp(min=1)
    product_MD = amount_M[:, None] * weight_MD
    part_MD = product_MD // total_M1
    order_MD = (part_MD * total_M1 - product_MD).argsort(dim=1, stable=True)
    return part_MD + (order_MD.argsort(1) < amount_M[:, None] - part_MD.sum(1, keepdim=True))


def _within_nodes(moved_2MD: torch.Tensor, node_size: int) -> torch.Tensor:
    ranks = moved_2MD.shape[-1]
    if node_size >= ranks:
        return moved_2MD
    node_D = torch.arange(ranks, device=moved_2MD.device) // node_size
    total_2MN = moved_2MD.new_zeros(*moved_2MD.shape[:2], -(-ranks // node_size)).index_add_(2, node_D, moved_2MD)
    part_MD = total_2MN.amin(0)[:, node_D]
    total_2MD = total_2MN.clamp(min=1)[..., node_D]
    until_2MD = moved_2MD.cumsum(2) - (total_2MN.cumsum(2) - total_2MN)[..., node_D]
    return until_2MD * part_MD // total_2MD - (until_2MD - moved_2MD) * part_MD // total_2MD


def _paired(out_MD: torch.Tensor, in_MK: torch.Tensor, source: int) -> torch.Tensor:
    own_M1 = out_MD[:, source, None]
    out_end_M1 = out_MD[:, : source + 1].sum(1, keepdim=True)
    in_end_MK = in_MK.cumsum(1)
    first_MK = torch.maximum(out_end_M1 - own_M1, in_end_MK - in_MK)
    return (torch.minimum(out_end_M1, in_end_MK) - first_MK).clamp(min=0)
