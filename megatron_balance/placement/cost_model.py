"""Seconds of one MoE layer under a placement, after Pro-Prophet (Eq. 1-6 and 8) and FlexMoE (Eq. 5 and 7-9).

Shape suffixes: D expert-parallel ranks, E logical experts, K experts or ways to place one, N nodes, L lines of
LinkLoads, C numbers of pieces to choose from; DD is [source rank, computing rank].
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatron_balance.placement.placement import EMPTY, Placement
from megatron_balance.placement.splits import SPLITS, traffic_of, vexperts
from megatron_balance.placement.transfers import LinkLoads, TransferPlan, plan_transfers, routes
from megatron_balance.profile.cluster_profile import ClusterProfile

Amount = TypeVar("Amount", float, np.ndarray)

LINKS = ("relay", "direct", "average")
"""How experts reach their guests. relay: along the routes of `plan_transfers`, as it is executed. direct: an owner
sends its experts to every guest itself. average: Pro-Prophet's Eq. 4, as if all links shared the work evenly."""

FANOUTS = (1, 2, 16)
"""Routes to choose from: a chain, a tree of two sends per rank, and one that doubles up to 2**16 ranks."""

MOST_CHUNKS = 64
"""Pieces of an expert: a chain of 64 ranks gains from so many, and each is a call to make."""

LEAST_CHUNKS = 4
"""Pieces of an expert that is large, where its plan is to be executed in two parts."""

LEAST_ALPHA = 1e-6
"""Seconds that no message undercuts, for choosing pieces: a line through noisy times may come out without latency."""


def owners(placement: Placement) -> np.ndarray:
    """[E] int64: the rank that owns each expert."""
    home = np.asarray(placement.home, dtype=np.int64)
    owner_E = np.empty(placement.num_experts, dtype=np.int64)
    owner_E[home.ravel()] = np.repeat(np.arange(placement.num_ranks), home.shape[1])
    return owner_E


def balance_ratio(tokens_D: np.ndarray) -> float:
    """FlexMoE Eq. 6: the heaviest rank over the mean; 1 is perfect balance, and what no tokens at all have."""
    mean = float(np.mean(tokens_D))
    return float(np.max(tokens_D)) / mean if mean else 1.0


def balance_gain(before_D: np.ndarray, after_D: np.ndarray) -> float:
    """Pro-Prophet's RB: standard deviation of the ranks' loads before balancing over that after it; more is better."""
    before, after = float(np.std(before_D)), float(np.std(after_D))
    if after == 0:
        return float("inf") if before else 1.0
    return before / after


class Sending(NamedTuple):
    """How a placement's experts are sent, and what that comes to."""

    fanout: int
    chunks: int
    """As in `plan_transfers`."""
    rounds: float
    """From below; a round sends one piece per link."""


class LayerTime(NamedTuple):
    """Seconds of a MoE layer in one iteration, by part; `trans` and `agg` are what is not hidden.

    Numbers, or arrays where the model was given arrays.
    """

    all_to_all: Any
    forward: Any
    backward: Any
    trans: Any
    agg: Any

    @property
    def total(self) -> Any:
        """Pro-Prophet Eq. 6, or Eq. 8 with overlap."""
        return sum(self)


class ExpertTimes(NamedTuple):
    """What experts add to the ranks in FlexMoE's Eq. 5."""

    tokens_AD: np.ndarray
    """[K, D] tokens that each rank computes."""

    seconds_AD: np.ndarray
    """[K, D] computation, exchanges and synchronisation."""


class Overlap(NamedTuple):
    """What Trans and Agg may hide under besides this layer's expert computation, Pro-Prophet Section V-C.

    Of one microbatch: weights are needed from the first on, and gradients are complete only after the last.
    """

    forward: float
    """T_FNEC: seconds of the non-MoE layers' forward."""

    backward: float
    """T_BNEC: seconds of their backward."""

    experts: bool = True
    """Whether the block before has experts to hide under; what comes before the first MoE layer has none."""


