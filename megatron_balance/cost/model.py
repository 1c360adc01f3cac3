"""Seconds of one MoE layer under a placement, after Pro-Prophet (Eq. 1-6 and 8).

A microbatch waits for its own slowest rank, in each exchange and in each computation. So times are sums over
microbatches of maxima over ranks. Loads are matrices [D, E] of one microbatch, or [B, D, E] of several.
"""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatron_balance.cost.core import Prices, add_loads, carry, layer_work
from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.cost.loads import by_microbatch, placement_loads
from megatron_balance.cost.network import Network
from megatron_balance.cost.sending import Sending, SendingModel
from megatron_balance.device.compiled import packed
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS, traffic_of
from megatron_balance.profile.cluster_profile import ClusterProfile

Amount = TypeVar("Amount", float, np.ndarray)


def owners(placement: Placement) -> np.ndarray:
    """Return [E] int64: the rank that owns each expert."""
    return np.array(placement.owners, dtype=np.int64)


def balance_ratio(tokens_BD: np.ndarray) -> float:
    """Return FlexMoE's Eq. 6, the tokens [D] or [B, D] of each microbatch's heaviest rank over the mean; without, 1."""
    mean = float(np.sum(np.mean(tokens_BD, axis=-1)))
    return float(np.sum(np.max(tokens_BD, axis=-1))) / mean if mean else 1.0


def variance_ratio(tokens_BD: np.ndarray) -> float:
    """Return FlexMoE's other metric (Section 5.3), scaled like Eq. 6: 1 plus the standard deviation over the mean."""
    mean = float(np.mean(tokens_BD))
    return 1.0 + float(np.std(tokens_BD, axis=-1).mean()) / mean if mean else 1.0


def balance_gain(before_D: np.ndarray, after_D: np.ndarray) -> float:
    """Return Pro-Prophet's RB: standard deviation of ranks' loads before balancing over that after; more is better."""
    before = float(np.std(before_D))
    after = float(np.std(after_D))
    if after == 0:
        return float("inf") if before else 1.0
    return before / after


class LayerTime(NamedTuple):
    """Seconds, numbers or arrays, of an MoE layer in one iteration; `trans` and `agg` are the exposed seconds."""

    all_to_all: Any
    """Seconds of the exchanges, and of their codec; with chunks, those that computation does not hide."""
    forward: Any
    backward: Any
    trans: Any
    agg: Any

    @property
    def total(self) -> Any:
        """Seconds of all parts: Pro-Prophet Eq. 6, or Eq. 8 with overlap."""
        return sum(self)


class Overlap(NamedTuple):
    """Non-expert computation of one microbatch that hides Trans and Agg (Pro-Prophet Section V-C).

    Only one counts: weights are needed from the first one on, and gradients are complete only after the last one.
    """

    forward: float
    """T_FNEC: seconds of the forward pass of non-MoE layers."""
    backward: float
    """T_BNEC: seconds of their backward pass."""
    experts: bool = True
    """Whether the previous block has experts, whose computation hides transfers; False for the first MoE layer."""


