"""A page with the results of tools/simulate.py: one bar for each run, in the parts of its time, and tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatron_balance.simulate.result import PARTS

COLORS = {
    "experts": "#2f6db3",
    "other computation": "#6fa3d8",
    "optimizer": "#a9c8e8",
    "codec": "#c9d8e6",
    "exchange": "#c2703d",
    "others' experts": "#d64545",
    "gathers": "#e0a458",
    "context": "#b8860b",
    "Trans": "#7a4fa3",
    "Agg": "#a583c4",
    "Plan": "#d9a7c7",
    "Transfer": "#59407a",
    "pipeline": "#9aa4ae",
    "reduction": "#5f8f5a",
    "launches": "#6b5b4d",
}
"""The color of each member of PARTS: blue is computation, and grey are pipeline bubbles."""

MOVES = ("Trans", "Agg", "Plan", "Transfer")


def page(title: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the page for the results that `--json` writes."""
    longest = max(one["seconds"] for one in results)
    even = next((one["seconds"] for one in results if one["label"] == "even"), None)
    moves = [part for part in MOVES if any(part in one["in_progress_seconds"] for one in results)]
    bars = []
    for one in results:
        parts = [(part, one["mean_seconds"].get(part, 0.0)) for part in PARTS]
        # Ranks that are done before the last one wait for nothing that a part names
        parts.append(("done", one["seconds"] - sum(seconds for _, seconds in parts)))
        shown = [
            {"name": part, "ms": 1e3 * seconds, "width": 100 * seconds / longest, "color": COLORS.get(part, "#fff")}
            for part, seconds in parts
            if seconds > 0
        ]
        bars.append(
            {
                **one,
                "ms": 1e3 * one["seconds"],
                "even": None if even is None else even / one["seconds"],
                "tokens": one["tokens_per_second"] / 1e3,
                "memory": max(one["memory_gib"]),
                "moves": [1e3 * one["in_progress_seconds"].get(part, 0.0) for part in moves],
                "parts": shown,
            }
        )
    used = {part["name"] for bar in bars for part in bar["parts"]}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("simulation.html.j2").render(
        title=title,
        bars=bars,
        legend={part: color for part, color in COLORS.items() if part in used},
        most_memory=max(bar["memory"] for bar in bars),
        moves=moves,
    )
