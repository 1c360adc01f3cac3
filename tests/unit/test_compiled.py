"""Loops in machine code: Python's results, kept for other processes, and no numba for commands that need no loop."""

import os
import subprocess
import sys

import numba
import numpy as np
import pytest

from megatron_balance.device.compiled import compiled


@compiled("int64(int64, int64)")
def larger(one: int, other: int) -> int:
    """Return the larger number."""
    return one if one > other else other


@compiled("int64(int64[::1])")
def largest(values: np.ndarray) -> int:
    found = values[0]
    for index in range(1, len(values)):
        found = larger(found, values[index])
    return found


def test_loops_may_call_each_other() -> None:
    assert largest(np.array([3, 7, 5])) == 7
    assert largest.__wrapped__(np.array([3, 7, 5])) == 7
    assert larger.__doc__ == "Return the larger number."


def test_code_that_cannot_be_kept_is_compiled_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(*args: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return original(*args, **options)

    original = numba.njit
    monkeypatch.setattr(numba, "njit", njit)
    assert compiled("int64(int64, int64)")(larger.__wrapped__)(2, 5) == 5


def test_listing_policies_imports_no_numba() -> None:
    code = """
import sys
from megatron_balance.planning.policies import registered
assert "quota" in registered() and "numba" not in sys.modules
registered()["quota"]()
assert "numba" in sys.modules
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
