"""Run the COPY and RUN steps of a Dockerfile's stage without Docker, in a directory in place of the image.

    python tools/dockerfile_steps.py --stage cpu --directory /tmp/image

This is for machines without a Docker engine. Nothing is isolated: RUN uses this machine's programs. A step that would
change the machine itself (apt-get, useradd) is printed and skipped.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CHANGES_MACHINE = re.compile(r"\b(apt-get|useradd)\b")


class Step(NamedTuple):
    instruction: str
    rest: str


def stages(text: str) -> dict[str, list[Step]]:
    """Return the instructions of every stage by name, starting with FROM."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found: dict[str, list[Step]] = {}
    steps: list[Step] = []
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            steps = found.setdefault(rest.split(" AS ")[-1], [])
        steps.append(Step(instruction, rest.strip()))
    return found


def copied(step: Step) -> tuple[list[str], str]:
    """Return the sources and the target of a COPY."""
    *sources, target = shlex.split(step.rest)
    return sources, target


def copy(sources: list[str], target: Path) -> None:
    """Copy the sources of a COPY, except those that .dockerignore excludes."""
    patterns = (ROOT / ".dockerignore").read_text().split()
    anywhere = shutil.ignore_patterns(*(pattern[3:] for pattern in patterns if pattern.startswith("**/")))

    def ignored(folder: str, names: list[str]) -> set[str]:
        here = {name for name in names if Path(folder) == ROOT and name in patterns}
        return here | anywhere(folder, names)

    for source in sources:
        path = ROOT / source
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True, ignore=ignored)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target / path.name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--stage", metavar="NAME", default="cpu", help="stage of the Dockerfile (default: cpu)")
    parser.add_argument("--directory", type=Path, metavar="DIR", required=True, help="used as WORKDIR; must not exist")
    arguments = parser.parse_args()
    directory = arguments.directory.resolve()
    directory.mkdir(parents=True)
    for step in stages((ROOT / "Dockerfile").read_text())[arguments.stage]:
        skipped = step.instruction not in ("COPY", "RUN") or CHANGES_MACHINE.search(step.rest)
        print(f"{'skipped: ' if skipped else ''}{step.instruction} {step.rest}", flush=True)
        if skipped:
            continue
        if step.instruction == "COPY":
            sources, target = copied(step)
            copy(sources, directory / target)
        else:
            subprocess.run(["bash", "-c", step.rest], cwd=directory, env=os.environ, check=True)


if __name__ == "__main__":
    main()
