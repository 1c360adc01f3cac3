"""All-to-alls by name, and `auto`: the all-to-all with the shortest predicted time, for each exchange.

cost/exchange.py derives the predictions from the profile.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import (
    AllToAll,
    Exchange,
    FlatAllToAll,
    NodeAllToAll,
    P2PAllToAll,
    default_all_to_all,
)
from megatron_balance.comm.dedup import DedupAllToAll
from megatron_balance.comm.hierarchical import OneDimensionalAllToAll, TwoDimensionalAllToAll
from megatron_balance.comm.pipelined import PipelinedAllToAll
from megatron_balance.config.flags import named
from megatron_balance.cost.exchange import DEFAULT, ExchangeModel
from megatron_balance.cost.flex import FlexModel
from megatron_balance.job.groups import NodeGroups
from megatron_balance.profile.cluster_profile import ClusterProfile

TURNS = 256
"""Number of exchanges of similar size that reuse a prediction, which takes milliseconds for hundreds of ranks."""

NOISE = 0.05
"""Relative difference below which predicted times count as equal."""


def members_of(nodes: NodeGroups) -> dict[str, AllToAll]:
    """Return the candidates in order of preference: the default, and all-to-alls whose messages differ on these nodes.
    On gloo, pipe is preferred, because the default posts all messages at once, and they share links at random."""
    members: dict[str, AllToAll] = {DEFAULT: default_all_to_all(nodes.ep)}
    if nodes.ep.size() <= nodes.node_size:
        return members
    pipe = {"pipe": PipelinedAllToAll(nodes)}
    members = pipe | members if isinstance(members[DEFAULT], P2PAllToAll) else members | pipe
    if nodes.node_size > 1:
        if nodes.ep.size() % nodes.node_size == 0:
            members["2dh"] = TwoDimensionalAllToAll(nodes)
        members["1dh"] = OneDimensionalAllToAll(nodes)
    return members


class Chooser:
    """Chooses the all-to-all with the shortest predicted time; the first one among those within `NOISE` of it. A
    prediction is reused for the next `TURNS` exchanges whose total bytes have the same bit length. It depends only on
    the profile, the split matrix, the size of a row and earlier exchanges, so all ranks choose alike."""

    def __init__(self, models: Iterable[ExchangeModel], log: Callable[[str], None] | None = None) -> None:
        """`log` receives a line when a name is chosen for the first time."""
        self.models = [*models]
        self.log = log
        self._choices: dict[int, tuple[str, int]] = {}
        """By bit length of the total bytes: the choice, and the number of exchanges for which it still holds."""
        self._logged: set[str] = set()

    def choose(self, splits_DD: torch.Tensor, row_bytes: int) -> str:
        """Return the name of the all-to-all for an exchange."""
        if len(self.models) == 1:
            return self.models[0].name
        bucket = (int(splits_DD.sum()) * row_bytes).bit_length()
        name, left = self._choices.get(bucket, ("", 0))
        if left == 0:
            name = self.predict(splits_DD.numpy() * float(row_bytes))
            left = TURNS
        self._choices[bucket] = name, left - 1
        return name

    def predict(self, bytes_DD: np.ndarray) -> str:
        """Return the choice for an exchange of these bytes."""
        seconds = {model.name: model.seconds(bytes_DD) for model in self.models}
        longest = (1 + NOISE) * min(seconds.values())
        chosen = next(name for name, time in seconds.items() if time <= longest)
        if self.log is not None and chosen not in self._logged:
            times = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in seconds.items())
            self.log(
                f"--moe-comm-alltoall auto: {chosen} for {bytes_DD.sum() / 1e6:.3g} MB in all (predicted: {times})"
            )
        self._logged.add(chosen)
        return chosen


class AutoAllToAll(NodeAllToAll):
    """Delegates each exchange to the all-to-all with the shortest time predicted from --balance-profile."""

    def __init__(self, nodes: NodeGroups, profile: ClusterProfile, log: Callable[[str], None] | None = None) -> None:
        super().__init__(nodes)
        self.members = members_of(nodes)
        self.chooser = Chooser((ExchangeModel.of(profile, name) for name in self.members), log)

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor, room: int = 0) -> Exchange:
        row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
        return self.members[self.chooser.choose(splits_DD, row_bytes)].start(rows, splits_DD, room)


ALL_TO_ALLS: dict[str, type[AllToAll]] = {
    "flat": FlatAllToAll,
    "p2p": P2PAllToAll,
    "1dh": OneDimensionalAllToAll,
    "2dh": TwoDimensionalAllToAll,
    "pipe": PipelinedAllToAll,
    "dedup": DedupAllToAll,
    "auto": AutoAllToAll,
}


def exchange_models(
    all_to_all: AllToAll, profile: ClusterProfile, copies: FlexModel | None = None
) -> tuple[ExchangeModel, ...]:
    """Return the models of an all-to-all: one for each candidate of `auto`, one for any other all-to-all. An unknown
    class is assumed to send all messages in one stage. `copies`: the model of `dedup`."""
    if isinstance(all_to_all, AutoAllToAll):
        return tuple(all_to_all.chooser.models)
    if isinstance(all_to_all, DedupAllToAll) and copies is not None:
        return (copies,)
    if type(all_to_all) is type(default_all_to_all(all_to_all.group)):
        return (ExchangeModel.of(profile),)
    name = next((name for name, kind in ALL_TO_ALLS.items() if isinstance(all_to_all, kind)), "p2p")
    return (ExchangeModel.of(profile, name),)


class CopiesCase(NamedTuple):
    """`dedup` as a candidate of `auto`."""

    model: FlexModel
    row_bytes: float
    """Bytes of a rank's rows in one exchange of a microbatch under even routing."""


