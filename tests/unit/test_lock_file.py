"""requirements-ci.txt, the lock file: its versions are those that pyproject.toml asks for."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXTRAS = ("hf", "zfp", "report", "dev")
"""Extras of pyproject.toml that need no GPU."""


def test_the_lock_file_is_within_the_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    text = (ROOT / "requirements-ci.txt").read_text(encoding="utf-8")
    pins = {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)}
    # A package index or a local version would hold on one machine only
    assert len(pins) == len([line for line in text.splitlines() if not line.startswith("#")]) and "+" not in text
    for one in map(Requirement, wanted):
        assert one.specifier.contains(pins[canonicalize_name(one.name)]), one
