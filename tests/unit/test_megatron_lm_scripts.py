"""The flags of Megatron-LM's MoE scripts parse at the scripts' own sizes, or are refused for a reason."""

import contextlib
import io
from pathlib import Path

import pytest

from megatron_balance.cli.arguments import build_parser, given_fields
from megatron_balance.cli.checks import check
from megatron_balance.cli.command_line import CommandLine
from megatron_balance.cli.optimizer_checks import RELEASE
from megatron_balance.device.machine import Machine
from tests.megatron_lm_scripts import FILES, SCRIPTS, Script, counts, reasons, table, without


def parse(words: list[str], ranks: int) -> CommandLine:
    """Return a checked command line on GPUs, with all notices, or raise the error that a user sees."""
    machine = Machine(ranks, cuda=True, transformer_engine=True, apex=True, wandb=True, emerging=RELEASE)
    parser = build_parser()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            values = vars(parser.parse_args(words))
    except SystemExit as error:
        raise ValueError(said.getvalue()) from error
    return check(values, given_fields(parser, words), machine)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_script_at_its_own_size(script: Script) -> None:
    words = [*script.flags, *FILES]
    why = {flag.split()[0]: reason for reason, flags in reasons(script).items() for flag in flags}
    for position, flag in enumerate(script.refused):
        with pytest.raises(ValueError, match=flag) as error:
            parse(without(words, script.refused[:position]), script.ranks)
        assert why[flag] in str(error.value) or "unrecognized arguments" in str(error.value)
    line = parse([*script.kept, *FILES], script.ranks)
    assert line.distributed_backend == "nccl"
    assert tuple(notice.split()[0].rstrip(":") for notice in line.notices) == script.noticed


def test_the_page_has_the_outcomes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming_from_megatron_lm.md").read_text(encoding="utf-8")
    assert counts() in " ".join(page.split()) and table() in page, "run python -m tests.megatron_lm_scripts"


def test_without_flags() -> None:
    assert without(["--a", "1", "2", "--b", "--c", "3"], ["--a", "--c"]) == ["--b"]
