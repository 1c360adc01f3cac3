"""The dispatch plan of a layer: how many tokens each source sends to each physical expert.

A source is a rank that has tokens to send: one per host, or one per shard of a host. In shapes, D counts sources, W
hosts (ranks of an expert-parallel group), N pairs of an expert and one of its hosts, K hosts of one expert, and G
groups of consecutive ranks.
"""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from megatron_balance.device.compiled import compiled
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS, HostRules, room_of, send

Split = Literal["local_first", "proportional"]


class Choices(NamedTuple):
    """Experts chosen by tokens: logical experts from the router, physical experts (P instead of E) from `reroute`."""

    probs_TE: torch.Tensor
    """Combine weights."""
    map_TE: torch.Tensor
    """bool: the chosen experts."""


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """A dispatch plan, given by the arguments of `make_dispatch_plan`."""

    placement: Placement
    counts_DE: torch.Tensor
    split: Split = "local_first"
    node_size: int | None = None

    @functools.cached_property
    def tokens_DP(self) -> torch.Tensor:
        """[D, P] int64 in host memory: rows that source d sends to physical expert p."""
        tables = self.placement.tables
        if tables.in_place:
            return self.counts_DE
        counts_DE = np.ascontiguousarray(self.counts_DE.numpy())
        counts_WE = np.ascontiguousarray(by_host(self.counts_DE, self.placement.num_ranks).numpy())
        return torch.from_numpy(
            plan_loop(counts_DE, counts_WE, *tables.hosting, *self.rules, tables.physical_N, tables.slots_per_rank)
        )

    @property
    def rules(self) -> tuple[int, bool]:
        """Arguments of compiled loops: hosts per node, and whether the split is `local_first`."""
        return self.node_size or self.placement.num_ranks, self.split == "local_first"

    @property
    def splits_DW(self) -> torch.Tensor:
        """[D, W]: tokens that each source sends to each host."""
        return torch.from_numpy(sums_by_host(self.tokens_DP.numpy(), self.placement.num_ranks))


def make_dispatch_plan(
    counts_DE: torch.Tensor, placement: Placement, split: Split = "local_first", node_size: int | None = None
) -> DispatchPlan:
    """Distribute each source's tokens over the hosts of the experts that the tokens chose.

    The rules below treat all sources of a host as one. The host's plan is then divided among its sources in order.

    Args:
        counts_DE: [D, E] int64 in host memory, the load matrix: tokens that source d routed to expert e. Sources are
            ordered by host; each host has the same number of sources.
        placement: hosts of every expert; the same on all ranks.
        split: how many tokens each host of an expert computes. `local_first` (Pro-Prophet, section IV-A): a host
            computes its own tokens; the primary host also computes the tokens of ranks that are not hosts.
            `proportional`: tokens are shared in proportion to the placement's quotas, or to vExperts (FlexMoE,
            Algorithm 3). See also `placement/splits.py`.
        node_size: number of consecutive hosts that share a node; None: all hosts share one.
    """
    assert counts_DE.ndim == 2, counts_DE.shape
    sources, experts = counts_DE.shape
    assert experts == placement.num_experts and sources % placement.num_ranks == 0 and split in SPLITS
    return DispatchPlan(placement, counts_DE, split, node_size)


def by_host(counts_DE: torch.Tensor, hosts: int) -> torch.Tensor:
    """Return [W, E]: the load matrix summed over each host's sources."""
    return counts_DE if len(counts_DE) == hosts else counts_DE.view(hosts, -1, counts_DE.shape[1]).sum(1)


def sums_by_host(tokens: np.ndarray, hosts: int) -> np.ndarray:
    """Sum tokens over each host's physical experts: [..., P] -> [..., W]."""
    # Several times faster than a sum over a short last dimension
    slots = tokens.shape[-1] // hosts
    first, *others = (tokens[..., slot::slots] for slot in range(slots))
    return functools.reduce(np.add, others, first)


@compiled(
    "int64[:, ::1](int64[:, ::1], int64[:, ::1], int64[::1], int64[::1], int64[::1], int64[::1], int64, boolean, "
    "int64[::1], int64)"
)
def plan_loop(
    counts_DE: np.ndarray,
    counts_WE: np.ndarray,
    first_E: np.ndarray,
    host_N: np.ndarray,
    share_N: np.ndarray,
    primary_E: np.ndarray,
    node_size: int,
    local_first: bool,
    physical_N: np.ndarray,
    slots: int,
) -> np.ndarray:
    """Return `DispatchPlan.tokens_DP`, given the loads of sources and hosts, and the fields of `HostRules`."""
    rules = HostRules(first_E, host_N, share_N, primary_E, node_size, local_first)
    sources, experts = counts_DE.shape
    hosts = len(counts_WE)
    tokens_DP = np.zeros((sources, hosts * slots), dtype=np.int64)
    alone_E = np.full(experts, -1)
    group_W = np.arange(hosts)
    room = room_of(first_E, hosts)
    for expert in range(experts):
        begin = first_E[expert]
        end = first_E[expert + 1]
        if end - begin == 1:
            alone_E[expert] = physical_N[begin]
            continue
        sent_KW = send(expert, counts_WE, counts_WE, group_W, rules, room)
        _among_sources(counts_DE, expert, sent_KW, physical_N[begin:end], tokens_DP)
    for source in range(sources):
        for expert in range(experts):
            if alone_E[expert] >= 0:
                tokens_DP[source, alone_E[expert]] = counts_DE[source, expert]
    return tokens_DP


@compiled(None)
def _among_sources(
    counts_DE: np.ndarray, expert: int, sent_KW: np.ndarray, physical_K: np.ndarray, tokens_DP: np.ndarray
) -> None:
    """Divide the tokens of each host for an expert's physical experts among the host's sources, in order."""
    hosts = sent_KW.shape[1]
    each = len(counts_DE) // hosts
    for host in range(hosts):
        source = host * each
        left = counts_DE[source, expert]
        for k in range(len(physical_K)):
            missing = sent_KW[k, host]
            while missing > 0:
                while left == 0:
                    source += 1
                    left = counts_DE[source, expert]
                step = min(left, missing)
                tokens_DP[source, physical_K[k]] += step
                left -= step
                missing -= step
