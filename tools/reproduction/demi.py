"""DEMI's Figs. 5, 6, 8 and 10.

Loads: the paper shows that one of four workers receives most tokens in late layers (Fig. 1), and gives no shares. They
follow from its degrees of imbalance: plans that are nearly even (0.5 with four workers) are 1.3 and 1.14 times more
even than baselines in the penultimate layer (section V-C). So one worker has the share x where
sqrt(x^2 + (1 - x)^2 / 3) = 0.65 with 16 experts, and 0.57 with 64. From even routing, it grows with the layer. Settings
3 and 4, whose layers are similar, have half of setting 2's imbalance beyond 1 in all layers, which is our choice.
"""

import statistics
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from reproduction.simulated import Job, Seconds, System, simulated
from reproduction.tables import ANY, Found, Table, found

PENULTIMATE = 11
"""The last but one of 12 layers."""

ALIKE = 3
"""Layers that are simulated if all are alike."""


class Setting(NamedTuple):
    """One of the paper's settings (section V-A); 200 sequences for each worker."""

    cluster: str
    nodes: int
    experts: int
    length: int
    imbalance: float
    """Degree of imbalance of the penultimate layer over an even one; of all layers, if they are similar."""
    grows: bool
    topk: int = 2

    @property
    def workers(self) -> int:
        return 4 * self.nodes

    def share(self, layer: int) -> float:
        """Return the share of the tokens of a layer that one worker receives."""
        even = 1 / self.workers
        most = even + (1 - even) * np.sqrt((self.imbalance**2 - 1) / (self.workers - 1))
        return float(even + (most - even) * (min(1.0, (layer - 1) / (PENULTIMATE - 1)) if self.grows else 1.0))

    def popularity(self, iteration: int, layer: int) -> np.ndarray:
        """Return [D, E], see `simulated_loads.Popularity`: experts of a worker are equally popular."""
        share = self.share(layer)
        each = self.experts // self.workers
        worker_E = np.arange(self.experts) // each
        popular = (3 * layer) % self.workers
        shares_E = np.where(worker_E == popular, share, (1 - share) / (self.workers - 1)) / each
        return np.tile(shares_E, (self.workers, 1))

    def job(self) -> Job:
        """Return the training of the paper's Transformer-XL, with 32-bit numbers."""
        flags = (
            f"--num-experts {self.experts} --moe-router-topk {self.topk} --seq-length {self.length} "
            f"--max-position-embeddings {self.length} --micro-batch-size 200 --global-batch-size {200 * self.workers} "
            f"--expert-model-parallel-size {self.workers} --num-layers {12 if self.grows else ALIKE}"
        )
        return Job(
            model="transformer_xl_moe", flags=flags, cluster=self.cluster, nodes=self.nodes, load=self.popularity
        )

    def systems(self) -> dict[str, System]:
        """Return the paper's system and its baselines; a worker hosts at most half of all experts, as in the paper."""
        slots = f"--balance-guest-slots {min(self.experts // self.workers, self.experts // 2)}"
        return {
            "demi": System(f"--balance-policy demi --balance-demi-hosts 1 --balance-overlap blockwise {slots}"),
            "FastMoE": System(),
            "FasterMoE": System(f"--balance-policy fastermoe {slots}"),
            **{f"S{one}": System(f"--balance-policy demi_s{one} {slots}") for one in (1, 2, 3)},
        }


SETTINGS = {
    1: Setting("demi.yaml", 1, 16, 20, 1.30, True),
    2: Setting("demi.yaml", 1, 64, 20, 1.14, True),
    3: Setting("demi_two.yaml", 2, 128, 200, 1.07, False),
    4: Setting("demi.yaml", 4, 128, 200, 1.07, False),
}

FIG_5 = {1: 1.62, 2: 1.4, 3: 1.2, 4: 1.42}
"""Setting -> speedup over baselines: of the penultimate layer in settings 1 and 2, of all layers in 3 and 4."""

FIG_6 = {1: 1 / (1 - 0.346), 2: 1 / (1 - 0.285)}
"""Setting -> speedup over baselines of the mean layer: 34.6% and 28.5% less time."""

FIG_10 = {2: 1.19, 3: 1.25, 4: 1.37}
"""k -> speedup over FastMoE in setting 2."""


def _over_baselines(number: int, layer: int | None, paper: float, iterations: int) -> Found:
    setting = SETTINGS[number]
    job = setting.job()
    each = {name: simulated(job, system, iterations) for name, system in setting.systems().items()}
    seconds = {name: _layers(one, layer) for name, one in each.items()}
    speedups = {name: one / seconds["demi"] for name, one in seconds.items() if name != "demi"}
    shown = ", ".join(f"{name} {one:.2f}" for name, one in speedups.items())
    where = "all layers" if layer is None else f"layer {layer}"
    return found(f"setting {number}, {where} ({shown})", "demi", paper, statistics.mean(speedups.values()))


def _layers(seconds: Seconds, layer: int | None) -> float:
    return statistics.mean(seconds.layers.values()) if layer is None else seconds.layers[layer]


def _fig_5(iterations: int) -> Iterator[Found]:
    for number, paper in FIG_5.items():
        yield _over_baselines(number, PENULTIMATE if SETTINGS[number].grows else None, paper, iterations)


def _fig_6(iterations: int) -> Iterator[Found]:
    for number, paper in FIG_6.items():
        yield _over_baselines(number, None, paper, iterations)


def _fig_8(iterations: int) -> Iterator[Found]:
    for number in (1, 4):
        setting = SETTINGS[number]
        parts = simulated(setting.job(), setting.systems()["demi"], iterations).parts
        # Rows travel there and back as long; waiting for others' rows is a part of task 1
        there = parts["others' experts"] + parts["exchange"] / 2
        yield found(f"setting {number}", "task 1 over task 3", (1.0, ANY), there / parts["experts"])
        yield found(f"setting {number}", "task 1 over task 4", (1.0, ANY), there / (parts["exchange"] / 2))


def _fig_10(iterations: int) -> Iterator[Found]:
    for topk, paper in FIG_10.items():
        setting = SETTINGS[2]._replace(topk=topk)
        systems = setting.systems()
        job = setting.job()
        base, ours = (simulated(job, systems[name], iterations).moe for name in ("FastMoE", "demi"))
        yield found(f"top-{topk}", "demi", paper, base / ours)


TABLES = {
    "demi_fig_5": Table("DEMI, Fig. 5: speedup of a layer, average over the baselines", _fig_5),
    "demi_fig_6": Table("DEMI, Fig. 6: speedup of the mean layer, average over the baselines", _fig_6),
    "demi_fig_8": Table("DEMI, Fig. 8: times of tasks", _fig_8),
    "demi_fig_10": Table("DEMI, Fig. 10: 64 experts, speedup of the mean layer over FastMoE", _fig_10),
}
