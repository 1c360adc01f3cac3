"""Draw one iteration of the timelines that --balance-timeline writes: a row per rank and stream, time to the right.

python tools/timeline_picture.py DIR/rank00000.json [DIR/rank00001.json ...] --iteration 12 --output picture.png
"""

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from megatron_balance.observe.trace import STREAMS, Stream, TraceEvent, lanes_of, load_timeline

COLORS = {
    "FEC": "#2f6db3",
    "FNEC": "#a9cbee",
    "BEC": "#2f8f5b",
    "BNEC": "#a8dcbc",
    "A2A": "#f2a33a",
    "TRANS": "#8a5bb8",
    "AGG": "#cf4a5e",
    "PLAN": "#8c6d46",
    "wait": "#d4d4d4",
    "other": "#7d8790",
}
"""Colors by operation: forward and backward of experts and of other layers, all-to-alls, transfers of experts."""

_OPERATION = re.compile(r"\b(FEC|FNEC|BEC|BNEC|A2A|TRANS|AGG|PLAN)\b")

WIDTH = 1400
MARGIN = 20
LABELS = 190
TITLE = 46
LEGEND = 38
AXIS = 40
LANE, GAP, RANK_GAP = 28, 6, 18
"""Sizes in pixels: the page and the labels' column; heights of title, legend and axis; heights and gaps of rows."""

INK = "#1f2328"
QUIET = "#59636e"
PAPER = "#ffffff"
ROW_PAPER = "#f6f8fa"
GRID = "#d1d9e0"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="timelines of one or more ranks")
    parser.add_argument("--iteration", type=int, metavar="N", required=True, help="iteration to draw")
    parser.add_argument("--output", type=Path, metavar="FILE", required=True, help="the PNG file to write")
    args = parser.parse_args(argv)
    try:
        records = [record for path in args.files for record in load_timeline(path)]
        picture(records, args.iteration).save(args.output, format="PNG")
    except ValueError as error:
        raise SystemExit(f"timeline_picture.py: error: {error}") from error
    except OSError as error:
        raise SystemExit(f"timeline_picture.py: error: --output {args.output}: {error.strerror}") from error


@dataclass(frozen=True)
class Row:
    """One stream of one rank, with its position in the picture."""

    rank: int
    stream: Stream
    lanes: list[list[TraceEvent]]
    """At least one lane; overlapping spans are in different lanes, below each other."""
    top: int

    @property
    def bottom(self) -> int:
        return self.top + LANE * len(self.lanes)


def picture(records: Sequence[TraceEvent], iteration: int) -> Image.Image:
    """Draw one iteration of all ranks in the records.

    Raises:
        ValueError: there is no record of this iteration.
    """
    shown = [record for record in records if record.iteration == iteration]
    if not shown:
        there = ", ".join(str(number) for number in sorted({record.iteration for record in records})) or "none"
        raise ValueError(f"--iteration {iteration}: is not in the files; choose one of {there}")
    scale = Scale(min(record.start_us for record in shown), max(record.end_us for record in shown))
    rows = rows_of(shown, MARGIN + TITLE + LEGEND)
    image = Image.new("RGB", (WIDTH, rows[-1].bottom + AXIS + MARGIN), PAPER)
    draw = ImageDraw.Draw(image)
    length = (scale.end_us - scale.start_us) / 1e3
    draw.text((MARGIN, MARGIN), f"iteration {iteration}: {_digits(length)} ms", INK, _font(24))
    _legend(draw, {operation(record) for record in shown})
    for row in rows:
        draw.rectangle((MARGIN + LABELS, row.top, WIDTH - MARGIN, row.bottom - 1), ROW_PAPER)
        draw.text((MARGIN + LABELS - 12, (row.top + row.bottom) / 2), row.stream, QUIET, _font(15), anchor="rm")
    for rank, group in groupby(rows, key=lambda row: row.rank):
        own = list(group)
        draw.text((MARGIN, (own[0].top + own[-1].bottom) / 2), f"rank {rank}", INK, _font(16), anchor="lm")
    _axis(draw, scale, rows[0].top, rows[-1].bottom)
    for row in rows:
        for number, lane in enumerate(row.lanes):
            for record in lane:
                _box(draw, scale, record, row.top + number * LANE)
    return image


