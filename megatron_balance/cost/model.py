"""Seconds of one MoE layer under a placement, after Pro-Prophet (Eq. 1-6 and 8) and FlexMoE (Eq. 5 and 7-9).

The first dimension of `_AD` arrays is A experts, or A ways to place one expert; `_DD` is [source rank, computing rank].
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
"""Models of how experts reach their guests. relay: along the routes of `plan_transfers`, as executed. direct: an owner
sends its experts to every guest itself. average: Pro-Prophet's Eq. 4, where all links share the work evenly."""

FANOUTS = (1, 2, 16)
"""Fanouts to choose from: a chain, a tree with two sends per rank, and one that doubles up to 2**16 ranks."""

MOST_CHUNKS = 64
"""Maximum number of pieces of an expert: enough for a chain of 64 ranks; each piece costs a call."""

LEAST_CHUNKS = 4
"""Minimum number of pieces of a large expert whose plan is executed in two parts."""

LEAST_ALPHA = 1e-6
"""Minimum latency of a message in seconds for choosing pieces: a line through noisy times may have none."""


def owners(placement: Placement) -> np.ndarray:
    """Return [E] int64: the rank that owns each expert."""
    home = np.asarray(placement.home, dtype=np.int64)
    owner_E = np.empty(placement.num_experts, dtype=np.int64)
    owner_E[home.ravel()] = np.repeat(np.arange(placement.num_ranks), home.shape[1])
    return owner_E


def balance_ratio(tokens_D: np.ndarray) -> float:
    """Return FlexMoE's Eq. 6, the heaviest rank's tokens over the mean; 1 is perfect balance, also without tokens."""
    mean = float(np.mean(tokens_D))
    return float(np.max(tokens_D)) / mean if mean else 1.0


def balance_gain(before_D: np.ndarray, after_D: np.ndarray) -> float:
    """Return Pro-Prophet's RB: standard deviation of ranks' loads before balancing over that after; more is better."""
    before, after = float(np.std(before_D)), float(np.std(after_D))
    if after == 0:
        return float("inf") if before else 1.0
    return before / after


class Sending(NamedTuple):
    """The route and number of pieces of a placement's experts, and the rounds they take."""

    fanout: int
    chunks: int
    """As in `plan_transfers`."""
    rounds: float
    """Lower bound on the rounds; a round sends one piece per link."""


class LayerTime(NamedTuple):
    """Seconds of an MoE layer in one iteration, by part; `trans` and `agg` are the exposed seconds.

    They are numbers, or arrays if the model was given arrays.
    """

    all_to_all: Any
    forward: Any
    backward: Any
    trans: Any
    agg: Any

    @property
    def total(self) -> Any:
        """Seconds of all parts: Pro-Prophet Eq. 6, or Eq. 8 with overlap."""
        return sum(self)


