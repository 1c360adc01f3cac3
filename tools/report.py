"""Write an offline HTML report about a run, or about a run before and after balancing, from the runs' output.

python tools/report.py --tensorboard-dir DIR [--balance-log-dir DIR] [--balance-timeline DIR] \\
    [--before-tensorboard-dir DIR] --output report.html

The directories are those of the run's flags of the same names. The report names the missing ones. The summary is also
printed.
"""

import argparse
import base64
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
import rich
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from rich.table import Table

import report_charts as charts
from megatron_balance.files.writing import staged
from megatron_balance.placement.splits import SPLITS
from report_runs import LoggedRun, Series, aligned, read_run
from textfiles import positive_int
from timeline_picture import picture

TEMPLATE = Path(__file__).with_name("report.html.j2")
AGREEMENT = 1e-5
"""Relative difference up to which losses count as equal: rounding of float32 sums in another order."""


class Chart(NamedTuple):
    """One picture, or the reason why it is missing."""

    address: str = ""
    """Data URL that contains the picture."""
    alt: str = ""
    missing: str = ""


class Row(NamedTuple):
    """A line of the summary; a value is empty if a run does not have it."""

    name: str
    before: str
    after: str


def main(argv: Sequence[str]) -> None:
    args = _parser().parse_args(argv)
    try:
        after = read_run(args.tensorboard_dir, args.balance_log_dir, args.balance_timeline, args.balance_token_split)
        before = read_run(args.before_tensorboard_dir, None, None, "local_first")
        if not (after.scalars or after.loads or after.timeline):
            raise ValueError(
                "give --tensorboard-dir, --balance-log-dir or --balance-timeline: there is nothing to show"
            )
        if args.picture and not after.loads:
            raise ValueError("--picture: needs --balance-log-dir")
        rows = summary(before, after, args.token_bytes)
        notes = notices(before, after)
        with matplotlib.rc_context(charts.STYLE):
            files = {args.output: page(args.title, before, after, rows, notes, args.token_bytes).encode()}
            if args.picture:
                files[args.picture] = _image(charts.overview(after, worst(after)), "png", dpi=110)
    except ValueError as error:
        raise SystemExit(f"report.py: error: {error}") from error
    try:
        for path, content in files.items():
            with staged(path.parent) as folder:
                (folder / path.name).write_bytes(content)
    except OSError as error:
        raise SystemExit(f"report.py: error: {error.filename or args.output}: {error.strerror}") from error
    _print(rows, notes, bool(before.scalars))
    print(f"report: {args.output.resolve()}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tensorboard-dir", type=Path, metavar="DIR", help="events: balance, bytes, times and losses")
    add("--balance-log-dir", type=Path, metavar="DIR", help="load matrices and placements")
    add("--balance-timeline", type=Path, metavar="DIR", help="timelines of the ranks; the latest iteration is drawn")
    add("--before-tensorboard-dir", type=Path, metavar="DIR", help="events of a run without balancing")
    split = "as in the run (default: proportional, which pro_prophet and flexmoe prefer)"
    add("--balance-token-split", choices=SPLITS, default="proportional", help=split)
    add("--token-bytes", type=positive_int, metavar="BYTES", help="hidden size times bytes per number; gives megabytes")
    add("--title", metavar="TEXT", default="Balance report", help="title of the page (default: Balance report)")
    add("--output", type=Path, metavar="FILE", required=True, help="the HTML file to write")
    add("--picture", type=Path, metavar="FILE", help="a PNG of balance before and after; needs --balance-log-dir")
    return parser


def summary(before: LoggedRun, after: LoggedRun, token_bytes: int | None) -> list[Row]:
    """Summarize the change in a few numbers: means over iterations of means or sums over layers."""
    runs = (before, after)

    def row(name: str, form: str, both: Sequence[Series | None]) -> Row:
        return Row(name, *("" if series is None else f"{series.values_N.mean():{form}}" for series in both))

    own = before.over_layers("ratio_after", mean=True) or after.over_layers("ratio_before", mean=True)
    rows = [
        row("max/mean load of ranks, mean of layers", ".2f", (own, after.over_layers("ratio_after", mean=True))),
        row("hosts added per iteration", ",.1f", [run.over_layers("hosts_added") for run in runs]),
        row("experts moved per iteration", ".2f", [run.over_layers("experts_moved") for run in runs]),
        row(
            "Trans and Agg per iteration, MB",
            ",.1f",
            [run.over_layers("trans_bytes", "agg_bytes", factor=1e-6) for run in runs],
        ),
    ]
    if after.loads:
        factor, unit = (1.0, "tokens") if token_bytes is None else (charts.exchanged(token_bytes), "MB")
        crossing = [
            sum(float(getattr(loads, name).crossing_N.mean()) for loads in after.loads.values()) * factor
            for name in ("by_owners", "as_computed")
        ]
        rows.append(Row(f"all-to-alls per iteration, {unit}", *(f"{amount:,.1f}" for amount in crossing)))
    series = [after.over_layers(f"{kind}_seconds") for kind in ("predicted", "measured")]
    if series[0] is not None and series[1] is not None:
        _, (predicted_N, measured_N) = aligned([series[0], series[1]])
        rows.append(Row("predicted over measured layer time, median", "", f"{np.median(predicted_N / measured_N):.2f}"))
    times = [run.scalars.get("iteration-time") for run in runs]
    medians = [f"{np.median(one.values_N) * 1e3:,.0f}" if one else "" for one in times]
    rows.append(Row("iteration time, median, ms", *medians))
    for name, tag in (("lm loss, last iteration", "lm loss"), ("lm loss, last validation", "lm loss validation")):
        losses = [run.scalars.get(tag) for run in runs]
        rows.append(Row(name, *(f"{one.values_N[-1]:.4f}" if one else "" for one in losses)))
    return [row for row in rows if row.before or row.after]