def rows_of(records: Sequence[TraceEvent], top: int) -> list[Row]:
    """Return the rows by rank, then by stream; all ranks have the same streams."""
    streams: list[Stream] = [stream for stream in STREAMS if any(record.stream == stream for record in records)]
    rows: list[Row] = []
    for rank in sorted({record.rank for record in records}):
        for stream in streams:
            if rows:
                top = rows[-1].bottom + (GAP if rows[-1].rank == rank else RANK_GAP)
            own = [record for record in records if (record.rank, record.stream) == (rank, stream)]
            rows.append(Row(rank, stream, lanes_of(own) or [[]], top))
    return rows


@dataclass(frozen=True)
class Scale:
    """Conversion from microseconds to pixels from the left."""

    start_us: float
    end_us: float

    def x(self, time_us: float) -> int:
        left = MARGIN + LABELS
        right = WIDTH - MARGIN
        # Avoid a division by zero if all times are equal
        return left + round((right - left) * (time_us - self.start_us) / max(self.end_us - self.start_us, 1e-3))

    def ticks_ms(self) -> list[float]:
        """Return round numbers of milliseconds since the start, at most ten steps apart."""
        length = max(self.end_us - self.start_us, 1e-3) / 1e3
        magnitude = 10 ** math.floor(math.log10(length / 10))
        step = next(factor * magnitude for factor in (1, 2, 5, 10) if length / (factor * magnitude) <= 10)
        return [number * step for number in range(math.floor(length / step) + 1)]


def operation(record: TraceEvent) -> str:
    """Return the key in `COLORS` of a span."""
    if record.stream == "waits":
        return "wait"
    match = _OPERATION.search(record.name)
    return match[1] if match else "other"


def _box(draw: ImageDraw.ImageDraw, scale: Scale, record: TraceEvent, top: int) -> None:
    left = scale.x(record.start_us)
    right = scale.x(record.end_us)
    # Leave a gap between neighbors if there is room
    right = right - 2 if right - left >= 4 else max(right - 1, left)
    color = COLORS[operation(record)]
    font = _font(14)
    draw.rectangle((left, top + 1, right, top + LANE - 2), color)
    text = _fitting(record.name, right - left - 6, font)
    draw.text(((left + right + 1) / 2, top + LANE / 2), text, _ink_on(color), font, anchor="mm")


def _fitting(name: str, room: float, font: ImageFont.FreeTypeFont) -> str:
    """Return the first words of a name that fit into the room."""
    words = name.split()
    while words and font.getlength(" ".join(words)) > room:
        words.pop()
    return " ".join(words)


def _legend(draw: ImageDraw.ImageDraw, operations: set[str]) -> None:
    x = MARGIN + LABELS
    y = MARGIN + TITLE
    font = _font(15)
    for name in (name for name in COLORS if name in operations):
        draw.rectangle((x, y, x + 17, y + 17), COLORS[name])
        draw.text((x + 25, y + 9), name, INK, font, anchor="lm")
        x += 25 + round(font.getlength(name)) + 26


def _axis(draw: ImageDraw.ImageDraw, scale: Scale, top: int, bottom: int) -> None:
    for tick in scale.ticks_ms():
        x = scale.x(scale.start_us + tick * 1e3)
        draw.line((x, top, x, bottom + 6), GRID)
        draw.text((x, bottom + 12), f"{tick:g}", QUIET, _font(14), anchor="ma")
    draw.text((MARGIN + LABELS - 12, bottom + 12), "ms", QUIET, _font(14), anchor="ra")


def _digits(number: float) -> str:
    """Format a number with three significant digits, without an exponent."""
    return f"{number:.{max(0, 2 - math.floor(math.log10(number)))}f}" if number > 0 else "0"


def _ink_on(color: str) -> str:
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else PAPER


def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


if __name__ == "__main__":
    main(sys.argv[1:])
