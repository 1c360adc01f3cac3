"""The charts of tools/report.py: turn a logged run into matplotlib figures.

Shape suffixes: N iterations, B bins of iterations, L layers, E experts, R ranks.
"""

import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_balance.cost.calibration import Factors
from report_runs import LayerLoads, LoggedRun, Series, aligned

BEFORE = "#c2703d"
AFTER = "#2f6db3"
INK = "#1f2328"
GRID = "#d1d9e0"
LAYERS = "viridis"
WIDTH = 10.0
"""Width of the report's figures, in inches."""
BINS = 300
"""Most points per line: longer runs are drawn as means over this many parts."""
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": "#59636e",
    "ytick.color": "#59636e",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
}


def figure(rows: int, columns: int, height: float, **kwargs: object) -> tuple[Figure, np.ndarray]:
    """Return a figure of the report's width with axes [rows, columns]; `height` is a row's, in inches."""
    drawn = Figure(figsize=(WIDTH, rows * height + 0.3), layout="constrained")
    return drawn, drawn.subplots(rows, columns, squeeze=False, **kwargs)


def training(runs: Mapping[str, LoggedRun]) -> Figure | None:
    """Draw the loss and the iteration time of all runs."""
    drawn, ((loss, seconds),) = figure(1, 2, 3.0)
    for name, run in runs.items():
        # Where the lines coincide, one remains visible between the other's dashes
        color, style, zorder = (BEFORE, "--", 3) if name == "before" else (AFTER, "-", 2)
        for axes, tag in ((loss, "lm loss"), (seconds, "iteration-time")):
            label = name if len(runs) > 1 else None
            line(axes, run.scalars.get(tag), label, color, style=style, zorder=zorder)
    if not loss.lines and not seconds.lines:
        return None
    titled(loss, "lm loss")
    titled(seconds, "iteration time, s")
    seconds.set_ylim(bottom=0)
    return drawn


