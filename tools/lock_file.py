"""Write requirements-ci.txt: the version of every package that .venv has for this project and its extras.

    python tools/lock_file.py

pip's own way to change a version comes first, for example `pip install --upgrade NAME`. scripts/setup.sh and the
Dockerfile pass the file to pip as constraints, so that each installs only what it needs. It has no hashes: pip takes
them for all packages or for none, and the files of torch differ between machines with and without CUDA.
"""

import importlib.metadata
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements-ci.txt"
EXTRAS = ("hf", "zfp", "report", "dev")
"""Extras of pyproject.toml that need no GPU."""

HEADER = """\
# Versions of the CPU environment that CI tests, for `pip install --constraint`; pyproject.toml has the ranges that
# users may choose from. Written by `python tools/lock_file.py`.
"""


def closure(requirements: Iterable[str]) -> dict[str, str]:
    """Return the installed version of every package that `requirements` need, directly or not, by normalized name."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(line), "") for line in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                waiting += [(Requirement(line), wanted) for line in importlib.metadata.requires(name) or ()]
        # A local version, such as +cpu, says how torch was built
        found[name] = importlib.metadata.version(name).partition("+")[0]
    return found


def project_requirements() -> list[str]:
    """Return what pyproject.toml asks for, with `EXTRAS`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]


def pins(text: str) -> dict[str, str]:
    """Return the versions of a lock file by name."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def main() -> None:
    lines = [f"{name}=={version}\n" for name, version in sorted(closure(project_requirements()).items())]
    LOCK.write_text(HEADER + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