class ExpertTimes(NamedTuple):
    """Tokens and seconds that experts add to each rank in FlexMoE's Eq. 5."""

    tokens_AD: np.ndarray
    """[A, D] tokens that each rank computes."""

    seconds_AD: np.ndarray
    """[A, D] seconds of computation, exchanges and synchronization."""


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
    """Predicts the seconds of one MoE layer in one iteration from its load matrix and placement."""

    profile: ClusterProfile
    _: KW_ONLY

    token_bytes: float
    """Bytes of one token in an exchange, size(input) in Eq. 1."""

    param_bytes: float
    """Bytes of one expert's parameters, as Trans sends them."""

    grad_bytes: float
    """Bytes of one expert's gradients, as Agg sends them."""

    state_bytes: float = 0.0
    """Bytes of one expert's parameters and optimizer state on one rank, as Transfer sends them."""

    split: str = "local_first"
    """A name in SPLITS."""

    links: str = "relay"
    """A name in LINKS."""

    microbatches: int = 1
    """Number of microbatches of the load matrix. Each has its own exchanges and computation, with their latencies;
    Trans and Agg happen once per iteration."""

    overlap: Overlap | None = None
    """Selects Eq. 8; None selects Eq. 6."""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"--balance-token-split {self.split}: choose from {', '.join(SPLITS)}")
        if self.links not in LINKS:
            raise ValueError(f"links {self.links}: choose from {', '.join(LINKS)}")
        if self.microbatches < 1:
            raise ValueError(f"microbatches {self.microbatches}: must be at least 1")

    def traffic(self, counts_DE: np.ndarray, placement: Placement) -> np.ndarray:
        """Return [D, D]: tokens from each source rank to each computing rank."""
        return traffic_of(self.split, counts_DE, placement)

    def layer_seconds(self, counts_DE: np.ndarray, placement: Placement) -> float:
        """Return the seconds of Eq. 6 (or Eq. 8) for a load matrix [D, E] of tokens."""
        return float(self.layer_time(counts_DE, placement).total)

    def layer_time(self, counts_DE: np.ndarray, placement: Placement) -> LayerTime:
        """Return `layer_seconds` by part."""
        traffic_DD = self.traffic(counts_DE, placement)
        local_D = traffic_DD.diagonal()
        received_D, sent_D = traffic_DD.sum(0) - local_D, traffic_DD.sum(1) - local_D
        exchanged = max(received_D.max(), sent_D.max())
        _, chunks, rounds = self.sending(placement)
        trans, agg = self.trans_seconds(rounds, chunks), self.agg_seconds(rounds, chunks)
        return self.time_of(float(exchanged), float(traffic_DD.sum(0).max()), trans, agg)

    def time_of(self, exchanged: Amount, computed: Amount, trans: Any, agg: Any) -> LayerTime:
        """Return the layer's time from maxima over ranks; arrays of one shape give arrays of seconds.

        Args:
            exchanged: tokens that the busiest rank receives from or sends to other ranks, whichever is more, because
                the combine returns what the dispatch brought.
            computed: tokens of the rank that computes the most.
            trans, agg: seconds of Trans and Agg before any are hidden, `trans_seconds` and `agg_seconds`.
        """
        forward, backward = self.forward_seconds(computed), self.backward_seconds(computed)
        if self.overlap is not None:
            experts = self.overlap.experts / self.microbatches
            trans = np.maximum(0.0, trans - experts * forward - self.overlap.forward)
            agg = np.maximum(0.0, agg - experts * backward - self.overlap.backward)
        all_to_all = 4 * self.all_to_all_seconds(exchanged)
        return LayerTime(all_to_all=all_to_all, forward=forward, backward=backward, trans=trans, agg=agg)

    def all_to_all_seconds(self, exchanged: Amount) -> Amount:
        """Return the seconds of one of the layer's four exchanges over all microbatches: Eq. 1 plus latencies."""
        line = self.profile.link("all_to_all")
        return self.microbatches * line.alpha + line.beta * self.token_bytes * exchanged

    def forward_seconds(self, computed: Amount) -> Amount:
        """Return the seconds of Eq. 2 for the rank with the most tokens."""
        line = self.profile.forward
        return self.microbatches * line.overhead + line.seconds_per_token * computed

    def backward_seconds(self, computed: Amount) -> Amount:
        """Return the seconds of Eq. 3, with the measured backward pass instead of twice the forward pass."""
        line = self.profile.backward
        return self.microbatches * line.overhead + line.seconds_per_token * computed

    def transfers(self, placement: Placement) -> TransferPlan:
        """Return the messages that Trans sends, and Agg in reverse."""
        sending = self.sending(placement)
        return plan_transfers(placement, self.profile.node_size, sending.chunks, sending.fanout)

    def sending(self, placement: Placement) -> Sending:
        """Return the routes and pieces with the fewest seconds of Trans; ties go to the chain, then to fewer pieces.

        With links other than `relay`, experts are sent in one piece.
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
        """Return the number of pieces with the fewest seconds of Trans on routes with these loads, and their rounds.

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
        """Return the best number of pieces where m `experts` cross the busiest link and x `extra` rounds follow.

        An expert of b bytes in c pieces takes (m * c + x) * (alpha + beta * b / c) seconds, which is least at
        c = sqrt(x * beta * b / (m * alpha)).
        """
        return np.rint(np.sqrt(extra / experts * self._latencies)).clip(self.fewest_chunks, MOST_CHUNKS)

    @cached_property
    def fewest_chunks(self) -> int:
        """Minimum number of pieces: 1; with overlap up to LEAST_CHUNKS, if each takes at least four latencies to send.

        With overlap, Trans is executed in two parts and split between rounds, which takes several pieces.
        """
        return max(1, min(LEAST_CHUNKS, int(self._latencies / 4))) if self.overlap is not None else 1

    @cached_property
    def _latencies(self) -> float:
        """Seconds to send the bytes of a whole expert, in latencies of a message."""
        line = self.profile.link("p2p")
        return line.beta * self.param_bytes / max(line.alpha, LEAST_ALPHA)

    def _cost(self, rounds: Any, chunks: Any) -> Any:
        """Return the seconds of Trans, in latencies of a message."""
        return rounds * (1 + self._latencies / chunks)

    def round_seconds(self, piece_bytes: Any) -> Any:
        """Return the seconds of one round of a TransferPlan."""
        line = self.profile.link("p2p")
        return line.seconds(piece_bytes)

    def trans_seconds(self, rounds: Any, chunks: Any) -> Any:
        """Return the seconds of Eq. 4 for `rounds` rounds of experts in `chunks` pieces, each with a piece's latency.

        With links `average`, rounds are s * (D - n) / D. Arguments are numbers, or arrays of one shape.
        """
        return rounds * self.round_seconds(self.param_bytes / chunks)

    def agg_seconds(self, rounds: Any, chunks: Any) -> Any:
        """Return the seconds of Eq. 5, the reverse of Eq. 4."""
        return rounds * self.round_seconds(self.grad_bytes / chunks)

    def flexmoe_seconds(self, counts_DE: np.ndarray, placement: Placement) -> float:
        """Return FlexMoE's Eq. 5: the slowest rank's computation (Eq. 7), exchange (Eq. 8) and synchronization (Eq. 9).

        Links inside a node and links between nodes have their own speeds. Synchronization is Trans and Agg between
        the owner and its guests, which together move as much as an all-reduce.
        """
        primary_E = np.asarray(placement.primary)
        times = self.expert_times(counts_DE.T, vexperts(placement), primary_E, owners(placement))
        return float(times.seconds_AD.sum(0).max())

    def expert_times(
        self, counts_AD: np.ndarray, vexperts_AD: np.ndarray, primary_A: np.ndarray, owner_A: np.ndarray
    ) -> ExpertTimes:
        """Return what A experts, or one expert placed in A ways, add to each rank's time in Eq. 5.

        Args:
            counts_AD: [A, D] tokens of each source rank.
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
        synchronized_A = self.synchronization_seconds(members_AD.sum(1), nodes_A)
        per_token = profile.forward.seconds_per_token + profile.backward.seconds_per_token
        seconds_AD = tokens_AD * per_token + 4 * self.token_bytes * beta_AD + members_AD * synchronized_A[:, None]
        return ExpertTimes(tokens_AD, seconds_AD)

    def synchronization_seconds(self, ranks_A: np.ndarray, nodes_A: np.ndarray) -> np.ndarray:
        """Return [A] the seconds of FlexMoE's Eq. 9 for groups of ranks that share an expert.

        Args:
            ranks_A, nodes_A: [A] number of ranks and of nodes of each group.
        """
        # Few sizes occur, so each is looked up in the profile once
        base = int(nodes_A.max()) + 1
        sizes, index_A = np.unique(ranks_A * base + nodes_A, return_inverse=True)
        seconds = [self.profile.group_seconds(size // base, size % base, self.grad_bytes) for size in sizes.tolist()]
        return np.array(seconds)[index_A]

    def adjustment_seconds(self, source: Any, target: Any) -> Any:
        """Return FlexMoE's cost of Expand and Migrate: model states over the bandwidth between two ranks.

        Only parameters move here, because optimizer states stay with the owner. Both arguments may be arrays.
        """
        node_size, lines = self.profile.node_size, self.profile.links["p2p"]
        near, far = (lines[kind].seconds(self.param_bytes) for kind in ("intra", "inter"))
        seconds = np.where(np.equal(source // node_size, target // node_size), near, far)
        return np.where(np.equal(source, target), 0.0, seconds)

    def transfer_seconds(self, pairs: Iterable[tuple[int, int]]) -> float:
        """Return the busiest rank's seconds to move an expert with optimizer state for each (source, target) pair."""
        sent, received = np.zeros((2, self.profile.num_ranks))
        for source, target in pairs:
            line = self.profile.link("p2p", self.profile.group_kind((source, target)))
            sent[source] += line.seconds(self.state_bytes)
            received[target] += line.seconds(self.state_bytes)
        return float(max(sent.max(), received.max()))


def link_messages(placement: Placement, links: str) -> float:
    """Return the number of experts that cross the busiest link in one Trans without relays.

    With `direct`, that is the most experts that a rank sends or receives. With `average`, it is the mean over links,
    s * (D - n) / D in Eq. 4, where D - n is the number of an expert's guests.
    """
    if links == "average":
        return placement.added_hosts / placement.num_ranks
    into = [sum(expert != EMPTY for expert in row) for row in placement.guests]
    out = Counter(placement.owner(expert) for row in placement.guests for expert in row if expert != EMPTY)
    return float(max([*into, *out.values()]))
