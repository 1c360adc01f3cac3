"""The base class of placement policies, and functions that several policies share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.demi.schedule import MiniTaskSchedule


class Policy(ABC):
    """Decides which ranks host which experts of one MoE layer. Ranks plan for each other, so a plan depends only on the
    arguments. A policy outside of this package may keep state: it is asked on every rank, and all ranks must get the
    same result."""

    name: str
    """Value of `--balance-policy`, for a class in a module of `planning/policies`."""
    split: str = "local_first"
    """How hosts share an expert's tokens under `--balance-token-split policy`: a name in `splits.SPLITS`."""
    options: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Arguments of the constructor -> the fields of BalanceConfig that set them."""
    sets_quotas: ClassVar[bool] = False
    """Whether plans have quotas, which only the split `proportional` respects."""
    must_pay: ClassVar[bool] = False
    """Whether owners compute alone while the last plans cost more than they saved (`manager.LastPlan`)."""
    adds_guests: ClassVar[bool] = False
    """Whether the policy implements `guests`, so that `--balance-inner-policy` accepts its name."""
    orders_chunks: ClassVar[bool] = False
    """Whether the policy implements `schedule`, so that `--moe-comm-order` accepts its name."""

    @abstractmethod
    def plan(self, counts: np.ndarray, current: Placement, cost: CostModel) -> Placement:
        """Return the next placement: the same owners and guest slots as `current`, with other hosts.

        Pure and deterministic: ties go to the lower index. It never raises for a legal load.

        Args:
            counts: [B, D, E] int64, the expected loads: tokens that source rank d routes to expert e in microbatch b.
                Similar microbatches may be added up. A matrix [D, E] stands for one microbatch.
            current: the placement in use.
            cost: seconds of the layer under a placement.
        """

    def check(self, owners: Placement) -> None:  # noqa: B027, most policies can plan for any layout
        """Raise a ValueError before the run starts if the policy cannot plan for this layout. `owners` is the placement
        without guests, which gives the guest slots to fill."""

    def guests(
        self, counts_DE: np.ndarray, owner_E: np.ndarray, home_DS: np.ndarray, slots: int, cost: CostModel
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return [M] the expert, the rank and the tokens of each guest that makes a microbatch faster. A forward pass
        waits for the result.

        Args:
            counts_DE: int64, the microbatch's load.
            owner_E, home_DS: int64, the rank of each expert, and the experts of each rank.
            slots: number of guests that a rank can take.
            cost: seconds of the layer.

        Raises:
            NotImplementedError: the policy adds no guests (`adds_guests`).
        """
        raise NotImplementedError

    def schedule(self, tokens_DP: np.ndarray, placement: Placement, cost: CostModel) -> MiniTaskSchedule:
        """Return the order of a layer's mini-tasks under `placement`.

        Args:
            tokens_DP: [D, P] tokens from each source rank to each physical expert of `placement`.

        Raises:
            NotImplementedError: the policy orders no chunks (`orders_chunks`).
        """
        raise NotImplementedError


def owners_host(current: Placement, additions: Iterable[tuple[int, int]] = ()) -> Placement:
    """Return the placement in which owners, as primary hosts, and the added (expert, rank) pairs host the experts. An
    expert that stays a guest keeps its slot."""
    hosts = [[current.owner(expert)] for expert in range(current.num_experts)]
    primary = [ranks[0] for ranks in hosts]
    for expert, rank in additions:
        hosts[expert].append(rank)
    return current.rehost(hosts, primary)


def one_host_each(current: Placement, hosts_E: np.ndarray) -> Placement:
    """Return the placement in which each expert has one host, its primary; guests keep their slots."""
    hosts = hosts_E.tolist()
    return current.rehost([(rank,) for rank in hosts], hosts)
