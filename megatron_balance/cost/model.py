"""Seconds of one MoE layer under a placement, after Pro-Prophet (Eq. 1-6 and 8).

Each exchange and each computation of a microbatch waits for its slowest rank, so times are sums over microbatches of
maxima over ranks. Loads are matrices [D, E] of one microbatch, or [B, D, E] of several.
"""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from megatron_balance.cost.core import (
    Prices,
    add_loads,
    add_owners,
    carry,
    few_batches_each,
    layer_work,
    link_times,
    take_turns,
)
from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.cost.flex import FlexModel, Routing
from megatron_balance.cost.layer import LayerLines, Line, charged, computing, layer_parts
from megatron_balance.cost.loads import by_microbatch, placement_loads
from megatron_balance.cost.messages import fastest_sending
from megatron_balance.cost.network import Network
from megatron_balance.cost.sending import Sending, SendingModel
from megatron_balance.device.compiled import packed
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SPLITS, traffic_of
from megatron_balance.profile.cluster_profile import ClusterProfile

Amount = TypeVar("Amount", float, np.ndarray)

SLOWED = 0.05
"""`Overlap.slowed` of a cluster whose profile does not say how much an exchange slows computation down."""


def owners(placement: Placement) -> np.ndarray:
    """Return [E] int64: the rank that owns each expert, as a new array."""
    return placement.owner_E.copy()


def balance_ratio(tokens_BD: np.ndarray) -> float:
    """Return FlexMoE's Eq. 6, heaviest rank over mean, for tokens [D] or [B, D]; 1 without tokens."""
    mean = float(np.sum(np.mean(tokens_BD, axis=-1)))
    return float(np.sum(np.max(tokens_BD, axis=-1))) / mean if mean else 1.0


def variance_ratio(tokens_BD: np.ndarray) -> float:
    """Return FlexMoE's other metric (Section 5.3), scaled like Eq. 6: 1 plus the standard deviation over the mean."""
    mean = float(np.mean(tokens_BD))
    return 1.0 + float(np.std(tokens_BD, axis=-1).mean()) / mean if mean else 1.0


def balance_gain(before_D: np.ndarray, after_D: np.ndarray) -> float:
    """Return Pro-Prophet's RB: standard deviation of ranks' loads before over after balancing; higher is better."""
    before = float(np.std(before_D))
    after = float(np.std(after_D))
    if after == 0:
        return float("inf") if before else 1.0
    return before / after


class LayerTime(NamedTuple):
    """Seconds (numbers or arrays) of an MoE layer in one iteration."""

    all_to_all: Any
    """Seconds of the exchanges with their codec; with chunks, excluding seconds hidden by computation."""
    forward: Any
    backward: Any
    trans: Any
    agg: Any
    """See `CostModel.charged`."""

    @property
    def total(self) -> Any:
        """Seconds of all parts: Pro-Prophet Eq. 6, or Eq. 8 with overlap."""
        return sum(self)


class Overlap(NamedTuple):
    """Non-MoE computation of one microbatch that hides Trans and Agg (Pro-Prophet Section V-C). Only one microbatch
    counts, unless each has its own Trans and Agg: the first one needs the weights, and the last one completes the
    gradients."""

    forward: float
    """T_FNEC: seconds of the forward pass of non-MoE layers."""
    backward: float
    """T_BNEC: seconds of their backward pass."""
    experts: bool = True
    """Whether the previous block has experts whose computation hides transfers; False for the first MoE layer."""
    slowed: float = 0.0
    """Seconds by which a hidden second of Trans or Agg slows computation down (`slowed_by`); 0: Pro-Prophet's Eq. 8."""


def slowed_by(profile: ClusterProfile) -> float:
    """Return `Overlap.slowed` of a cluster."""
    return SLOWED if profile.kernels is None else profile.kernels.occupied


