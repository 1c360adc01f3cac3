"""What tests of the simulator have in common: small stages, and a recorder that keeps everything."""

from collections.abc import Sequence

import numpy as np

from megatron_balance.cost.network import Network
from megatron_balance.flow.chunks.order import ChunkTimes, interleaved, sequential
from megatron_balance.profile.cluster_profile import ClusterProfile, Fit, Throughput, from_links
from megatron_balance.simulate.engine import NOTHING, Program, Work
from megatron_balance.simulate.network import Fabric, TeamNetwork
from megatron_balance.simulate.programs import Direction, LayerWork, StageSchedule, TeamProgram
from megatron_balance.simulate.result import Recorder
from megatron_balance.timeline.actions import chunk_start
from megatron_balance.timeline.lower import compute_order, lower, one_forward_one_backward

MOVES = 4
"""The resource of Trans and Agg; each stage has its own one for exchanges."""

SPEED = Throughput(1e-8, 0.0, 0.0, 0.0)


def work(latency: float, seconds: dict[int, float]) -> Work:
    return Work(latency, np.array([*seconds], dtype=np.int64), np.array([*seconds.values()]))


class Log(Recorder):
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.labels: dict[int, list[str]] = {}
        self.waits: list[tuple[int, str]] = []

    def computed(self, team: int, label: str, begin_R: np.ndarray, end_R: np.ndarray) -> None:
        self.labels.setdefault(team, []).append(label)

    def waited(self, team: int, label: str, begin_R: np.ndarray, start: float | np.ndarray, end_R: np.ndarray) -> None:
        self.waits.append((team, label))
        assert (end_R >= begin_R).all()

    def communicated(self, teams: Sequence[int], label: str, lane: str, start: float, end: float) -> None:
        self.spans.append((label, start, end))


def program(stage: StageSchedule, layers: dict[int, LayerWork], team: int, ranks: int) -> Program:
    return TeamProgram(stage, layers, team, ranks).commands()


def direction(forward: bool, chunks: int = 1, resource: int = 0) -> Direction:
    seconds = 3.0 if forward else 6.0
    times = (ChunkTimes(0, 1, 0, seconds / chunks, 0, 1, 0),) * chunks
    order = sequential(times) if chunks == 1 else interleaved(times)
    exchange = work(0.0, {resource: 1.0 / chunks})
    experts_CR = np.full((chunks, 2), seconds / chunks)
    return Direction(order, [exchange] * chunks, experts_CR, [exchange] * chunks)


def stage_of(number: int, stages: int, microbatches: int, balanced: bool, teams: int = 1) -> StageSchedule:
    first = 1 + 2 * number
    blocks = [[first, first + 1]]
    passes = one_forward_one_backward([(0, one) for one in range(microbatches)], 1, stages - number - 1)
    schedule = lower(passes, blocks, "blockwise") if balanced else compute_order(passes, blocks)
    return StageSchedule(
        number=number,
        stages=stages,
        teams=teams,
        passes=passes,
        blocks=blocks,
        schedule=schedule,
        others=dict.fromkeys([chunk_start(0), *blocks[0]], (1.0, 2.0)),
        message=0.25,
        reduce=work(0.5, {}),
        step=0.125,
    )


def layers_of(stage: StageSchedule, microbatches: int, chunks: int = 1, moves: Work = NOTHING) -> dict[int, LayerWork]:
    return {
        number: LayerWork(
            forward_B=[direction(True, chunks, stage.number)] * microbatches,
            backward_B=[direction(False, chunks, stage.number)] * microbatches,
            moves=lambda action: moves,
            plan=work(0.1, {}),
        )
        for number in stage.blocks[0]
    }


def team(num_ranks: int, node_size: int, beta_near: float = 1 / 150e9) -> tuple[TeamNetwork, ClusterProfile]:
    far = Fit(25e-6, 1 / 25e9, 0.0, 0.0)
    near = Fit(10e-6, beta_near, 0.0, 0.0)
    shared = far._replace(beta=2 * far.beta)
    profile = from_links(num_ranks, node_size, near, far, shared=shared, forward=SPEED, backward=SPEED)
    return TeamNetwork(Fabric(num_ranks, node_size), np.arange(num_ranks), Network.of(profile)), profile
