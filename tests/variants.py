"""Variants of tests, of which most run with --slow only."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

import pytest


def variants(cases: Mapping[str, Any] | Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Return the parameters of all cases, with a mark for those that are not `quick`.

    Args:
        cases: arguments by name, or arguments that name themselves; a tuple has an argument for each parameter.
        quick: names of the cases that run without --slow.
    """
    named = cases.items() if isinstance(cases, Mapping) else [(case, case) for case in cases]
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name if isinstance(name, str) else None,
            marks=() if name in quick else pytest.mark.slow,
        )
        for name, case in named
    ]
