"""Facts that ranks compare: everything that affects training, found without importing users' modules."""

import dataclasses
import sys
from pathlib import Path

import pytest

from megatron_balance.app import facts
from megatron_balance.cli.arguments import Parsed, parse_args
from megatron_balance.config.run_config import RunConfig
from megatron_balance.device.machine import Machine
from megatron_balance.files.reading import content_digest
from megatron_balance.job.groups import Topology
from tests.distributed.runs import BASE

DOCS = Path(__file__).resolve().parents[2] / "docs" / "running.md"


def parsed(flags: str = "", cuda: bool = False) -> Parsed:
    return parse_args(f"{BASE} {flags}".split(), Machine(1, cuda=cuda, transformer_engine=False, apex=False))


def gathered(flags: str = "", cuda: bool = False) -> facts.Facts:
    command_line = parsed(flags, cuda)
    return facts.gather(command_line.config, command_line.flags, Topology(1, 1))


def changed(flags: str = "", ours: str = "") -> dict[str, str]:
    """Return the facts that these flags change, without consequences of other facts."""
    before, after = (gathered(one) for one in (ours, f"{ours} {flags}"))
    own = {name: value for name, value in after.items() if before.get(name) != value}
    return {name: value for name, value in own.items() if not name.startswith(facts.CONSEQUENCE)}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--seed 7", {"--seed": "7"}),
        ("--hidden-size 64", {"--hidden-size": "64"}),
        ("--use-distributed-optimizer", {"--use-distributed-optimizer": "given"}),
        ("--no-mmap-bin-files", {"--no-mmap-bin-files": "given"}),
        ("--moe-layer-freq [0,1]", {"--moe-layer-freq": "0 1"}),
        ("--exit-signal SIGUSR1", {"--exit-signal": "SIGUSR1"}),
        ("--recompute-activations", {"--recompute-granularity": "selective"}),
        ("--tensorboard-dir here --num-workers 3", {}),
    ],
)
def test_flags_are_facts_as_they_are_written(flags: str, expected: dict[str, str]) -> None:
    assert changed(flags) == expected


def test_every_setting_of_a_run_is_a_fact() -> None:
    names = {name.rpartition(".")[2] for name in gathered() if facts.CONSEQUENCE in name}
    fields = {
        field.name
        for part in dataclasses.fields(RunConfig)
        for field in dataclasses.fields(getattr(parsed().config, part.name))
    }
    assert fields - names == facts.MAY_DIFFER.keys()


def test_a_machine_with_other_devices_is_another_fact() -> None:
    with_cuda, without = (gathered(cuda=cuda) for cuda in (True, False))
    assert with_cuda["setting launch.distributed_backend"] != without["setting launch.distributed_backend"]


def test_the_documents_say_what_may_differ() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert all(f"--{name.replace('_', '-')}" in text for name in facts.MAY_DIFFER)


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_module_is_found_without_importing_what_it_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "somebodys"
    package.mkdir()
    _written(package / "__init__.py", "raise SystemExit('imported')")
    policy = _written(package / "policy.py", "raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert facts.source_of("somebodys.policy") == content_digest(policy)
    assert facts.source_of("somebodys.nothing") == facts.source_of("nobodys.policy") == "not found"
    assert "somebodys" not in sys.modules


def test_the_source_of_a_policy_is_a_fact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parsed().config
    config = config.replace(balance=dataclasses.replace(config.balance, balance_policy="planner:Policy"))
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = []
    for text in ("one = 1", "two = 2"):
        _written(tmp_path / "planner.py", text)
        sources.append(facts.gather(config, {}, Topology(1, 1))["the source of planner"])
    assert len({*sources, "not found"}) == 3


def test_the_content_of_a_calibration_is_a_fact(tmp_path: Path) -> None:
    record = tmp_path / "calibration.jsonl"
    machine = Machine(2, cuda=False, transformer_engine=False, apex=False)
    flags = f"{BASE} --expert-model-parallel-size 2 --balance-policy top2 --balance-calibrate"
    found = []
    for content in ("1", "2"):
        record.write_text(content)
        config, _, flags_as_written = parse_args(f"{flags} {record}".split(), machine)
        found.append(facts.gather(config, flags_as_written, Topology(2, 2)))
    name = f"the content of --balance-calibrate {record}"
    assert {fact for fact in found[0] if found[0][fact] != found[1][fact]} == {name}
    assert not any("content of --balance-calibrate" in fact for fact in gathered())
