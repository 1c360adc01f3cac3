"""MoE training scripts of Megatron-LM, as users bring them along, and what becomes of their flags here.

python -m tests.megatron_lm_scripts      # prints the table and the counts of docs/coming_from_megatron_lm.md
"""

import itertools
import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_balance.cli.upstream_flags import ACCEPTED, REFUSED_VALUES, refusal

DATA = Path(__file__).parent / "data" / "megatron_lm_scripts.yaml"
COPIES = {
    path.stem.removeprefix("megatron_flags_"): json.loads(path.read_text(encoding="utf-8"))["flags"]
    for path in sorted(DATA.parent.glob("megatron_flags_*.json"))
}
"""Version of megatron-core -> the flags of its Megatron-LM: first spelling -> all spellings (if there are others),
type, default, choices."""

FILES = (
    *("--data-path", "corpus", "--save", "checkpoints", "--load", "checkpoints", "--tensorboard-dir", "logs"),
    *("--data-cache-path", "cache", "--tokenizer-model", "tokenizer.model"),
)
"""Names of files, which all scripts have."""

OF_ANOTHER_PROGRAM = "unknown to `pretrain_gpt.py`, too; for ModelOpt's programs"


@dataclass(frozen=True)
class Script:
    """A script's flags, without the names of its files, and what is expected of them on GPUs."""

    name: str
    source: str
    ranks: int
    flags: tuple[str, ...]
    refused: tuple[str, ...]
    """Its flags that are refused, in the order of the errors."""
    noticed: tuple[str, ...]
    """First words of the notices about its other flags."""

    @property
    def kept(self) -> list[str]:
        """Its flags, without those that are refused."""
        return without(self.flags, self.refused)


def without(words: Collection[str], flags: Collection[str]) -> list[str]:
    """Return a command line's words without some flags and their values."""
    starts = itertools.accumulate(words, lambda last, word: word if word.startswith("--") else last)
    return [word for word, flag in zip(words, starts, strict=True) if flag not in flags]


def _read() -> dict[str, Script]:
    data = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return {
        name: Script(
            name=name,
            source=entry["from"],
            ranks=entry["ranks"],
            flags=tuple((data["bases"].get(entry.get("base"), "") + " " + entry["flags"]).split()),
            refused=tuple(entry.get("refused", "").split()),
            noticed=tuple(entry.get("noticed", "").split()),
        )
        for name, entry in data["scripts"].items()
    }


SCRIPTS = _read()


def reasons(script: Script) -> dict[str, list[str]]:
    """Return why flags of a script are refused: reason -> flags."""
    found: dict[str, list[str]] = {}
    for flag in script.refused:
        value = script.flags[script.flags.index(flag) + 1] if flag in REFUSED_VALUES else ""
        reason = REFUSED_VALUES.get(flag, {}).get(value) or refusal(flag) or OF_ANOTHER_PROGRAM
        found.setdefault(reason, []).append(f"{flag} {value}".strip())
    return found


def table() -> str:
    """Return the table of scripts in Markdown."""
    lines = ["| script | from | ranks | outcome |", "|---|---|---|---|"]
    for script in SCRIPTS.values():
        refused = (f"{_shown(flags, reason)}: {reason}" for reason, flags in reasons(script).items())
        lines.append(f"| {script.name} | {script.source} | {script.ranks} | {'<br>'.join(refused) or 'parses'} |")
    return "\n".join(lines)


def _shown(flags: list[str], reason: str) -> str:
    # Dashes would make them names of flags that exist
    names = [flag.removeprefix("--") if reason == OF_ANOTHER_PROGRAM else flag for flag in flags]
    return ", ".join(f"`{name}`" for name in names[:3]) + " ..." * (len(names) > 3)


def states() -> Counter[str]:
    """Return how many of Megatron-LM's flags are in each state."""
    accepted = {entry.partition(" ")[0] for entry in ACCEPTED}
    return Counter(
        "refused" if refusal(flag) else "accepted with a notice" if flag in accepted else "supported"
        for flag in {flag for flags in COPIES.values() for flag in flags}
    )


def counts() -> str:
    """Return the numbers of flags and of scripts in words."""
    number = states()
    flags = sum(states().values())
    parse = sum(not script.refused for script in SCRIPTS.values())
    return (
        f"Of {flags} flags, {number['supported']} are supported, {number['accepted with a notice']} are accepted with "
        f"a notice and {number['refused']} are refused. Of {len(SCRIPTS)} scripts, {parse} parse as they are."
    )


if __name__ == "__main__":
    print(counts(), table(), sep="\n\n")
