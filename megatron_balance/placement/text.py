"""Placements as text, such as `0 1:5 + 3! . | 2x2 3x0 + 1:7 .`; see `Placement.__str__`."""

import re

EMPTY = -1
"""Content of an empty slot."""

IntRows = tuple[tuple[int, ...], ...]
"""A row of numbers for each rank or expert."""

_SLOT = re.compile(r"(?P<expert>\d+)(x(?P<times>\d+)|:(?P<tokens>\d+))?(?P<primary>!)?")


def printed(home: IntRows, guests: IntRows, hosts: IntRows, primary: tuple[int, ...], quotas: IntRows) -> str:

    def slot(rank: int, expert: int, is_owner: bool) -> str:
        if expert == EMPTY:
            return "."
        times = hosts[expert].count(rank)
        mark = "!" if primary[expert] == rank and not is_owner else ""
        if times and quotas and quotas[expert]:
            return f"{expert}:{quotas[expert][hosts[expert].index(rank)]}{mark}"
        return f"{expert}{f'x{times}' if times != 1 else ''}{mark}"

    rows = []
    for rank, (own, others) in enumerate(zip(home, guests, strict=True)):
        slots = [slot(rank, expert, True) for expert in own]
        if others:
            slots += ["+", *(slot(rank, expert, False) for expert in others)]
        rows.append(" ".join(slots))
    return " | ".join(rows)


def parsed(text: str) -> tuple[IntRows, IntRows, IntRows, tuple[int, ...], IntRows]:
    """Return a placement's home, guests, hosts, primary and quotas; ValueError if a slot is malformed."""
    halves = [[half.split() for half in row.split("+")] for row in text.split("|")]
    rows = [[[_parsed_slot(slot) for slot in half] for half in (*row, [])[:2]] for row in halves]
    home, guests = (tuple(tuple(expert for expert, *_ in row[half]) for row in rows) for half in (0, 1))
    hosts: dict[int, list[int]] = {}
    quotas: dict[int, tuple[int, ...]] = {}
    primary = {expert: rank for rank, row in enumerate(home) for expert in row}
    for rank, (own, others) in enumerate(rows):
        for expert, times, quota, is_primary in own + others:
            hosts.setdefault(expert, []).extend([rank] * times)
            if quota is not None:
                quotas[expert] = (*quotas.get(expert, ()), quota)
            if is_primary:
                primary[expert] = rank
    experts = sorted(primary)
    return (
        home,
        guests,
        tuple(tuple(hosts[expert]) for expert in experts),
        tuple(primary[expert] for expert in experts),
        tuple(quotas.get(expert, ()) for expert in experts) if quotas else (),
    )


def _parsed_slot(text: str) -> tuple[int, int, int | None, bool]:
    """Return (expert, number of vExperts, quota or None, whether it is marked as primary)."""
    if text == ".":
        return EMPTY, 0, None, False
    match = _SLOT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r}: a slot is an expert such as 3, 3x2, 3:40 or 3x2!, or a dot")
    quota = None if match["tokens"] is None else int(match["tokens"])
    return int(match["expert"]), int(match["times"] or 1), quota, match["primary"] is not None
