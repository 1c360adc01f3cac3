"""A table of a paper: its numbers, and ours next to them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

WITHIN = (0.1, 0.25)
"""Relative distances from the paper's number that summaries count."""

ANY = math.inf
"""Upper end of a claim of the paper without a number: `more than 1`."""


class Span(NamedTuple):
    """The paper's numbers: from `low` to `high`, which are equal for one number."""

    low: float
    high: float

    def __str__(self) -> str:
        if self.high == ANY:
            return f"> {self.low:g}"
        return f"{self.low:.2f}" if self.low == self.high else f"{self.low:.2f} to {self.high:.2f}"


@dataclass(frozen=True)
class Found:
    """A simulated number, and what the paper says."""

    row: str
    system: str
    paper: Span
    ours: float

    @property
    def is_claim(self) -> bool:
        """Whether the paper gives no number, only what is faster."""
        return self.paper.high == ANY

    @property
    def ratio(self) -> float:
        """Ours over the paper's number, or over the nearest end of its range; 1 inside."""
        return self.ours / min(max(self.ours, self.paper.low), self.paper.high)

    def __str__(self) -> str:
        """Return a line of Markdown."""
        return f"| {self.row} | {self.system} | {self.paper} | {self.ours:.2f} | {self.ratio:.2f} |"


def found(row: str, system: str, paper: float | tuple[float, float], ours: float) -> Found:
    """Return a simulated number next to the paper's number or range."""
    return Found(row, system, Span(*paper) if isinstance(paper, tuple) else Span(paper, paper), ours)


class Table(NamedTuple):
    """A table or figure of a paper."""

    title: str
    """The paper's name, a comma, and what the table shows."""
    rows: Callable[[int], Iterator[Found]]
    """Simulates the rows one by one, with a number of iterations."""

    @property
    def paper(self) -> str:
        return self.title.partition(",")[0]


def heading(table: Table) -> str:
    """Return the lines of Markdown above the rows of a table."""
    return f"\n## {table.title}\n\n| row | system | paper | simulated | ratio |\n|---|---|---|---|---|"


def summary(tables: Mapping[str, Table], rows: Mapping[str, Sequence[Found]]) -> Iterator[str]:
    """Yield how many numbers are near the paper's, for each table, for each paper and for all."""
    yield "\n| table | numbers | within 10% | within 25% | beyond | claims without a number | hold |"
    yield "|---|---|---|---|---|---|---|"
    for name, some in rows.items():
        yield _counts(f"`{name}`", some)
    for paper in dict.fromkeys(tables[name].paper for name in rows):
        yield _counts(
            f"**{paper}**", [one for name, some in rows.items() if tables[name].paper == paper for one in some]
        )
    yield _counts("**all**", [one for some in rows.values() for one in some])


def _counts(name: str, rows: Sequence[Found]) -> str:
    numbers = [one for one in rows if not one.is_claim]
    claims = [one for one in rows if one.is_claim]
    near, far = (sum(abs(one.ratio - 1) <= limit for one in numbers) for limit in WITHIN)
    cells = (len(numbers), near, far, len(numbers) - far, len(claims), sum(one.ratio >= 1 for one in claims))
    return f"| {name} | {' | '.join(map(str, cells))} |"
