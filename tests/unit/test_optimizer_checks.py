"""cli/optimizer_checks.py: the package that Muon needs, and notices. tests/mistakes.py has most refusals."""

from dataclasses import replace

import pytest

from megatron_balance.cli.arguments import Parsed, parse_args
from megatron_balance.cli.optimizer_checks import NEWER, RELEASE
from tests.unit.commands import CPU, argv


def parse(flags: str, version: str | None = RELEASE) -> Parsed:
    return parse_args(argv(flags), replace(CPU, emerging=version))


@pytest.mark.parametrize("version", ["0.0.1", "0.1.0rc1", "0.1.7", "0.2.0", "0.4.0"])
def test_versions_of_the_package(version: str) -> None:
    fits = version >= "0.2" if NEWER else version.startswith("0.1.")
    if fits:
        assert parse("--optimizer muon", version).config.optimizer.optimizer == "muon"
        return
    with pytest.raises(
        ValueError, match=rf"^--optimizer muon: .*cannot use emerging-optimizers {version}; pip install"
    ):
        parse("--optimizer muon", version)


def test_notices() -> None:
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel --disable-bias-linear"
    for flags, told in (
        (f"--optimizer muon {tensor}", "--muon-tp-mode duplicated does not"),
        ("--muon-no-split-qkv", "--muon-no-split-qkv has no effect without --optimizer muon"),
        ("--muon-num-ns-steps 3", "--muon-num-ns-steps has no effect without --optimizer muon"),
        ("--optimizer sgd --adam-beta1 0.8", "--adam-beta1 has no effect without --optimizer adam or muon"),
    ):
        assert any(notice.endswith(told) for notice in parse(flags).notices)
    for flags in (f"--optimizer muon --muon-tp-mode distributed {tensor}", "--optimizer muon --adam-beta1 0.8"):
        assert not any("muon" in notice for notice in parse(flags).notices)