@dataclass(frozen=True)
class CostModel:
    """Predicts the seconds of one MoE layer in one iteration from its loads and its placement."""

    profile: ClusterProfile
    _: KW_ONLY
    token_bytes: float
    """Bytes of one token in an exchange, size(input) in Eq. 1: the mean over the four exchanges, with their codecs."""
    param_bytes: float
    """Bytes of one expert's parameters, as Trans sends them."""
    grad_bytes: float
    """Bytes of one expert's gradients, as Agg sends them."""
    state_bytes: float = 0.0
    """Bytes of one expert's parameters and optimizer state on one rank, as Transfer sends them."""
    coding: float = 0.0
    """Seconds in which a codec compresses and decompresses one token: the mean over the four exchanges."""
    split: str = "local_first"
    """A name in SPLITS."""
    microbatches: int = 1
    """Number of microbatches that the loads are for, each with its own latencies; a matrix of the loads may stand for
    several. Trans and Agg happen once per iteration."""
    degrees: tuple[int, ...] = (1,)
    """Numbers of chunks in which tokens may pass through the layer; the number with the shortest time is assumed."""
    overlap: Overlap | None = None
    """Selects Eq. 8; None selects Eq. 6."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"--balance-token-split {self.split}: choose from {', '.join(SPLITS)}")
        if self.microbatches < 1:
            raise ValueError(f"microbatches {self.microbatches}: must be at least 1")

    @cached_property
    def network(self) -> Network:
        """The links of the expert-parallel group."""
        return Network.of(self.profile)

    @cached_property
    def exchange(self) -> ExchangeModel:
        """Seconds of one exchange."""
        return ExchangeModel.of(self.profile)

    def prepare(self) -> None:
        """Compile what predictions need, so that no plan takes seconds for it."""
        for loop in (add_loads, carry, layer_work):
            loop.prepare()
        self.transport.prepare()

    @cached_property
    def transport(self) -> SendingModel:
        """Seconds of Trans and Agg."""
        return SendingModel(self.profile, self.param_bytes, self.grad_bytes, in_parts=self.overlap is not None)

    @cached_property
    def prices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The numbers that compiled loops take: packed Prices, and each rank's rate and seconds of a token, [D]."""
        prices = Prices(
            links=self.network.links(self.token_bytes * self.exchange.scale),
            sending=self.transport.prices,
            local_first=self.split == "local_first",
            coding=float(self.coding),
        )
        return packed(prices), np.array(self.rate_D, dtype=np.float64), self._seconds_per_token / self.rate_D

    @property
    def _seconds_per_token(self) -> float:
        """Seconds in which a rank of average speed computes a token, forward and backward."""
        return self.profile.forward.seconds_per_token + self.profile.backward.seconds_per_token

    @cached_property
    def rate_D(self) -> np.ndarray:
        """[D] relative speed of each rank's computation."""
        return self.profile.rate_D

    def traffic(self, counts: np.ndarray, placement: Placement) -> np.ndarray:
        """Return [B, D, D]: tokens from each source rank to each computing rank in each microbatch."""
        size = self.network.node_size
        return np.stack([traffic_of(self.split, counts_DE, placement, size) for counts_DE in by_microbatch(counts)])

    def layer_seconds(self, counts: np.ndarray, placement: Placement) -> float:
        """Return the seconds of Eq. 6 (or Eq. 8) for loads [D, E] or [B, D, E] of tokens."""
        return float(self.layer_time(counts, placement).total)

    def layer_time(self, counts: np.ndarray, placement: Placement) -> LayerTime:
        """Return `layer_seconds` by part."""
        sending = self.sending(placement)
        return self.time_of(*self.work(counts, placement), sending.trans, sending.agg)

    def loads(self, counts: np.ndarray, placement: Placement) -> np.ndarray:
        """Return [5, B, D]: what each rank computes and exchanges in each microbatch; see `cost/loads.py`."""
        return placement_loads(self.network, self.split, by_microbatch(counts), placement)

    def work(self, counts: np.ndarray, placement: Placement) -> tuple[float, float]:
        """Return the first two arguments of `time_of` for a placement."""
        exchanging, computed = self.work_of(self.loads(counts, placement))
        return float(exchanging), float(computed)

    def work_of(self, loads_XFBD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first two arguments of `time_of` for `expert_loads` of all experts, each [X]."""
        shape = loads_XFBD.shape[:-3]
        loads_XFBD = np.ascontiguousarray(loads_XFBD, np.float64).reshape(-1, *loads_XFBD.shape[-3:])
        exchanging_X, computed_X = layer_work(loads_XFBD, *self.prices)
        return exchanging_X.reshape(shape), computed_X.reshape(shape)

    def time_of(self, exchanging: Amount, computed: Amount, trans: Any, agg: Any) -> LayerTime:
        """Return the layer's time from sums over microbatches; arrays of one shape give arrays of seconds.

        Args:
            exchanging: seconds of one of the layer's four exchanges beyond its latency (Eq. 1). The combine returns the
                rows of the dispatch, and gradients travel the same way back.
            computed: tokens of the rank that computes longest, at the mean rate.
            trans, agg: seconds of Trans and Agg before any are hidden.
        """
        forward = self.forward_seconds(computed)
        backward = self.backward_seconds(computed)
        trans, agg = self.exposed(computed, trans, agg)
        all_to_all = 4 * (self.microbatches * self.exchange.latency + exchanging)
        if self.degrees != (1,):
            all_to_all = self._unhidden(exchanging, forward, self.profile.forward.overhead)
            all_to_all = all_to_all + self._unhidden(exchanging, backward, self.profile.backward.overhead)
        return LayerTime(all_to_all=all_to_all, forward=forward, backward=backward, trans=trans, agg=agg)

    def exposed(self, computed: Any, trans: Any, agg: Any) -> tuple[Any, Any]:
        """Return the seconds of Trans and Agg that no computation hides; arguments as in `time_of`."""
        if self.overlap is None:
            return trans, agg
        experts = self.overlap.experts / self.microbatches
        hiding = experts * self.forward_seconds(computed) + self.overlap.forward
        hiding_too = experts * self.backward_seconds(computed) + self.overlap.backward
        return np.maximum(0.0, trans - hiding), np.maximum(0.0, agg - hiding_too)

    def _unhidden(self, exchanging: Any, computing: Any, overhead: float) -> Any:
        """Return the seconds of dispatch and combine in one direction that computation does not hide.

        Computation starts with the second chunk's dispatch and ends before the last chunk's combine.
        """
        best = np.inf
        for degree in self.degrees:
            calls = self.microbatches * degree
            there_and_back = 2 * (calls * self.exchange.latency + exchanging)
            longer = computing + (calls - self.microbatches) * overhead
            best = np.minimum(best, np.maximum(there_and_back, longer + there_and_back / degree) - computing)
        return best

    def forward_seconds(self, computed: Amount) -> Amount:
        """Return the seconds of Eq. 2 for the rank with the most tokens."""
        line = self.profile.forward
        return self.microbatches * line.overhead + line.seconds_per_token * computed

    def backward_seconds(self, computed: Amount) -> Amount:
        """Return the seconds of Eq. 3, with the measured backward pass instead of twice the forward pass."""
        line = self.profile.backward
        return self.microbatches * line.overhead + line.seconds_per_token * computed

    def sending(self, placement: Placement) -> Sending:
        """Return the routes and pieces of a placement's experts with the fewest seconds, and their seconds."""
        return self.transport.best(placement)

    def transfer_seconds(self, pairs: Iterable[tuple[int, int]]) -> float:
        """Return the busiest rank's seconds to move an expert with optimizer state for each (source, target) pair."""
        sent, received = np.zeros((2, self.profile.num_ranks))
        node_D = self.network.node_D
        for source, target in pairs:
            level = "intra" if node_D[source] == node_D[target] else "inter"
            seconds = self.profile.link("p2p", level).seconds(self.state_bytes)
            sent[source] += seconds
            received[target] += seconds
        return float(max(sent.max(), received.max()))
