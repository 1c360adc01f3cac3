"""The dispatch plan of a layer: how many tokens each source sends to each physical expert, decided before any moves.

A source is a rank that has tokens to send: one per host, or one per shard of a host. In shapes, D counts sources, H
hosts (the ranks of an expert-parallel group), M experts with several hosts; K is the largest number of hosts of one.
"""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from megatron_balance.device.compiled import compiled
from megatron_balance.placement.placement import MOST_TOKENS, Placement
from megatron_balance.placement.splits import SPLITS

Split = Literal["local_first", "proportional"]


class Choices(NamedTuple):
    """The experts that tokens chose: logical ones from the router, physical ones (P in place of E) from `reroute`."""

    probs_TE: torch.Tensor
    """[T, E] combine weights."""

    map_TE: torch.Tensor
    """[T, E] bool: the chosen experts."""


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Tokens from every source to every physical expert, for one layer and one forward pass.

    The arguments are those of `make_dispatch_plan`.
    """

    placement: Placement
    counts_DE: torch.Tensor
    split: Split = "local_first"
    node_size: int | None = None

    @functools.cached_property
    def tokens_DP(self) -> torch.Tensor:
        """[D, P] int64 in host memory: rows that source d sends to physical expert p."""
        placement, counts_DE = self.placement, self.counts_DE
        if len(counts_DE) > placement.num_ranks:
            return _among_sources(self._of_hosts(), counts_DE)
        if placement.tables.in_place:
            return counts_DE
        tables, rules = placement.tables, self.rules
        return torch.from_numpy(_planned(np.ascontiguousarray(counts_DE.numpy()), *tables.hosting, *rules))

    @property
    def rules(self) -> tuple[int, int, bool]:
        """Slots of a host, hosts of a node, and whether the split is `local_first`: arguments of compiled loops."""
        ranks = self.placement.num_ranks
        return self.placement.slots_per_rank, self.node_size or ranks, self.split == "local_first"

    def _of_hosts(self) -> "DispatchPlan":
        counts_HE = by_host(self.counts_DE, self.placement.num_ranks)
        return DispatchPlan(self.placement, counts_HE, self.split, self.node_size)

    @functools.cached_property
    def splits_DH(self) -> torch.Tensor:
        """[D, H]: tokens that each source (row) sends to each host (column)."""
        return self.tokens_DP.view(len(self.tokens_DP), self.placement.num_ranks, -1).sum(2)

    def received_DS(self, rank: int) -> torch.Tensor:
        """Return [D, S], the tokens that the host `rank` receives from each source for each of its slots."""
        slots = self.placement.slots_per_rank
        return self.tokens_DP[:, rank * slots : (rank + 1) * slots]

    def tokens_per_slot(self, rank: int) -> torch.Tensor:
        """Return [S], the tokens that each slot of `rank` computes."""
        return self.received_DS(rank).sum(0)


def make_dispatch_plan(
    counts_DE: torch.Tensor, placement: Placement, split: Split = "local_first", node_size: int | None = None
) -> DispatchPlan:
    """Share each source's tokens among the hosts of the experts that they chose.

    The rules below treat all sources on a host as one; the host's plan is then divided among them in their order.

    Args:
        counts_DE: [D, E] int64 in host memory, the load matrix: tokens that source d routed to expert e. The sources of
            host 0 come first, then those of host 1, and so on; each host has the same number of sources.
        placement: hosts of every expert; the same on all ranks, so that all ranks make the same plan.
        split: how many tokens each host of an expert computes. `local_first` (Pro-Prophet, section IV-A): its own, and
            the primary host also those of ranks that are not hosts. `proportional`: in proportion to the placement's
            quotas, or to vExperts (FlexMoE, Algorithm 3). Sources send by locality: see `placement/splits.py`.
        node_size: number of consecutive hosts that share a node; None: all.
    """
    assert counts_DE.ndim == 2, counts_DE.shape
    sources, experts = counts_DE.shape
    assert experts == placement.num_experts and sources % placement.num_ranks == 0 and split in SPLITS
    return DispatchPlan(placement, counts_DE, split, node_size)


def prepare_plans() -> None:
    """Compile what plans need where experts have several hosts, so that no forward pass takes seconds for it."""
    _planned.prepare()


@compiled("int64[:, ::1](int64[:, ::1], int64[::1], int64[::1], int64[::1], int64[::1], int64, int64, boolean)")
def _planned(
    counts_DE: np.ndarray,
    first_E: np.ndarray,
    physical_N: np.ndarray,
    share_N: np.ndarray,
    primary_E: np.ndarray,
    slots: int,
    node_size: int,
    local_first: bool,
) -> np.ndarray:
    """Return `DispatchPlan.tokens_DP`; the arguments are the load, `Tables.hosting` of the placement, and rules."""
    ranks, experts = counts_DE.shape
    sent_MD = sent_to_hosts(counts_DE, first_E, physical_N, share_N, primary_E, slots, node_size, local_first)
    tokens_DP, m = np.zeros((ranks, ranks * slots), dtype=np.int64), 0
    for expert in range(experts):
        begin, end = first_E[expert], first_E[expert + 1]
        if end - begin == 1:
            tokens_DP[:, physical_N[begin]] = counts_DE[:, expert]
            continue
        for n in range(begin, end):
            tokens_DP[:, physical_N[n]] = sent_MD[m]
            m += 1
    return tokens_DP


@compiled(None)
def sent_to_hosts(
    counts_DE: np.ndarray,
    first_E: np.ndarray,
    physical_N: np.ndarray,
    share_N: np.ndarray,
    primary_E: np.ndarray,
    slots: int,
    node_size: int,
    local_first: bool,
) -> np.ndarray:
    """Return [M, D]: tokens that each source sends to each of `physical_N` whose expert has several hosts.

    The arguments are those of `_planned`. Of the tokens that stay on a node, its ranks have parts in proportion to what
    they send or receive; see `splits.within_nodes`.
    """
    ranks, experts = counts_DE.shape
    several = 0
    for expert in range(experts):
        hosts = first_E[expert + 1] - first_E[expert]
        several += hosts if hosts > 1 else 0
    sent_MD = np.zeros((several, ranks), np.int64)
    out_D, in_N = np.empty(ranks, np.int64), np.zeros_like(physical_N)
    left_N, before = np.empty_like(physical_N), 0
    for expert in range(experts):
        begin, end = first_E[expert], first_E[expert + 1]
        if end - begin == 1:
            continue
        total = 0
        for rank in range(ranks):
            out_D[rank] = counts_DE[rank, expert]
            total += out_D[rank]
        hosts = range(begin, end)
        _share(total, out_D, begin, end, physical_N, share_N, primary_E[expert], slots, local_first, in_N, left_N)
        # From the number of an expert's host to its row
        m = before - begin
        before += end - begin
        for n in hosts:
            rank = physical_N[n] // slots
            local = min(out_D[rank], in_N[n])
            sent_MD[m + n, rank] = local
            out_D[rank] -= local
            in_N[n] -= local
        for size in (node_size, ranks):
            for node in range((ranks + size - 1) // size):
                _send_within(node, size, begin, end, physical_N, slots, out_D, in_N, sent_MD[m + begin : m + end])
    return sent_MD


@compiled(None)
def _send_within(
    node: int,
    size: int,
    begin: int,
    end: int,
    physical_N: np.ndarray,
    slots: int,
    out_D: np.ndarray,
    in_N: np.ndarray,
    sent_KD: np.ndarray,
) -> None:
    """Let ranks of a node of this size send each other what they can; take it from what they have, and still need.

    Sources and receivers, in their order, lie along one line of tokens.
    """
    received = 0
    for n in range(begin, end):
        received += in_N[n] if physical_N[n] // slots // size == node else 0
    if received == 0:
        return
    sent = out_D[node * size : (node + 1) * size].sum()
    part, at, received_until = min(sent, received), 0, 0
    rank, sent_until, rank_end = node * size - 1, 0, 0
    for n in range(begin, end):
        if part == 0 or physical_N[n] // slots // size != node:
            continue
        received_until += in_N[n]
        while at < received_until * part // received:
            while rank_end == at:
                rank += 1
                sent_until += out_D[rank]
                rank_end = sent_until * part // sent
            step = min(rank_end, received_until * part // received) - at
            sent_KD[n - begin, rank] += step
            out_D[rank] -= step
            in_N[n] -= step
            at += step


@compiled(None)
def _share(
    total: int,
    counts_D: np.ndarray,
    begin: int,
    end: int,
    physical_N: np.ndarray,
    share_N: np.ndarray,
    primary: int,
    slots: int,
    local_first: bool,
    computed_N: np.ndarray,
    left_N: np.ndarray,
) -> None:
    """Set how many of an expert's tokens each of its hosts, in `physical_N[begin:end]`, computes.

    `proportional` rounds up where the remainders are largest, the first ones among equals; they are left in `left_N`.
    """
    assert total <= MOST_TOKENS, "a product of two counts fits an int64"
    shares, missing, hosts = 0, total, range(begin, end)
    for n in hosts:
        shares += share_N[n]
    for n in hosts:
        computed_N[n] = 0
        if not local_first:
            product = total * share_N[n]
            computed_N[n], left_N[n] = product // max(shares, 1), product % max(shares, 1)
        elif share_N[n]:
            computed_N[n] = counts_D[physical_N[n] // slots]
        missing -= computed_N[n]
    if local_first:
        for n in hosts:
            if physical_N[n] // slots == primary:
                computed_N[n] += missing
        return
    for _ in range(missing):
        most = begin
        for n in hosts:
            if left_N[n] > left_N[most]:
                most = n
        computed_N[most] += 1
        left_N[most] = -1


def by_host(counts_DE: torch.Tensor, hosts: int) -> torch.Tensor:
    """Return [H, E], the load matrix with the sources of each host added up."""
    return counts_DE if len(counts_DE) == hosts else counts_DE.view(hosts, -1, counts_DE.shape[1]).sum(1)


def _among_sources(plan: DispatchPlan, counts_DE: torch.Tensor) -> torch.Tensor:
    """Divide the tokens that a plan lets each host send among the host's sources: [D, P].

    Order a host's tokens for an expert by source, and cut them at the plan's numbers: the first part goes to the first
    physical expert, and so on. A source sends to a physical expert the overlap of its own tokens with that part.
    """
    placement, hosts = plan.placement, plan.placement.num_ranks
    experts_P = torch.from_numpy(placement.tables.expert_P)
    used_P = experts_P >= 0
    same_PP = (experts_P[:, None] == experts_P) & used_P
    ends_HP = plan.tokens_DP @ same_PP.triu().to(torch.int64)
    own_HNP = counts_DE.view(hosts, -1, counts_DE.shape[1])[:, :, experts_P.clamp(min=0)] * used_P
    until_HNP = own_HNP.cumsum(1)
    first_HNP = torch.maximum((ends_HP - plan.tokens_DP).unsqueeze(1), until_HNP - own_HNP)
    last_HNP = torch.minimum(ends_HP.unsqueeze(1), until_HNP)
    return (last_HNP - first_HNP).clamp(min=0).flatten(0, 1)
