"""Dockerfile: it copies files that exist, installs the tested packages, and pins images and versions."""

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")


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


STAGES = stages(TEXT)


def runs(stage: str) -> list[str]:
    """Return the commands of a stage."""
    return [step.rest for step in STAGES[stage] if step.instruction == "RUN"]


def test_stages() -> None:
    assert list(STAGES) == ["cpu", "cpu-develop", "cuda-base", "cuda-wheels", "cuda", "cuda-develop"]
    for image in ("cpu", "cuda"):
        develop = f"{image}-develop"
        for stage in (image, develop):
            assert [step.rest for step in STAGES[stage] if step.instruction == "USER"][-1] == "1000"
        # Only images to develop have the checks
        assert "scripts/setup.sh run" in runs(image) and not any("develop" in step for step in runs(image))
        assert STAGES[develop][0].rest == f"{image} AS {develop}" and "scripts/setup.sh develop" in runs(develop)


def test_nccl_finds_infiniband() -> None:
    (installed,) = (step for step in runs("cuda-base") if "apt-get install" in step)
    assert {"libibverbs1", "ibverbs-providers"} <= set(installed.split())


@pytest.mark.parametrize("stage", STAGES)
def test_copied_files_exist(stage: str) -> None:
    for step in STAGES[stage]:
        if step.instruction == "COPY":
            assert all((ROOT / source).exists() for source in step.rest.split()[:-1]), step


def test_packages_are_the_tested_ones() -> None:
    """The Dockerfile does not repeat the pins of torch and megatron-core."""
    installs = [step for stage in ("cuda-base", "cuda") for step in runs(stage) if "pip install" in step]
    assert len(installs) == 2 and all("--constraint requirements-ci.txt" in step for step in installs)
    assert not re.search(r"\b(torch|megatron-core|numpy)==\d", TEXT)


def test_versions_are_pinned() -> None:
    images = [step.rest.split()[0] for steps in STAGES.values() for step in steps if step.instruction == "FROM"]
    assert all(image in STAGES or re.search(r":\d+\.\d+", image) for image in images)
    assert re.search(r"^ARG APEX=[0-9a-f]{40}$", TEXT, re.MULTILINE)
    (version,) = re.findall(r"^ARG TRANSFORMER_ENGINE=(\S+)$", TEXT, re.MULTILINE)
    ranges = [Requirement(line) for line in requires("megatron-core") or ()]
    wanted = [requirement for requirement in ranges if requirement.name == "transformer-engine"]
    assert wanted and all(requirement.specifier.contains(version) for requirement in wanted)


def test_context_excludes_history_and_environments() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", ".cache", "data"} <= set(ignored)
    # The tests of an image read them
    assert not {"Dockerfile", ".dockerignore"} & set(ignored)
    assert not re.search(r"(?i)(token|secret|password|api_key)", TEXT)


def test_hadolint_passes() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    checked = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