def prefers_copies(auto: AutoAllToAll, copies: CopiesCase, log: Callable[[str], None] | None = None) -> bool:
    """Return whether `dedup` takes the place of `auto`: whether an even exchange is predicted to be faster that way.
    The choice holds for the whole run, because it changes the last bits of sums, and a resumed run must not."""
    ranks = auto.nodes.ep.size()
    if ranks <= auto.nodes.node_size:
        return False
    said: list[str] = []
    chooser = Chooser([*auto.chooser.models, copies.model], said.append)
    chosen = chooser.predict(np.full((ranks, ranks), copies.row_bytes / ranks))
    if log is not None and chosen == "dedup":
        log(said[0])
    return chosen == "dedup"


def find_all_to_all(name: str) -> type[AllToAll]:
    """Return the all-to-all class named in ALL_TO_ALLS or `package.module:Class`; otherwise raise ValueError."""
    found = named("--moe-comm-alltoall", name, {"default": None, **ALL_TO_ALLS})
    if not (isinstance(found, type) and issubclass(found, AllToAll)):
        problem = "is not a subclass of megatron_balance.comm.alltoall.AllToAll or NodeAllToAll"
        raise ValueError(f"--moe-comm-alltoall {name}: {problem}")
    return found


def load_all_to_all(
    name: str,
    ep_group: dist.ProcessGroup,
    *,
    nodes: Callable[[], NodeGroups],
    profile: Callable[[], ClusterProfile],
    log: Callable[[str], None] | None = None,
    copies: Callable[[], CopiesCase] | None = None,
) -> AllToAll:
    """Construct the all-to-all of an expert-parallel group; every rank of the job calls this with the same name.

    Args:
        nodes: creates the node groups, collectively over the job, for subclasses of NodeAllToAll.
        profile: returns the profile for the predictions of `auto`.
        log: receives a line about each new choice of `auto`.
        copies: describes `dedup` to `auto`; None: not a candidate.

    Raises:
        ValueError: see `find_all_to_all`, or the all-to-all does not support the sizes of the nodes.
    """
    if name == "default" or ep_group.size() == 1:
        return default_all_to_all(ep_group)
    found = find_all_to_all(name)
    if found is AutoAllToAll:
        auto = AutoAllToAll(nodes(), profile(), log)
        takes_over = copies is not None and prefers_copies(auto, copies(), log)
        return DedupAllToAll(auto.nodes) if takes_over else auto
    return found(nodes()) if issubclass(found, NodeAllToAll) else found(ep_group)
