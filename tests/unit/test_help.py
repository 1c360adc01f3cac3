"""`--help`: every default, every choice, and sentences that say what a flag does."""

import argparse
import re
from collections.abc import Mapping

import pytest

from megatron_balance.cli.arguments import build_parser, parse_args
from megatron_balance.cli.flag_groups import GROUPS, HELP
from megatron_balance.comm.codecs import CODECS
from megatron_balance.comm.registry import ALL_TO_ALLS
from megatron_balance.config.flags import in_words
from megatron_balance.flow.chunks.order import ORDERS
from megatron_balance.planning.policies import registered
from tests.unit.commands import CPU

PARSER = build_parser()
SHOWN = [action for action in PARSER._actions if action.help is not argparse.SUPPRESS]
WITH_VALUE = [action for action in SHOWN if action.nargs != 0]
SWITCHES = [action for action in SHOWN if action.nargs == 0]
IN_SOME_VERSIONS = {
    *("moe_use_legacy_grouped_gemm", "mla_down_proj_fusion", "moe_router_quantile_balancing_ema"),
    *("muon_use_nesterov", "muon_nesterov", "muon_coefficient_type"),
}
"""Fields that only some versions of megatron-core have."""


def name_of(action: argparse.Action) -> str:
    return action.option_strings[0]


def printed(monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    return PARSER.format_help()


def section(flag: str, text: str) -> str:
    """Return what `--help` says about one flag, names included."""
    found = re.search(rf"^  {flag}(?![\w-]).*?(?=^  -|^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, flag
    return found.group()


def test_the_default_is_shown_once() -> None:
    for action in WITH_VALUE:
        text = action.help or ""
        paragraph = text.partition("\n")[0]
        if action.default not in (None, []):
            assert paragraph.endswith(f" Default: {in_words(action.default)}."), name_of(action)
        assert text.count("Default: ") <= 1, name_of(action)
        assert not re.search(r"; default:|[Dd]efaults? (is|to|value)\b|[Bb]y default", text), name_of(action)
        assert re.search(r"\.\Z", paragraph), name_of(action)


def test_a_switch_has_no_default() -> None:
    for action in SWITCHES:
        assert "efault" not in re.sub(r"--\S+", "", action.help or ""), name_of(action)


def test_metavars_are_short_and_choices_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, 400)
    for action in WITH_VALUE:
        header = section(name_of(action), text).strip().partition("  ")[0]
        if action.choices:
            assert f"{{{','.join(map(in_words, action.choices))}}}" in header, name_of(action)
        elif isinstance(action.metavar, tuple):
            assert action.nargs == len(action.metavar), name_of(action)
        else:
            assert re.fullmatch(r"[A-Z]{1,8}|LEFT,RIGHT|\{[\w,]+\}", action.metavar or ""), name_of(action)
            assert action.metavar in header, name_of(action)


@pytest.mark.parametrize(
    ("flag", "known"),
    [
        ("--balance-policy", registered()),
        ("--moe-comm-alltoall", {"default": None, **ALL_TO_ALLS}),
        ("--moe-comm-codec", CODECS),
        ("--moe-comm-order", {**ORDERS, "demi": None}),
    ],
)
@pytest.mark.parametrize("columns", [80, 120])
def test_every_name_has_a_line(flag: str, known: Mapping[str, object], columns: int, monkeypatch) -> None:
    listed = re.findall(r"^ {26}(\w+): \S", section(flag, printed(monkeypatch, columns)), re.MULTILINE)
    assert set(listed) == known.keys() and len(listed) == len(known)


@pytest.mark.parametrize("cls", [*registered().values(), *ALL_TO_ALLS.values(), *CODECS.values()])
def test_the_first_line_of_its_docstring_is_a_sentence(cls: type) -> None:
    assert re.fullmatch(r"[A-Z].+ .+\.\)?", (cls.__doc__ or "").partition("\n")[0])


def test_it_says_what_the_flag_does() -> None:
    empty = re.compile(r"(if|whether|true|switches|controls|enable|makes|determines|this)\b", re.I)
    for action in SHOWN:
        text = action.help or ""
        assert action.nargs != 0 or not empty.match(text), name_of(action)
        assert not re.search(r"\b(None|True|False|should|mcore)\b|_size\b", text), name_of(action)


@pytest.mark.parametrize(
    "action",
    [action for action in SWITCHES if re.match(r"--(no|disable|dis|un)-|--un", name_of(action))],
    ids=name_of,
)
def test_a_negation_says_what_does_not_happen(action: argparse.Action) -> None:
    assert re.search(r"\b(do not|not|instead of)\b", action.help or "", re.I)


def test_every_switch_that_turns_something_off_is_a_negation() -> None:
    names = [name_of(action) for action in SWITCHES if isinstance(action, argparse._StoreFalseAction)]
    assert names and all(re.match(r"--(no|disable|muon-no)-", name) for name in names)


def test_listed_fields_have_flags() -> None:
    listed = [name for shown in GROUPS.values() if isinstance(shown, dict) for name in shown]
    assert len(set(listed)) == len(listed) and set(HELP) <= set(listed)
    assert set(listed) - {action.dest for action in SHOWN} <= IN_SOME_VERSIONS


def test_required_flags_say_so() -> None:
    with pytest.raises(ValueError, match="are required") as error:
        parse_args([], CPU)
    missing = re.findall(r"--[\w-]+", str(error.value).partition(" are required")[0])
    said = [name_of(action) for action in SHOWN if re.search(r"( Required| is required)\.$", action.help or "")]
    assert sorted(said) == sorted(missing)


@pytest.mark.parametrize("columns", [80, 120])
def test_lines_fit_and_flags_stay_whole(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(monkeypatch, columns)
    assert [line for line in text.splitlines() if len(line) > columns] == []
    assert re.findall(r"--[\w-]*-$", text, re.MULTILINE) == []