@dataclass(frozen=True)
class CostModel:
    """Predicts the seconds of one MoE layer in one iteration from its loads and its placement."""

    profile: ClusterProfile
    _: KW_ONLY
    token_bytes: float
    """Bytes of one token in an exchange, size(input) in Eq. 1; averaged over the four exchanges, with their codecs."""
    param_bytes: float
    """Bytes of one expert's parameters, as Trans sends them."""
    grad_bytes: float
    """Bytes of one expert's gradients, as Agg sends them."""
    state_bytes: float = 0.0
    """Bytes of one expert's parameters and optimizer state on one rank, as Transfer sends them."""
    coding: float = 0.0
    """Seconds for a codec to compress and decompress one token, averaged over the four exchanges."""
    split: str = "local_first"
    """A name in SPLITS."""
    microbatches: int = 1
    """Number of microbatches in the loads, each with separate latencies; a load matrix may be the sum of several."""
    degrees: tuple[int, ...] = (1,)
    """Candidates for the number of chunks; the fastest one is assumed."""
    overlap: Overlap | None = None
    """Selects Eq. 8; None selects Eq. 6."""
    trans_each: int = 0
    """Number of Trans of each microbatch: 2 if the backward pass needs one of its own, 1 if the weights of the forward
    pass are still there; 0 if all microbatches share one Trans and one Agg."""
    routing: Routing | None = None
    """Selects an exchange that sends a token once to each node; None selects an all-to-all of rows."""
    copied_by: Literal["flex", "dedup"] = "flex"
    """What sends tokens, if `routing` is given: the flex dispatcher, or the all-to-all of that name."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"--balance-token-split {self.split}: choose from {', '.join(SPLITS)}")
        if self.microbatches < 1:
            raise ValueError(f"microbatches {self.microbatches}: must be at least 1")

    @cached_property
    def network(self) -> Network:
        return Network.of(self.profile)

    @cached_property
    def exchange(self) -> ExchangeModel:
        if self.routing is None:
            return ExchangeModel.of(self.profile)
        return FlexModel.of(self.profile, self.routing, self.copied_by)

    def prepare(self) -> None:
        """Compile the loops of predictions now, so that no plan waits for numba."""
        loops = add_loads, add_owners, carry, fastest_sending, few_batches_each, layer_work, link_times, take_turns
        for loop in loops:
            loop.prepare()

    @cached_property
    def transport(self) -> SendingModel:
        return SendingModel(self.profile, self.param_bytes, self.grad_bytes, in_parts=self.sends_ahead)

    @cached_property
    def lines(self) -> LayerLines:
        forward, backward = (
            Line(line.overhead, line.seconds_per_token) for line in (self.profile.forward, self.profile.backward)
        )
        hiding = Overlap(0.0, 0.0, experts=False) if self.overlap is None else self.overlap
        hidden_trans, hidden_agg = hiding[:2]
        if self.trans_each:
            hidden_trans = hidden_agg = self.microbatches * hiding.backward
        return LayerLines(
            microbatches=self.microbatches,
            latency=self.exchange.latency,
            forward=forward,
            backward=backward,
            trans_each=self.trans_each,
            hidden_trans=hidden_trans,
            hidden_agg=hidden_agg,
            experts=hiding.experts / self.microbatches,
            slowed=hiding.slowed,
        )

    @cached_property
    def prices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Arguments of compiled loops: packed Prices, and each rank's speed and seconds per token, [D]."""
        prices = Prices(
            links=self.exchange.links(self.token_bytes),
            sending=self.transport.prices,
            local_first=self.split == "local_first",
            coding=float(self.coding),
            layer=self.lines,
        )
        return packed(prices), np.array(self.rate_D, dtype=np.float64), self.seconds_per_token / self.rate_D

    @property
    def sends_ahead(self) -> bool:
        """Whether Trans begins before the layer's tokens are routed, and overlaps with the computation until then."""
        return self.overlap is not None and not self.trans_each

    @property
    def seconds_per_token(self) -> float:
        """Seconds for a rank of average speed to compute a token, forward and backward."""
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
        """Return the parts of `layer_seconds`."""
        sending = self.sending(placement)
        return self.time_of(*self.work(counts, placement), sending.trans, sending.agg)

    def loads(self, counts: np.ndarray, placement: Placement) -> np.ndarray:
        """Return the loads [5, B, D]; see `cost/loads.py`."""
        return placement_loads(self.network, self.split, by_microbatch(counts), placement)

    def work(self, counts: np.ndarray, placement: Placement) -> tuple[float, float]:
        exchanging, computed = self.work_of(self.loads(counts, placement))
        return float(exchanging), float(computed)

    def work_of(self, loads_XFBD: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first two arguments of `time_of`, [X] each, given loads summed over experts."""
        shape = loads_XFBD.shape[:-3]
        loads_XFBD = np.ascontiguousarray(loads_XFBD, np.float64).reshape(-1, *loads_XFBD.shape[-3:])
        exchanging_X, computed_X = layer_work(loads_XFBD, *self.prices)
        return exchanging_X.reshape(shape), computed_X.reshape(shape)

    def time_of(self, exchanging: Amount, computed: Amount, trans: Any, agg: Any) -> LayerTime:
        """Return the layer's time; arguments as in `layer_parts`, numbers or arrays of one shape."""
        return LayerTime(*layer_parts(exchanging, computed, trans, agg, self.degrees, self.lines))

    def charged(self, computed: Any, trans: Any, agg: Any) -> tuple[Any, Any]:
        """Return the seconds by which Trans and Agg lengthen the layer; arguments as in `time_of`."""
        return charged(computed, trans, agg, self.lines)

    def forward_seconds(self, computed: Amount) -> Amount:
        """Return the seconds of Eq. 2 for the rank with the most tokens."""
        return computing(computed, self.lines.forward, self.microbatches)

    def backward_seconds(self, computed: Amount) -> Amount:
        """Return the seconds of Eq. 3, with the measured backward time instead of twice the forward time."""
        return computing(computed, self.lines.backward, self.microbatches)

    def sending(self, placement: Placement) -> Sending:
        """Return the fastest route and pieces for a placement's experts, and their seconds."""
        return self.transport.best(placement)

    def transfer_seconds(self, pairs: Iterable[tuple[int, int]]) -> float:
        """Return the busiest rank's seconds to move one expert with optimizer state for each (source, target)."""
        sent, received = np.zeros((2, self.profile.num_ranks))
        node_D = self.network.node_D
        for source, target in pairs:
            level = "intra" if node_D[source] == node_D[target] else "inter"
            seconds = self.profile.link("p2p", level).seconds(self.state_bytes)
            sent[source] += seconds
            received[target] += seconds
        return float(max(sent.max(), received.max()))
