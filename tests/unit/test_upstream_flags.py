"""Every flag of Megatron-LM means the same here, is accepted with a notice, or is refused with a reason."""

import dataclasses
import itertools
import re
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.package_info import __shortversion__
from megatron.core.transformer.transformer_config import TransformerConfig

import flags_page
from megatron_balance.cli.arguments import build_parser, parse_args
from megatron_balance.cli.upstream_flags import (
    ACCEPTED,
    IN_SOME_VERSIONS,
    NO_EFFECT_WITHOUT,
    NOT_INSTALLED,
    REFUSED,
    REFUSED_VALUES,
    refusal,
    refused_values,
)
from megatron_balance.config.flags import _default, _names
from megatron_balance.config.run_config import RunConfig
from megatron_balance.training import data
from tests.megatron_lm_scripts import COPIES
from tests.unit.commands import CPU, argv

INSTALLED = COPIES[__shortversion__]


def as_copied(flag: str) -> dict[str, Any]:
    """Return a flag's facts in the installed version, or else in the other one; spellings and choices of both."""
    found = [{"all": [flag]} | flags[flag] for flags in (INSTALLED, *COPIES.values()) if flag in flags]
    # Ordered, because all workers must collect the tests in one order
    both = {key: dict.fromkeys(item for facts in found for item in facts.get(key, ())) for key in ("all", "choices")}
    return found[0] | both


UPSTREAM = {flag: as_copied(flag) for flags in COPIES.values() for flag in flags}
SPELLINGS = {spelling: flag for flag, facts in UPSTREAM.items() for spelling in facts["all"]}

PARSER = build_parser()
ACTIONS = PARSER._option_string_actions
ACCEPTED_VALUES = {flag: value for flag, _, value in (entry.partition(" ") for entry in ACCEPTED)}
SUPPORTED = [flag for flag in UPSTREAM if flag in ACTIONS and flag not in ACCEPTED_VALUES]
REFUSED_SPELLINGS = [spelling for spelling in SPELLINGS if refusal(spelling)]
PATTERNS = [pattern for names in REFUSED.values() for pattern in names.split()]

OTHER_TYPES = {
    "--attention-backend": "an enum, by its members' names",
    "--exit-signal": "an enum, by name or number",
    "--moe-layer-freq": "upstream evaluates the text; here it is parsed",
    "--no-rope-freq": "as --moe-layer-freq",
    "--window-attn-skip-freq": "as --moe-layer-freq",
    "--window-size": "upstream evaluates the text; here it is parsed",
    "--distributed-timeout-minutes": "fractions of a minute too",
}
OTHER_CHOICES = {
    "--exit-signal": "upstream's are the numbers of one machine's signals",
    "--cp-comm-type": "upstream accepts any name",
    "--tiktoken-pattern": "a pattern of one's own, too, as in 0.16.1",
}
OTHER_DEFAULTS = {"--profile-ranks": "as in 0.16.1"} if __shortversion__ != "0.16.1" else {}

OURS = ("--dry-run", "--balance-*", "--moe-comm-*", "--no-moe-parallel-*", "--moe-router-force-*", "--moe-routing-*")
"""Patterns for flags of our own features; REFUSED may list these although upstream has no such flags."""


def test_the_copies_are_whole() -> None:
    assert {version: len(flags) for version, flags in COPIES.items()} == {"0.16.1": 651, "0.19.2": 807}


def test_every_flag_is_in_one_table() -> None:
    for spelling in SPELLINGS:
        accepted = spelling in ACCEPTED_VALUES
        patterns = [pattern for pattern in PATTERNS if fnmatchcase(spelling, pattern)]
        absent = spelling in IN_SOME_VERSIONS and SPELLINGS[spelling] not in INSTALLED
        places = (spelling in ACTIONS and not accepted) + accepted + absent + len(patterns)
        assert places == 1, (spelling, patterns)


def test_no_entry_is_idle() -> None:
    fields = [
        name
        for cls in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
        for field in dataclasses.fields(cls)
        for name in _names(field.name, negated=_default(field) is True)
    ]
    known = [*SPELLINGS, *fields]
    idle = [pattern for pattern in PATTERNS if not any(fnmatchcase(flag, pattern) for flag in known)]
    assert [pattern for pattern in idle if not any(fnmatchcase(pattern, ours) for ours in OURS)] == []
    assert [flag for flag in ACCEPTED_VALUES if flag not in SPELLINGS] == []


def test_a_newer_megatron_core_adds_no_flags() -> None:
    configs = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    fields = {field.name for cls in configs for field in dataclasses.fields(cls)}
    assert [flag for flag, action in ACTIONS.items() if action.dest in fields and flag not in SPELLINGS] == []


def test_supported_flags_are_upstreams() -> None:
    for flag in SUPPORTED:
        action = ACTIONS[flag]
        facts = UPSTREAM[flag]
        assert sorted(action.option_strings) == sorted(facts["all"]), flag
        assert action.nargs == facts.get("nargs"), flag
        # A switch has no visible default: upstream's is None, False or, under another name, True
        assert action.nargs == 0 or (str(action.default) == facts["default"]) == (flag not in OTHER_DEFAULTS), flag
        kind = getattr(action.type, "__name__", "str") if action.nargs != 0 else None
        expected = facts.get("type", "str") if facts.get("nargs") != 0 else None
        assert (kind == expected) == (flag not in OTHER_TYPES), f"{flag}: {kind} here, {expected} upstream"
        choices = {str(choice) for choice in action.choices or ()}
        choices |= refused_values(flag, choices).keys()
        assert (choices == set(facts["choices"])) == (flag not in OTHER_CHOICES), flag


