"""Loops in machine code: Python's results, kept for other processes, and no numba for commands that need no loop."""

import os
import subprocess
import sys
from pathlib import Path

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


@pytest.fixture
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(type(numba.njit(larger.__wrapped__)), "enable_caching", refuse)


def test_code_that_cannot_be_kept_is_compiled_anyway(nothing_is_kept: None) -> None:
    assert compiled("int64(int64, int64)")(larger.__wrapped__)(2, 5) == 5


def test_every_function_that_python_calls_is_optimized(nothing_is_kept: None) -> None:
    """Also one that is compiled because another one calls it. numba does not show code that is kept."""

    @compiled(None)
    def doubled(value: int) -> int:
        return 2 * value

    @compiled("int64(int64)")
    def quadrupled(value: int) -> int:
        return doubled(doubled(value))

    @compiled("int64(int64[::1])")
    def added(values: np.ndarray) -> int:
        return values[0] + quadrupled(values[1])

    added.prepare()
    for function, callee in ((quadrupled, "doubled"), (added, "quadrupled")):
        (llvm,) = function._code.inspect_llvm().values()
        body = llvm[llvm.index("\ndefine ") : llvm.index("\n}")]
        # Only optimization puts the code of a function into those that call it
        assert function.__name__ in body and callee not in body
        # Names that are not internal may be bound to code that is not optimized
        assert "linkonce" not in llvm
    assert added(np.array([1, 3])) == 13


CALLEE = """
from megatron_balance.device.compiled import compiled

@compiled(None)
def given(x):
    return x + {}
"""
CALLER = """
from megatron_balance.device.compiled import compiled
from callee import given

@compiled("int64(int64)")
def called(x):
    return given(x)

print(called(0))
"""
TYPED_CALLEE = """
from typing import Annotated, NamedTuple
import numpy as np

class Numbers(NamedTuple):
    values: Annotated[np.ndarray, "int64[::1]"]

KIND = Numbers
"""
TYPED_CALLER = """
import numpy as np
from callee import KIND
from megatron_balance.device.compiled import compiled

@compiled(f"{KIND.__name__}(int64)", KIND)
def called(x):
    return KIND(np.full(1, x))

print(called(3).values[0])
"""
PROGRAM = """
import sys
from megatron_balance.device import compiled

for digest in sys.argv[1:]:
    compiled._digest = lambda: digest
    import caller
    del sys.modules["caller"], sys.modules["callee"]
"""


def test_kept_code_is_not_used_if_a_file_with_loops_has_changed(tmp_path: Path) -> None:
    """The code of a loop contains the loops that it calls."""
    (tmp_path / "caller.py").write_text(CALLER + "\n")

    def results(added: int, *digests: str) -> list[str]:
        (tmp_path / "callee.py").write_text(CALLEE.format(added))
        path = os.pathsep.join([str(tmp_path), *sys.path])
        command = [sys.executable, "-B", "-c", PROGRAM, *digests]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        ).stdout.split()

    assert results(1, "one") == ["1"]
    kept, compiled_again = results(2, "one", "two")
    assert kept == "1", "the code was not kept"
    assert compiled_again == "2"


def test_kept_code_of_types_that_are_gone_is_compiled_again(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(TYPED_CALLER)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    for name in ("Former", "Latter"):
        (tmp_path / "callee.py").write_text(TYPED_CALLEE.replace("Numbers", name))
        command = [sys.executable, "-B", "-c", PROGRAM, name]
        found = subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
        ).stdout
        assert found.split() == ["3"]


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
