"""Flags of Megatron's that have no effect or are refused, with the reasons: upstream_flags.yaml, and one lookup."""

import functools
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

import yaml

_TABLES = yaml.load(Path(__file__).with_suffix(".yaml").read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))

ACCEPTED: dict[str, str] = {
    entry: reason
    for reason, entries in _TABLES["accepted"].items()
    for entry in re.findall(r"--\S+(?: (?!--)\S+)?", entries)
}
"""Flags without an effect: `--switch`, `--flag VALUE` (any value), or `--flag one|other` (these values only)."""

REFUSED: dict[str, str] = _TABLES["refused"]
"""Reason -> the flags that are refused for this reason; `*` matches any ending."""

IN_SOME_VERSIONS: dict[str, tuple[str, ...]] = {
    "--mla-down-proj-fusion": (),
    "--moe-use-legacy-grouped-gemm": (),
    "--moe-router-score-function": ("sqrtsoftplus",),
}
"""Flag that only some versions of megatron-core have -> (), or the values of it that only some versions accept."""

NOT_INSTALLED = "the installed megatron-core does not have it; leave it out, or install a version that has it"
"""Why such a flag or value is refused."""

REFUSED_VALUES: dict[str, dict[str, str]] = {
    flag: {value: reason for values, reason in reasons.items() for value in values.split()}
    for flag, reasons in _TABLES["refused_values"].items()
}
"""Flag -> the choices of upstream's that are refused -> the reason."""

NO_EFFECT_WITHOUT: dict[str, str] = _TABLES["no_effect_without"]
"""A field, a field and its value, or alternative fields -> the fields whose flags have no effect without it, which a
notice reports."""


@functools.cache
def refusal(flag: str) -> str | None:
    """Return the reason why a flag is refused, or None if it is accepted or unknown."""
    patterns = ((pattern, reason) for reason, names in REFUSED.items() for pattern in names.split())
    return next((reason for pattern, reason in patterns if fnmatchcase(flag, pattern)), None)


def refused_values(flag: str, choices: Collection[str]) -> dict[str, str]:
    """Return the values of a flag that are refused, with the reasons; `choices` are megatron-core's, as installed."""
    absent = (value for value in IN_SOME_VERSIONS.get(flag, ()) if value not in choices)
    return REFUSED_VALUES.get(flag, {}) | dict.fromkeys(absent, NOT_INSTALLED)
