"""The picture of tools/bench/pareto.py: balance against the bytes of a plan and the copies that a rank sends."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[1]))

from report_charts import GRID, INK, STYLE

Point = tuple[float, float, float]
"""Gigabytes, copies that a rank sends, percent of the heaviest rank above the mean."""

XLABELS = ("GB of weights and gradients in a plan", "copies that the busiest rank sends")
EVEN = 0.01
"""Percent above the mean below which plans are drawn as equally even."""

MARKERS = "osD^vPX*<>hdp"
OTHERS = "#59636e"
"""Color of planners beyond the first ten."""


def draw(
    path: Path,
    points: Mapping[int, Mapping[str, Point]],
    lines: Mapping[int, Mapping[str, Sequence[Point]]],
    floors: Mapping[int, float],
    fewest: Sequence[tuple[float, float]],
) -> None:
    """Draw one column for each number of slots.

    Args:
        points: planners by name, by number of slots.
        lines: those of them that have several points.
        floors: the floor of the percent above the mean.
        fewest: (gigabytes, percent above the mean) that no plan is left of.
    """
    gigabytes, percent = np.array(fewest).T
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(points), 8.2), layout="constrained")
        axes_XS = figure.subplots(2, len(points), squeeze=False, sharey=True, sharex="row")
        for slots, column in zip(points, axes_XS.T, strict=True):
            column[0].set_title(f"{slots} guest slot{'s' if slots > 1 else ''}")
            for x, axes in enumerate(column):
                _panel(axes, x, points[slots], lines[slots])
                floor = max(floors[slots], EVEN)
                axes.axhline(floor, color=INK, linewidth=1, linestyle=":", label="floor: no plan is more even")
                axes.set_xlabel(XLABELS[x])
            shading = {"color": GRID, "alpha": 0.7, "linewidth": 0, "label": "fewer copies than the bound needs"}
            column[0].fill_betweenx(percent.clip(EVEN), 0, gigabytes, **shading)
        for axes in axes_XS[:, 0]:
            axes.set_ylabel("heaviest rank above the mean")
        handles, labels = axes_XS[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6)
        figure.savefig(path, dpi=110)


def _panel(axes: Axes, x: int, points: Mapping[str, Point], lines: Mapping[str, Sequence[Point]]) -> None:
    colors = [*matplotlib.colormaps["tab10"].colors, *[OTHERS] * len(points)]
    for index, name in enumerate(sorted(points, key=lambda name: name not in lines)):
        values = np.array(lines.get(name, [points[name]]))
        style = {"linestyle": "-", "markersize": 5} if name in lines else {"linestyle": "", "markerfacecolor": "none"}
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(values[:, x], values[:, 2].clip(EVEN), color=colors[index], marker=marker, label=name, **style)
    axes.set_yscale("log")
    axes.set_xscale("symlog", linthresh=20, linscale=2)
    axes.set_xticks([0, 5, 10, 15, 20, 50, 100], ["0", "5", "10", "15", "20", "50", "100"])
    axes.set_xlim(-1, 120)
    axes.set_yticks([EVEN, 0.1, 1, 10, 100], ["≤ 0.01%", "0.1%", "1%", "10%", "100%"])
