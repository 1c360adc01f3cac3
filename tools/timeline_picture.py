"""Draw one iteration of the timelines that --balance-timeline writes: a row per rank and stream, time to the right.

python tools/timeline_picture.py DIR/rank00000.json [DIR/rank00001.json ...] --iteration 12 --output picture.png
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_balance.files.reading import MIB, read_object
from megatron_balance.messages import described
from megatron_balance.observe.trace import STREAMS, TraceEvent, lanes_of

MAX_BYTES = 512 * MIB
"""Maximum size of a file."""

COLORS = {
    "FEC": "#2f6db3",
    "FNEC": "#a9cbee",
    "BEC": "#2f8f5b",
    "BNEC": "#a8dcbc",
    "A2A": "#f2a33a",
    "TRANS": "#8a5bb8",
    "BTRANS": "#b493d6",
    "AGG": "#cf4a5e",
    "PLAN": "#8c6d46",
    "wait": "#d4d4d4",
    "other": "#7d8790",
}
"""Colors by operation: forward and backward of experts and of other layers, all-to-alls, Trans for the two passes, Agg,
plans, waits."""

_OPERATION = re.compile(r"\b(FEC|FNEC|BEC|BNEC|A2A|B?TRANS|AGG|PLAN)\b")

WIDTH = 14.0
LANE = 0.28
MARGIN = 1.2
"""Sizes in inches: the picture, a row of boxes, and title, legend and axis together."""

RANK_GAP = 0.5
"""Distance between ranks, in rows."""

NARROWEST = 0.006
"""Part of the picture's width that a letter takes: names that do not fit are left out."""


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="timelines of one or more ranks")
    parser.add_argument("--iteration", type=int, metavar="N", required=True, help="iteration to draw")
    parser.add_argument("--output", type=Path, metavar="FILE", required=True, help="the PNG file to write")
    args = parser.parse_args(argv)
    try:
        records = [record for path in args.files for record in load_timeline(path)]
        picture(records, args.iteration).savefig(args.output, format="png", dpi=100)
    except ValueError as error:
        raise SystemExit(f"timeline_picture.py: error: {error}") from error
    except OSError as error:
        raise SystemExit(f"timeline_picture.py: error: --output {args.output}: {error.strerror}") from error


def load_timeline(path: Path) -> list[TraceEvent]:
    """Read the spans of a file, or of several merged files, thread by thread; ValueError if it is not a timeline."""
    content = read_object(path, MAX_BYTES)
    try:
        return [_read(event) for event in content["traceEvents"] if event["ph"] == "X"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is not a timeline of --balance-timeline ({described(error)})") from error


def _read(event: dict[str, Any]) -> TraceEvent:
    args = event["args"]
    if event["cat"] not in STREAMS:
        raise ValueError(f"no stream is called {event['cat']}")
    return TraceEvent(
        rank=int(event["pid"]),
        iteration=int(args["iteration"]),
        stream=event["cat"],
        name=event["name"],
        start_us=float(event["ts"]),
        end_us=float(event["ts"]) + float(event["dur"]),
        issued_us=float(args["issued_us"]) if "issued_us" in args else None,
        num_bytes=int(args.get("bytes", 0)),
    )


def picture(records: Sequence[TraceEvent], iteration: int) -> Figure:
    """Draw one iteration of all ranks in the records; ValueError if none is of this iteration."""
    shown = [record for record in records if record.iteration == iteration]
    if not shown:
        there = ", ".join(str(number) for number in sorted({record.iteration for record in records})) or "none"
        raise ValueError(f"--iteration {iteration}: is not in the files; choose one of {there}")
    first = min(record.start_us for record in shown)
    length = max(max(record.end_us for record in shown) - first, 1e-3) / 1e3
    rows = rows_of(shown)
    figure = Figure(figsize=(WIDTH, LANE * (rows[-1][0] + 1) + MARGIN), layout="constrained")
    axes = figure.subplots()
    labels = {}
    for place, label, lane in rows:
        labels.setdefault(label, place)
        for record in lane:
            start = (record.start_us - first) / 1e3
            width = (record.end_us - record.start_us) / 1e3
            axes.broken_barh([(start, width)], (place - 0.45, 0.9), color=COLORS[operation(record)])
            if text := _fitting(record.name, width / length):
                axes.text(start + width / 2, place, text, ha="center", va="center", fontsize=7)
    axes.set_yticks([*labels.values()], [*labels], fontsize=9)
    axes.set_xlim(0, length)
    axes.set_ylim(rows[-1][0] + 0.6, -0.6)
    axes.set_xlabel("ms")
    axes.grid(axis="x", color="#d1d9e0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_title(f"iteration {iteration}: {length:.3g} ms", loc="left", pad=26)
    seen = {operation(record) for record in shown}
    handles = [Patch(color=color, label=name) for name, color in COLORS.items() if name in seen]
    figure.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def rows_of(records: Sequence[TraceEvent]) -> list[tuple[float, str, list[TraceEvent]]]:
    """Return the place from the top, the label and the spans of each row, by rank, then by stream.

    All ranks have the same streams. Spans of a stream that overlap are in different rows, below each other.
    """
    streams = [stream for stream in STREAMS if any(record.stream == stream for record in records)]
    rows: list[tuple[float, str, list[TraceEvent]]] = []
    place = 0.0
    for rank in sorted({record.rank for record in records}):
        for stream in streams:
            own = [record for record in records if (record.rank, record.stream) == (rank, stream)]
            for lane in lanes_of(own) or [[]]:
                rows.append((place, f"rank {rank}, {stream}", lane))
                place += 1.0
        place += RANK_GAP
    return rows


def operation(record: TraceEvent) -> str:
    """Return the key in `COLORS` of a span."""
    if record.stream == "waits":
        return "wait"
    match = _OPERATION.search(record.name)
    return match[1] if match else "other"


def _fitting(name: str, share: float) -> str:
    """Return the first words of a name that fit into a box with this share of the picture's width."""
    words = name.split()
    while words and NARROWEST * len(" ".join(words)) > share:
        words.pop()
    return " ".join(words)


if __name__ == "__main__":
    main(sys.argv[1:])