def balance(run: LoggedRun) -> Figure | None:
    """Draw the heaviest rank over the mean by iteration: the mean of all layers, then each layer."""
    before = run.layers("ratio_before")
    after = run.layers("ratio_after")
    if not after:
        return None
    rows = 1 + math.ceil(len(after) / 4)
    drawn = Figure(figsize=(WIDTH, 3.0 + 1.7 * (rows - 1)), layout="constrained")
    grid = drawn.add_gridspec(rows, 4, height_ratios=[1.7] + [1.0] * (rows - 1))
    top = drawn.add_subplot(grid[0, :])
    for name, label, color in (("ratio_before", "owners only", BEFORE), ("ratio_after", "as computed", AFTER)):
        line(top, run.over_layers(name, mean=True), label, color)
    titled(top, "heaviest rank over the mean, mean of all layers (1 is even)")
    least = None
    for number, layer in enumerate(after):
        axes = drawn.add_subplot(grid[1 + number // 4, number % 4], sharey=least)
        least = least or axes
        line(axes, before[layer], None, BEFORE, width=1.0)
        line(axes, after[layer], None, AFTER, width=1.0)
        axes.set_title(f"layer {layer}", fontsize=9)
        axes.set_xlabel("iteration", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    for axes in (top, least):
        axes.set_ylim(bottom=1)
    return drawn


def ranks(loads: Mapping[int, LayerLoads], layer: int) -> Figure:
    """Draw every rank's tokens by iteration in one layer: if owners had computed all tokens, and as computed."""
    drawn, (both,) = figure(1, 2, 3.0, sharey=True)
    rank_maps(drawn, both, loads[layer], (f"layer {layer}, owners only", f"layer {layer}, as computed"))
    for axes in both:
        axes.set_xlabel("iteration")
    return drawn


def rank_maps(drawn: Figure, both: Sequence[Axes], own: LayerLoads, titles: Sequence[str]) -> None:
    """Draw heat maps of ranks in the same colors: if owners had computed all tokens, and as computed."""
    tables = [relative(table_NR) for table_NR in (own.by_owners.computed_NR, own.as_computed.computed_NR)]
    highest = max(1.5, float(max(table.max() for table in tables)))
    for axes, table, title in zip(both, tables, titles, strict=True):
        image = heat(axes, own.iterations_N, table, highest)
        axes.set_title(f"{title}: heaviest rank {table.max(1).mean():.2f} x the mean")
    both[0].set_ylabel("rank")
    drawn.colorbar(image, ax=[*both], label="tokens over the mean", pad=0.01)


def experts(loads: Mapping[int, LayerLoads]) -> Figure:
    """Draw, for every layer, the load of its experts and the number of ranks that computed them."""
    drawn, table = figure(len(loads), 2, 2.1, sharex=True)
    shares = {layer: relative(own.tokens_NE) for layer, own in loads.items()}
    highest = float(max(share.max() for share in shares.values()))
    most = max(2, max(int(own.hosts_NE.max()) for own in loads.values()))
    for (left, right), (layer, own) in zip(table, loads.items(), strict=True):
        load = heat(left, own.iterations_N, shares[layer], highest)
        hosts = heat(right, own.iterations_N, own.hosts_NE, most, lowest=1, colors="PuBu")
        left.set_title(f"layer {layer}: load of experts")
        right.set_title(f"layer {layer}: ranks that compute them")
        left.set_ylabel("expert")
    for axes in table[-1]:
        axes.set_xlabel("iteration")
    above = {"location": "top", "pad": 0.01, "aspect": 40, "shrink": 0.7}
    drawn.colorbar(load, ax=table[:, 0], label="tokens over the mean", **above)
    drawn.colorbar(hosts, ax=table[:, 1], label="ranks", ticks=MaxNLocator(6, integer=True), **above)
    return drawn


def decisions(run: LoggedRun) -> Figure | None:
    """Draw the hosts added by layer and iteration, the experts that changed owners, and the planning time."""
    hosts = run.layers("hosts_added")
    if not hosts:
        return None
    drawn = Figure(figsize=(WIDTH, 4.7), layout="constrained")
    (top, planning, owners) = drawn.subplot_mosaic([["top", "top"], ["planning", "owners"]]).values()
    iterations_N, values = aligned(list(hosts.values()))
    table_NL = np.stack(values, axis=1)
    image = heat(top, iterations_N, table_NL, max(1.0, table_NL.max()), colors="PuBu", labels=list(hosts))
    drawn.colorbar(image, ax=top, pad=0.01, label="copies", ticks=MaxNLocator(5, integer=True))
    titled(top, "hosts added: copies of experts in force, by layer", legend=False)
    top.set_ylabel("layer")
    line(planning, run.over_layers("plan_seconds", factor=1e3), None, AFTER)
    titled(planning, "planning time of all layers, ms")
    line(owners, run.over_layers("experts_moved"), None, AFTER)
    titled(owners, "experts that changed their owner")
    owners.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    planning.set_ylim(bottom=0)
    # Without a Transfer, the axis would have fractions of experts
    owners.set_ylim(0, max(1.0, owners.get_ylim()[1]))
    return drawn


def traffic(run: LoggedRun, token_bytes: int | None) -> Figure | None:
    """Draw the bytes of Trans, Agg and Transfer, and of all-to-alls between ranks, per iteration."""
    drawn, ((weights, tokens),) = figure(1, 2, 3.0)
    for name, label, color, style in (
        ("trans_bytes", "Trans: weights", AFTER, "-"),
        ("agg_bytes", "Agg: gradients", BEFORE, "--"),
        ("transfer_bytes", "Transfer: owners", "#8a5bb8", "-"),
    ):
        line(weights, run.over_layers(name, factor=1e-6), label, color, style=style)
    if run.loads:
        factor = 1.0 if token_bytes is None else exchanged(token_bytes)
        for name, label, color in (("by_owners", "owners only", BEFORE), ("as_computed", "as computed", AFTER)):
            sent = [Series(own.iterations_N, getattr(own, name).crossing_N * factor) for own in run.loads.values()]
            iterations_N, rows = aligned(sent)
            line(tokens, Series(iterations_N, np.sum(rows, axis=0)), label, color)
    if not weights.lines and not tokens.lines:
        return None
    titled(weights, "transferred experts, MB", missing="not recorded: give --tensorboard-dir")
    unit = "tokens" if token_bytes is None else "MB"
    titled(tokens, f"all-to-alls, to other ranks, {unit}", missing="not recorded: give --balance-log-dir")
    for axes in (weights, tokens):
        axes.set_ylim(bottom=0)
    return drawn


def exchanged(token_bytes: int) -> float:
    """Return the megabytes sent for a token computed on another rank: dispatch and combine, forward and backward."""
    return 4 * token_bytes / 1e6


def prediction(run: LoggedRun) -> Figure | None:
    """Draw predicted against measured time of each layer and iteration, the factors of the calibration, and errors."""
    predicted = run.layers("predicted_seconds")
    measured = run.layers("measured_seconds")
    if not predicted:
        return None
    drawn, ((left, right), (factors, ratio)) = figure(2, 2, 3.2)
    pairs = [aligned([predicted[layer], measured[layer]])[1] for layer in predicted]
    for layer, (x_N, y_N), color in zip(predicted, pairs, layer_colors(len(pairs)), strict=True):
        left.scatter(x_N * 1e3, y_N * 1e3, s=9, color=color, alpha=0.6, linewidths=0, label=f"layer {layer}")
    title = "time of a layer"
    x_M, y_M = np.concatenate(pairs, axis=1)
    if (x_M > 0).all() and (y_M > 0).all():
        slope = float(np.median(y_M / x_M))
        ends_2 = np.array([x_M.min(), x_M.max()]) * 1e3
        left.plot(ends_2, ends_2 * slope, "--", color=INK, linewidth=0.8)
        title += f"; dashed: measured = {slope:,.2f} x predicted"
        left.set_xscale("log")
        left.set_yscale("log")
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter("{x:,.10g}")
    left.set_xlabel("predicted, ms")
    left.set_ylabel("measured, ms")
    titled(left, title, iterations=False, legend=len(predicted) <= 8)
    line(right, run.over_layers("prediction_error", mean=True, factor=100), None, AFTER)
    titled(right, "tokens predicted on the wrong expert or source, %")
    right.set_ylim(bottom=0)
    for name, color in zip(Factors._fields, layer_colors(len(Factors._fields)), strict=True):
        line(factors, run.scalars.get(f"moe/calibration_{name}"), name, color)
    factors.set_yscale("log")
    titled(factors, "measured over predicted, median of the latest iterations", legend=True)
    totals = [run.over_layers(f"{kind}_seconds") for kind in ("predicted", "measured")]
    iterations_N, (x_N, y_N) = aligned([series for series in totals if series is not None])
    if (y_N > 0).all():
        line(ratio, Series(iterations_N, x_N / y_N), None, AFTER)
    titled(ratio, "calibrated prediction over measured, all layers")
    return drawn


def overview(run: LoggedRun, layer: int) -> Figure:
    """Draw an overview: the ranks of one layer before and after, and the mean ratio of all layers."""
    drawn = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    (*above, below) = drawn.subplot_mosaic([["before", "after"], ["below", "below"]]).values()
    rank_maps(drawn, above, run.loads[layer], (f"layer {layer}, before balancing", f"layer {layer}, after"))
    for name, label, color in (("by_owners", "before balancing", BEFORE), ("as_computed", "after", AFTER)):
        each = [(own.iterations_N, getattr(own, name).computed_NR) for own in run.loads.values()]
        ratios = [Series(iterations_N, relative(computed_NR).max(1)) for iterations_N, computed_NR in each]
        iterations_N, ratios_LN = aligned(ratios)
        line(below, Series(iterations_N, np.mean(ratios_LN, axis=0)), label, color)
    titled(below, "heaviest rank over the mean, mean of all layers (1 is even)")
    below.set_ylim(bottom=1)
    return drawn


def layer_colors(count: int) -> np.ndarray:
    return matplotlib.colormaps[LAYERS](np.linspace(0, 0.92, count))


def line(
    axes: Axes,
    series: Series | None,
    label: str | None,
    color: str,
    *,
    style: str = "-",
    zorder: float = 2,
    width: float = 1.5,
) -> None:
    """Draw a line of means over bins, if there is a series."""
    if series is None:
        return
    middles_B, values_B = binned(series.iterations_N, series.values_N)
    axes.plot(middles_B, values_B, style, color=color, label=label, linewidth=width, zorder=zorder)


def heat(
    axes: Axes,
    iterations_N: np.ndarray,
    table_NK: np.ndarray,
    highest: float,
    *,
    lowest: float = 0.0,
    colors: str = "YlOrRd",
    labels: Sequence[int] | None = None,
):
    """Draw a heat map with a row per expert, rank or layer and iterations to the right; return it for a color bar."""
    middles_B, table_BK = binned(iterations_N, table_NK)
    half = (middles_B[-1] - middles_B[0]) / max(1, 2 * (len(middles_B) - 1)) or 0.5
    extent = (middles_B[0] - half, middles_B[-1] + half, table_NK.shape[1] - 0.5, -0.5)
    image = axes.imshow(
        table_BK.T, aspect="auto", interpolation="none", extent=extent, vmin=lowest, vmax=highest, cmap=colors
    )
    axes.grid(False)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    if labels is not None and len(labels) <= 16:
        axes.set_yticks(range(len(labels)), [str(label) for label in labels])
    return image


def titled(axes: Axes, title: str, *, legend: bool = True, iterations: bool = True, missing: str = "") -> None:
    """Set the title and labels of axes; if they are empty, show the `missing` text instead."""
    axes.set_title(title)
    if axes.get_yscale() == "linear" and not axes.images:
        axes.yaxis.set_major_formatter("{x:,.10g}")
    if iterations:
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if not axes.has_data():
        axes.text(0.5, 0.5, missing, ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
    elif legend and axes.get_legend_handles_labels()[1]:
        axes.legend(loc="best", fontsize=9)


def binned(iterations_N: np.ndarray, values_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means over at most BINS parts of the iterations: [B] and [B, ...]."""
    if len(iterations_N) <= BINS:
        return iterations_N, values_N
    parts = np.array_split(np.arange(len(iterations_N)), BINS)
    return tuple(np.stack([table[part].mean(0) for part in parts]) for table in (iterations_N, values_N))


def relative(table_NK: np.ndarray) -> np.ndarray:
    """Return each iteration's tokens over their mean; 1 where there are none."""
    mean_N1 = table_NK.mean(1, keepdims=True)
    return np.divide(table_NK, mean_N1, out=np.ones(table_NK.shape), where=mean_N1 > 0)