def test_exceptions_are_about_supported_flags() -> None:
    assert {*OTHER_TYPES, *OTHER_CHOICES, *REFUSED_VALUES} <= set(SUPPORTED)
    for flag, reasons in REFUSED_VALUES.items():
        assert reasons.keys() <= UPSTREAM[flag]["choices"].keys()


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [(flag, value, reason) for flag, reasons in REFUSED_VALUES.items() for value, reason in reasons.items()],
)
def test_refused_values(flag: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"argument {flag}: {value}: {reason}" in error_of([flag, value], capsys)


@pytest.mark.parametrize("flag", IN_SOME_VERSIONS)
def test_what_the_installed_version_lacks_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    if flag not in ACTIONS:
        assert f"error: {flag}: {NOT_INSTALLED}\n" in error_of([flag], capsys)
    for value in IN_SOME_VERSIONS[flag]:
        if value in INSTALLED[flag]["choices"]:
            assert getattr(PARSER.parse_args([flag, value]), ACTIONS[flag].dest) in (value, [value])
        else:
            assert f"argument {flag}: {value}: {NOT_INSTALLED}\n" in error_of([flag, value], capsys)


def test_refused_flags(capsys: pytest.CaptureFixture[str]) -> None:
    forms = itertools.cycle(["{}", "{} 1", "{}=1", "{} a b --bf16", "--data-path a {}"])
    for flag, form in zip(REFUSED_SPELLINGS, forms, strict=False):
        assert f"error: {flag}: {refusal(flag)}\n" in error_of(form.format(flag).split(), capsys)


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as error:
        PARSER.parse_args(arguments)
    assert error.value.code == 2
    return capsys.readouterr().err


def accepted_arguments(flag: str) -> list[str]:
    value = ACCEPTED_VALUES[flag]
    return [flag] if not value else [flag, "7" if value.isupper() else value.rpartition("|")[2]]


@pytest.mark.parametrize("flag", ACCEPTED_VALUES)
def test_accepted_flags_take_what_upstream_takes(flag: str) -> None:
    takes_value = UPSTREAM[SPELLINGS[flag]].get("nargs") != 0
    assert bool(ACCEPTED_VALUES[flag]) == takes_value
    assert PARSER.parse_args([*accepted_arguments(flag), "--num-layers", "3"]).num_layers == 3


def test_accepted_flags_are_noticed_and_change_nothing() -> None:
    good = argv("--position-embedding-type rope")
    plain = parse_args(good, CPU)
    given = parse_args([*good, *(text for flag in ACCEPTED_VALUES for text in accepted_arguments(flag))], CPU)
    expected = [f"{entry.partition(' ')[0]}: {reason}" for entry, reason in ACCEPTED.items()]
    assert given.notices == expected + plain.notices
    assert settings_of(given.config) == settings_of(plain.config)


def settings_of(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return all settings except the functions that megatron-core derives, which are new for every config."""
    sections = {field.name: vars(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return {
        name: {key: value for key, value in section.items() if not callable(value)}
        for name, section in sections.items()
    }


@pytest.mark.parametrize("flag", [flag for flag, value in ACCEPTED_VALUES.items() if value and not value.isupper()])
def test_only_what_is_done_anyway_is_accepted(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of([flag, "other"], capsys)
    assert f"argument {flag}: invalid choice: 'other'" in message
    assert all(value in message for value in ACCEPTED_VALUES[flag].split("|"))


def test_data_flags_reach_megatron_core() -> None:
    flags = "--num-dataset-builder-threads 3 --mid-level-dataset-surplus 0.5 --no-mmap-bin-files --data-cache-path x"
    flags += " --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --allow-ambiguous-pad-tokens"
    parsed = parse_args(argv(f"--mock-data {flags}"), CPU)
    config = data._dataset_config(parsed.config, SimpleNamespace(vocab_size=127))
    assert (config.num_dataset_builder_threads, config.mid_level_dataset_surplus) == (3, 0.5)
    assert (config.mmap_bin_files, config.fast_cache_load) == (False, True)
    assert config.defer_npy_index_mmap and config.allow_ambiguous_pad_tokens


def test_conditions_name_fields() -> None:
    fields = {action.dest: action for action in reversed(PARSER._actions)}
    for condition, idle in NO_EFFECT_WITHOUT.items():
        needed, _, value = condition.partition(" ")
        names = [*needed.split("|"), *idle.split()]
        assert {*names} <= fields.keys()
        assert not value or {*value.split("|")} <= {*(fields[needed].choices or ())}
        assert {f"--{name.replace('_', '-')}" for name in names} <= ACTIONS.keys()


@pytest.mark.skipif(__shortversion__ != "0.16.1", reason="the help of megatron-core's flags has changed")
def test_the_page_of_flags_is_up_to_date() -> None:
    written = flags_page.PAGE.read_text(encoding="utf-8")
    assert written == flags_page.page(), "run python tools/flags_page.py"


def test_help_shows_supported_flags_only() -> None:
    shown = set(re.findall(r"(?<![\w-])--[\w-]+", PARSER.format_help()))
    declared = {word for action in PARSER._actions for word in re.findall(r"(?<![\w-])--[\w-]+", action.help or "")}
    assert not {flag for flag in shown - declared if refusal(flag) or flag in ACCEPTED_VALUES}


@pytest.mark.parametrize(
    "text", ["--lr nan", "--clip-grad inf", "--moe-aux-loss-coeff 1 inf", "--attention-dropout=nan"]
)
def test_numbers_are_finite(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(argv(text), CPU)
    assert text.split("=")[0].split()[0] in capsys.readouterr().err
