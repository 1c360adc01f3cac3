"""What tests of training runs share: curves that several of them compare with, each trained once."""

from collections.abc import Callable

import pytest

from tests.distributed import runs
from tests.distributed.runs import Curve


@pytest.fixture(scope="session")
def curve_of(ranks) -> Callable[[str, int], Curve]:
    """`curve_of(flags, iterations)`: what all of four ranks saw; a part of a known curve where it is long enough."""
    known: dict[str, Curve] = {}

    def of(flags: str, iterations: int = 20) -> Curve:
        if len(known.get(flags, ())) < iterations:
            curves = ranks(4).run(runs.train_curve, flags, iterations)
            assert all(curve == curves[0] for curve in curves)
            known[flags] = curves[0]
        return known[flags][:iterations]

    return of
