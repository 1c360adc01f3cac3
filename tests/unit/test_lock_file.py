"""pyproject.toml and requirements-ci.txt: the lock file is complete, and NVIDIA's packages keep their versions."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lock_file

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = lock_file.pins(lock_file.LOCK.read_text(encoding="utf-8"))


def requirement(name: str, lines: list[str]) -> Requirement:
    (found,) = (one for one in map(Requirement, lines) if one.name == name)
    return found


@pytest.mark.skipif(not version("torch").startswith(PINS["torch"]), reason="another torch needs other packages")
def test_the_lock_file_has_every_package_that_is_needed() -> None:
    missing = lock_file.closure(lock_file.project_requirements()).keys() - PINS.keys()
    assert not missing, "run python tools/lock_file.py"
    lines = lock_file.LOCK.read_text(encoding="utf-8").splitlines()
    assert len(PINS) == len([line for line in lines if not line.startswith("#")])
    assert not [line for line in lines if "://" in line or line.startswith("-")]


def test_the_lock_file_is_within_the_ranges() -> None:
    for one in map(Requirement, lock_file.project_requirements()):
        assert one.specifier.contains(PINS[lock_file.canonicalize_name(one.name)]), one


def test_a_closure_follows_extras_and_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = {"a": ["b[x]>=1; python_version > '3'", "c; extra == 'no'"], "b": ["A_d; extra == 'x'"], "a-d": None}
    monkeypatch.setattr(lock_file.importlib.metadata, "requires", needs.__getitem__)
    monkeypatch.setattr(lock_file.importlib.metadata, "version", lambda name: f"1.{len(name)}+cpu")
    assert lock_file.closure(["a"]) == {"a": "1.1", "b": "1.1", "a-d": "1.3"}