def notices(before: LoggedRun, after: LoggedRun) -> list[str]:
    """Return notes that a reader of the summary needs."""
    found = []
    if before.scalars and not before.layers("ratio_after") and after.layers("ratio_before"):
        found.append(
            "Without balancing nothing logs loads: 'before' is the load of the run with balancing if each expert had "
            "been computed by its owner."
        )
    losses = [run.scalars["lm loss"] for run in (before, after) if "lm loss" in run.scalars]
    if len(losses) == 2:
        iterations_N, (first, second) = aligned(losses)
        apart = np.flatnonzero(np.abs(first - second) > AGREEMENT * np.abs(first))
        if not len(apart):
            found.append(f"Losses of all {len(iterations_N)} iterations agree to {AGREEMENT:g}.")
        elif apart[0]:
            found.append(
                f"Losses agree to {AGREEMENT:g} until iteration {iterations_N[apart[0] - 1]}. After that, training "
                "amplifies the rounding of sums that are computed in another order."
            )
        else:
            found.append("Losses differ from the first iteration on: these runs did not train the same model.")
    return found


def page(
    title: str, before: LoggedRun, after: LoggedRun, rows: list[Row], notes: list[str], token_bytes: int | None
) -> str:
    """Return the whole HTML file, which refers to no other file."""
    events = "--tensorboard-dir DIR"
    loads = "--balance-log-dir DIR"
    both = {name: run for name, run in (("before", before), ("after", after)) if run.scalars}
    timeline = None
    if after.timeline:
        timeline = picture(after.timeline, after.timeline[0].iteration)
    shown = {
        "training": drawn(charts.training(both), "loss and iteration time", events),
        "balance": drawn(charts.balance(after), "heaviest rank over the mean", events),
        "ranks": drawn(charts.ranks(after.loads, worst(after)) if after.loads else None, "load of ranks", loads),
        "experts": drawn(charts.experts(after.loads) if after.loads else None, "load of experts", loads),
        "decisions": drawn(charts.decisions(after), "hosts added and experts moved", events),
        "traffic": drawn(charts.traffic(after, token_bytes), "bytes sent", events),
        "prediction": drawn(charts.prediction(after), "predicted against measured", events),
        "timeline": drawn(timeline, "timeline of an iteration", "--balance-timeline DIR", "png"),
    }
    iterations = [series.iterations_N for series in after.scalars.values()]
    iterations += [own.iterations_N for own in after.loads.values()]
    iterations += [np.array([record.iteration for record in after.timeline])] if after.timeline else []
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template(TEMPLATE.name).render(
        title=title,
        rows=rows,
        notes=notes,
        compared=bool(before.scalars),
        charts=shown,
        iterations=f"{min(each.min() for each in iterations)} to {max(each.max() for each in iterations)}",
        layers=len(after.loads) or len(after.layers("ratio_after")),
    )


def drawn(figure: Figure | None, alt: str, flags: str, kind: str = "svg") -> Chart:
    """Embed a figure in the page, as `svg` or `png`."""
    if figure is None:
        return Chart(missing=f"Not recorded: train with {flags} and a --balance-policy, and give it here.")
    media = {"svg": "image/svg+xml", "png": "image/png"}[kind]
    return Chart(f"data:{media};base64,{base64.b64encode(_image(figure, kind)).decode()}", alt)


def _image(figure: Figure, kind: str, dpi: int = 100) -> bytes:
    file = io.BytesIO()
    # Without the date, the same run gives the same bytes
    fields = ("Date", "Creator", "Format", "Type") if kind == "svg" else ()
    figure.savefig(file, format=kind, dpi=dpi, metadata=dict.fromkeys(fields))
    return file.getvalue()


def worst(run: LoggedRun) -> int:
    """Return the layer whose ranks would have the most uneven load if owners computed all tokens."""
    return max(run.loads, key=lambda layer: charts.relative(run.loads[layer].by_owners.computed_NR).max(1).mean())


def _print(rows: Sequence[Row], notes: Sequence[str], compared: bool) -> None:
    table = Table("", *(("before", "after") if compared else ("owners only", "as computed")))
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(row.name, row.before or "-", row.after or "-")
    rich.print(table, *notes, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
