"""The picture of tools/bench/pareto.py: balance against the bytes of a plan and the copies that a rank sends."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from report_charts import GRID, INK, STYLE

Points = Mapping[str, tuple[float, float, float]]
"""(gigabytes, copies that a rank sends, percent of the heaviest rank above the mean) by planner."""

Lines = Mapping[str, Sequence[tuple[float, float, float]]]
"""The same for each target of a planner."""

XLABELS = ("GB of weights and gradients in a plan", "copies that the busiest rank sends")
EVEN = 0.01
"""Percent above the mean below which plans are drawn as equally even."""

MARKERS = "osD^vP"


def draw(
    path: Path,
    points: Mapping[int, Points],
    lines: Mapping[int, Lines],
    floors: Mapping[int, float],
    fewest: Sequence[tuple[float, float]],
) -> None:
    """Draw one column for each number of slots.

    Args:
        floors: the floor of the percent above the mean.
        fewest: (gigabytes, percent above the mean) that no plan is left of.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * len(points), 8.2), layout="constrained")
        axes_XS = figure.subplots(2, len(points), squeeze=False, sharey=True, sharex="row")
        for column, slots in enumerate(points):
            for x, axes in enumerate(axes_XS[:, column]):
                _panel(axes, x, points[slots], lines[slots])
                axes.axhline(
                    max(floors[slots], EVEN), color=INK, linewidth=1, linestyle=":", label="floor: no plan is more even"
                )
                axes.set_xlabel(XLABELS[x])
            gigabytes, percent = np.array(fewest).T
            axes_XS[0, column].fill_betweenx(
                percent.clip(EVEN),
                0,
                gigabytes,
                color=GRID,
                alpha=0.7,
                linewidth=0,
                label="fewer bytes than this bound needs",
            )
            axes_XS[0, column].set_title(f"{slots} guest slot{'s' if slots > 1 else ''}")
        for axes in axes_XS[:, 0]:
            axes.set_ylabel("heaviest rank above the mean")
        handles, labels = axes_XS[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6)
        figure.savefig(path, dpi=110)


def _panel(axes: Axes, x: int, points: Points, lines: Lines) -> None:
    colors = matplotlib.colormaps["tab10"]
    for index, (name, line) in enumerate(lines.items()):
        values = np.array(line)
        axes.plot(
            values[:, x], values[:, 2].clip(EVEN), color=colors(index), marker=MARKERS[index], markersize=4, label=name
        )
    others = [name for name in points if name not in lines]
    for index, name in enumerate(others, start=len(lines)):
        axes.plot(
            points[name][x],
            max(points[name][2], EVEN),
            color=colors(index % 10),
            marker=MARKERS[index % len(MARKERS)],
            linestyle="",
            markersize=8,
            markerfacecolor="none",
            label=name,
        )
    axes.set_yscale("log")
    axes.set_xscale("symlog", linthresh=20, linscale=2)
    axes.set_xticks([0, 5, 10, 15, 20, 50, 100], ["0", "5", "10", "15", "20", "50", "100"])
    axes.set_xlim(-1, 120)
    axes.set_yticks([EVEN, 0.1, 1, 10, 100], ["≤ 0.01%", "0.1%", "1%", "10%", "100%"])
