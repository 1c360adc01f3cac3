"""Flags of Megatron's that have no effect or are refused, with the reasons (upstream_flags.yaml)."""

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
"""Reason -> the flags that it refuses; `*` matches any ending."""

IN_SOME_VERSIONS: dict[str, tuple[str, ...]] = {
    "--mla-down-proj-fusion": (),
    "--moe-use-legacy-grouped-gemm": (),
    "--moe-router-score-function": ("sqrtsoftplus",),
    "--moe-router-load-balancing-type": ("quantile_balancing",),
    "--moe-router-quantile-balancing-ema": (),
    "--muon-coefficient-type": (),
    "--muon-nesterov": (),
    "--muon-use-nesterov": (),
}
"""Flags that only some versions of megatron-core have -> (), or their values that only some versions accept."""

NOT_INSTALLED = "the installed megatron-core does not have it; leave it out, or install a version that has it"
"""Reason to refuse a flag or value that only other versions have."""

REFUSED_VALUES: dict[str, dict[str, str]] = {
    flag: {value: reason for values, reason in reasons.items() for value in values.split()}
    for flag, reasons in _TABLES["refused_values"].items()
}
"""Flag -> refused choice of upstream's -> reason."""

NO_EFFECT_WITHOUT: dict[str, str] = _TABLES["no_effect_without"]
"""Condition -> fields whose flags have no effect unless it holds (a notice reports them). A condition is a field, a
field and its value, or alternative fields or values (`a|b`)."""


@functools.cache
def refusal(flag: str) -> str | None:
    """Return the reason why a flag is refused, or None if it is accepted or unknown."""
    patterns = ((pattern, reason) for reason, names in REFUSED.items() for pattern in names.split())
    return next((reason for pattern, reason in patterns if fnmatchcase(flag, pattern)), None)


def refused_values(flag: str, choices: Collection[str]) -> dict[str, str]:
    """Return the refused values of a flag, with reasons; `choices` are those of the installed megatron-core."""
    absent = (value for value in IN_SOME_VERSIONS.get(flag, ()) if value not in choices)
    return REFUSED_VALUES.get(flag, {}) | dict.fromkeys(absent, NOT_INSTALLED)