@dataclass(frozen=True)
class CostModel:
    """Seconds of one MoE layer in one iteration as a function of the load matrix and the placement."""

    profile: ClusterProfile
    _: KW_ONLY

    token_bytes: float
    """One token in an exchange, size(input) in Eq. 1."""

    param_bytes: float
    """One expert's parameters, as Trans sends them."""

    grad_bytes: float
    """One expert's gradients, as Agg sends them."""

    state_bytes: float = 0.0
    """One expert's parameters and optimizer state on one rank, as Transfer sends them."""

    split: str = "local_first"
    """A name in SPLITS."""

    links: str = "relay"
    """A name in LINKS."""

    microbatches: int = 1
    """Parts that the iteration's load matrix is computed in: each has its exchanges and computations, hence their
    latencies, while Trans and Agg are once per iteration."""

    overlap: Overlap | None = None
    """Eq. 8 if given, else Eq. 6."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"--balance-token-split {self.split}: choose from {', '.join(SPLITS)}")
        if self.links not in LINKS:
            raise ValueError(f"links {self.links}: choose from {', '.join(LINKS)}")
        if self.microbatches < 1:
            raise ValueError(f"microbatches {self.microbatches}: must be at least 1")

    def traffic(self, counts_DE: np.ndarray, placement: Placement) -> np.ndarray:
        """[D, D]: tokens from each source rank to the rank that computes them."""
        return traffic_of(self.split, counts_DE, placement)

    def layer_seconds(self, counts_DE: np.ndarray, placement: Placement) -> float:
        """Eq. 6 (or Eq. 8) for a load matrix [D, E] of tokens."""
        return float(self.layer_time(counts_DE, placement).total)

    def layer_time(self, counts_DE: np.ndarray, placement: Placement) -> LayerTime:
        """`layer_seconds` by part."""
        traffic_DD = self.traffic(counts_DE, placement)
        local_D = traffic_DD.diagonal()
        received_D, sent_D = traffic_DD.sum(0) - local_D, traffic_DD.sum(1) - local_D
        exchanged = max(received_D.max(), sent_D.max())
        _, chunks, rounds = self.sending(placement)
        trans, agg = self.trans_seconds(rounds, chunks), self.agg_seconds(rounds, chunks)
        return self.time_of(float(exchanged), float(traffic_DD.sum(0).max()), trans, agg)

    def time_of(self, exchanged: Amount, computed: Amount, trans: Any, agg: Any) -> LayerTime:
        """The model's core, on maxima over ranks; arrays of them, of any one shape, give arrays of seconds.

        Args:
            exchanged: tokens that the busiest rank receives from others or sends to them, the larger of both: what an
                all-to-all brings, its way back takes.
            computed: tokens of the rank that computes the most.
            trans, agg: seconds of Trans and Agg with what may be hidden, `trans_seconds` and `agg_seconds`.
        """
        forward, backward = self.forward_seconds(computed), self.backward_seconds(computed)
        if self.overlap is not None:
            experts = self.overlap.experts / self.microbatches
            trans = np.maximum(0.0, trans - experts * forward - self.overlap.forward)
            agg = np.maximum(0.0, agg - experts * backward - self.overlap.backward)
        all_to_all = 4 * self.all_to_all_seconds(exchanged)
        return LayerTime(all_to_all=all_to_all, forward=forward, backward=backward, trans=trans, agg=agg)

    def all_to_all_seconds(self, exchanged: Amount) -> Amount:
        """Eq. 1, plus the latencies that it leaves out: one of the layer's four exchanges, of all microbatches."""
        line = self.profile.link("all_to_all")
        return self.microbatches * line.alpha + line.beta * self.token_bytes * exchanged

    def forward_seconds(self, computed: Amount) -> Amount:
        """Eq. 2 for the rank with the most tokens."""
        line = self.profile.forward
        return self.microbatches * line.overhead + line.seconds_per_token * computed

    def backward_seconds(self, computed: Amount) -> Amount:
        """Eq. 3 with the measured backward instead of twice the forward."""
        line = self.profile.backward
        return self.microbatches * line.overhead + line.seconds_per_token * computed

    def transfers(self, placement: Placement) -> TransferPlan:
        """How the experts of a placement reach their guests, Trans and Agg alike."""
        sending = self.sending(placement)
        return plan_transfers(placement, self.profile.node_size, sending.chunks, sending.fanout)

    def sending(self, placement: Placement) -> Sending:
        """The routes and pieces with the fewest seconds of Trans; ties to the chain, then to fewer pieces.

        For links other than `relay` experts are sent whole.
        """
        if self.links != "relay":
            return Sending(1, 1, link_messages(placement, self.links))
        choices = []
        for fanout in FANOUTS:
            loads = LinkLoads(placement.num_ranks)
            for route in routes(placement, self.profile.node_size, fanout).values():
                loads.add(route)
            choices.append(Sending(fanout, *self.pieces(loads)))
        return min(choices, key=lambda choice: self._cost(choice.rounds, choice.chunks))

    def pieces(self, loads: LinkLoads) -> tuple[int, int]:
        """The number of pieces with the fewest seconds of Trans on routes with these loads, and the rounds they take.

        Ties go to fewer pieces.
        """
        if not (lines := loads.lines):
            return 1, 0
        experts_B, extra_B = np.array(lines).T
        chunks_A = np.unique([self.fewest_chunks, *self.best_chunks(experts_B, extra_B)])
        rounds_A = (np.multiply.outer(chunks_A, experts_B) + extra_B).max(1)
        best = self._cost(rounds_A, chunks_A).argmin()
        return int(chunks_A[best]), int(rounds_A[best])

    def best_chunks(self, experts: float | np.ndarray, extra: np.ndarray) -> np.ndarray:
        """Pieces where `experts` cross the busiest link and their routes take so many rounds more, within bounds.

        c pieces of b bytes take (m * c + x) * (alpha + beta * b / c) seconds, least at
        c = sqrt(x * beta * b / (m * alpha)).
        """
        return np.rint(np.sqrt(extra / experts * self._latencies)).clip(self.fewest_chunks, MOST_CHUNKS)

    @cached_property
    def fewest_chunks(self) -> int:
        """1; with overlap up to LEAST_CHUNKS, as long as the bytes of each take four times its latency.

        A Trans that is executed in two parts is split between rounds: pieces are the byte ranges to split by.
        """
        return max(1, min(LEAST_CHUNKS, int(self._latencies / 4))) if self.overlap is not None else 1

    @cached_property
    def _latencies(self) -> float:
        """How many latencies of a message it takes to pass a whole expert on, the latency left out."""
        line = self.profile.link("p2p")
        return line.beta * self.param_bytes / max(line.alpha, LEAST_ALPHA)

    def _cost(self, rounds: Any, chunks: Any) -> Any:
        """Seconds of Trans, in latencies."""
        return rounds * (1 + self._latencies / chunks)

    def round_seconds(self, piece_bytes: Any) -> Any:
        """One round of a TransferPlan whose pieces have so many bytes."""
        line = self.profile.link("p2p")
        return line.seconds(piece_bytes)

    def trans_seconds(self, rounds: Any, chunks: Any) -> Any:
        """Eq. 4, for so many rounds of experts in `chunks` pieces; each round pays the latency of a piece.

        For links `average` that is s * (D - n) / D. Numbers, or arrays of any one shape.
        """
        return rounds * self.round_seconds(self.param_bytes / chunks)

    def agg_seconds(self, rounds: Any, chunks: Any) -> Any:
        """Eq. 5, the way back of Eq. 4."""
        return rounds * self.round_seconds(self.grad_bytes / chunks)

    def flexmoe_seconds(self, counts_DE: np.ndarray, placement: Placement) -> float:
        """FlexMoE Eq. 5: the slowest rank's sum of computation (Eq. 7), exchanges (Eq. 8) and synchronisation (Eq. 9).

        Links between ranks of a node and across nodes count separately. What is synchronised is what moves here:
        Trans and Agg between the owner and its guests, which is an all-reduce's reduce and broadcast.
        """
        primary_E = np.asarray(placement.primary)
        times = self.expert_times(counts_DE.T, vexperts(placement), primary_E, owners(placement))
        return float(times.seconds_AD.sum(0).max())

    def expert_times(
        self, counts_AD: np.ndarray, vexperts_AD: np.ndarray, primary_A: np.ndarray, owner_A: np.ndarray
    ) -> ExpertTimes:
        """What K experts, or one placed in K ways, add to each rank's time in Eq. 5.

        Args:
            counts_AD: tokens of each source rank.
            vexperts_AD, primary_A, owner_A: as `vexperts` of a placement, its primary hosts and `owners`.
        """
        profile, num_ranks = self.profile, counts_AD.shape[1]
        local_AD, share_AD = SPLITS[self.split](counts_AD, vexperts_AD, primary_A)
        away_AD = counts_AD - local_AD
        away_A1 = away_AD.sum(1, keepdims=True)
        tokens_AD = local_AD + share_AD * away_A1
        first_N, node_D = np.arange(0, num_ranks, profile.node_size), np.arange(num_ranks) // profile.node_size
        near_AD = np.add.reduceat(away_AD, first_N, axis=1)[:, node_D]
        near, far = profile.link("p2p", "intra").beta, profile.link("p2p", "inter").beta
        beta_AD = share_AD * (near * (near_AD - away_AD) + far * (away_A1 - near_AD))
        members_AD = vexperts_AD > 0
        members_AD[np.arange(len(members_AD)), owner_A] = True
        nodes_A = (np.add.reduceat(members_AD, first_N, axis=1, dtype=np.int64) > 0).sum(1)
        synchronised_A = self.synchronisation_seconds(members_AD.sum(1), nodes_A)
        per_token = profile.forward.seconds_per_token + profile.backward.seconds_per_token
        seconds_AD = tokens_AD * per_token + 4 * self.token_bytes * beta_AD + members_AD * synchronised_A[:, None]
        return ExpertTimes(tokens_AD, seconds_AD)

    def synchronisation_seconds(self, ranks_A: np.ndarray, nodes_A: np.ndarray) -> np.ndarray:
        """[K] FlexMoE Eq. 9 for groups of so many ranks, on so many nodes, that have an expert in common."""
        # Few sizes occur: one look at the profile for each
        base = int(nodes_A.max()) + 1
        sizes, index_A = np.unique(ranks_A * base + nodes_A, return_inverse=True)
        seconds = [self.profile.group_seconds(size // base, size % base, self.grad_bytes) for size in sizes.tolist()]
        return np.array(seconds)[index_A]

    def adjustment_seconds(self, source: Any, target: Any) -> Any:
        """FlexMoE's cost of Expand and Migrate: model states over the bandwidth between two ranks.

        Here only parameters move, because optimizer states stay with the owner. Ranks, or arrays of them.
        """
        node_size, lines = self.profile.node_size, self.profile.links["p2p"]
        near, far = (lines[kind].seconds(self.param_bytes) for kind in ("intra", "inter"))
        seconds = np.where(np.equal(source // node_size, target // node_size), near, far)
        return np.where(np.equal(source, target), 0.0, seconds)

    def transfer_seconds(self, pairs: Iterable[tuple[int, int]]) -> float:
        """Experts with their optimizer state from ranks to ranks, (source, target) each: the busiest rank's time."""
        sent, received = np.zeros((2, self.profile.num_ranks))
        for source, target in pairs:
            line = self.profile.link("p2p", self.profile.group_kind((source, target)))
            sent[source] += line.seconds(self.state_bytes)
            received[target] += line.seconds(self.state_bytes)
        return float(max(sent.max(), received.max()))


def link_messages(placement: Placement, links: str) -> float:
    """Experts that cross the busiest link one after the other in one Trans, where none is relayed.

    With `direct`, the most that a rank sends or receives. With `average`, the mean over links, s * (D - n) / D of
    Eq. 4, where D - n is the number of an expert's guests.
    """
    if links == "average":
        return placement.added_hosts / placement.num_ranks
    into = [sum(expert != EMPTY for expert in row) for row in placement.guests]
    out = Counter(placement.owner(expert) for row in placement.guests for expert in row if expert != EMPTY)
    return float(max([*into, *out.values()]))
