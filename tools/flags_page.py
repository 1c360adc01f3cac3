"""Write docs/flags.md: every flag, from the same tables that the program parses with.

python tools/flags_page.py
"""

import argparse
import enum
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_balance.cli.arguments import build_parser
from megatron_balance.cli.upstream_flags import ACCEPTED, REFUSED, REFUSED_VALUES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
OURS = "(megatron_balance)"
LONGEST = 220

INTRODUCTION = """# Flags

Written by `python tools/flags_page.py`; `pretrain_gpt_moe.py --help` says the same.

Flags of Megatron-LM (core_v0.16.1) keep their names, defaults and meanings. Each is supported, or accepted with a
notice in the log, or refused with a reason; nothing is silently ignored. Unknown flags are errors, and names are never
completed.

`--yaml-cfg FILE` reads flags from a YAML file: names without dashes before them, written with `-` or `_`, in sections
of any name or none; `true` gives a switch, `false` and `null` leave a flag out, lists are for flags that take several
values. Flags on the command line win. Tags, anchors and aliases are not understood. FILE, here and in `@FILE`, is a
regular file of at most 64 KiB: every rank reads it, so a FIFO such as `<(...)` is refused.

```yaml
model:
  num_layers: 4
  moe_layer_freq: ([0]*1+[1]*3)
lr: 1e-3
bf16: true
data_path: [0.3, code_text_document, 0.7, english_text_document]
```
"""


def page() -> str:
    """The whole page."""
    parser = build_parser()
    groups = [group for group in parser._action_groups if any(_shown(action) for action in group._group_actions)]
    groups.sort(key=lambda group: not (group.title or "").endswith(OURS))
    parts = [INTRODUCTION, "## Supported\n"]
    for group in groups:
        title = {"options": "general"}.get(group.title or "", group.title)
        parts += [f"### {title}\n", "| flag | default | meaning |\n|---|---|---|"]
        parts.append("\n".join(_row(action) for action in group._group_actions if _shown(action)) + "\n")
    parts += ["## Accepted with a notice\n", "| flag | reason |\n|---|---|", "\n".join(_accepted()) + "\n"]
    parts += ["## Refused\n", "`*` stands for any ending.\n", "| reason | flags |\n|---|---|", "\n".join(_refused())]
    return "\n".join(parts) + "\n"


def _shown(action: argparse.Action) -> bool:
    return action.help is not argparse.SUPPRESS and bool(action.option_strings)


def _row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    meaning = _first_sentence((action.help or "").replace("%%", "%"))
    if action.choices and not _names_all(meaning, action):
        meaning += f" One of {', '.join(_text(choice) for choice in action.choices)}."
    several = {"*": " Takes several values.", "+": " Takes several values."}.get(str(action.nargs), "")
    return f"| {names} | {_default(action)} | {_cell(meaning + several)} |"


def _names_all(meaning: str, action: argparse.Action) -> bool:
    return all(re.search(rf"\b{re.escape(_text(choice))}\b", meaning) for choice in action.choices or ())


def _first_sentence(text: str) -> str:
    """Up to the first full stop that ends a sentence, shortened at a word if it is still too long."""
    sentence = re.split(r"(?<=[^.][^.]\.)\s+(?=[A-Z])", text.strip(), maxsplit=1)[0]
    sentence += "" if sentence.endswith(".") else "."
    return sentence if len(sentence) <= LONGEST else sentence[:LONGEST].rsplit(" ", 1)[0] + " ..."


def _default(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "off"
    return "" if action.default is None or action.default == argparse.SUPPRESS else f"`{_text(action.default)}`"


def _text(value: object) -> str:
    return value.name if isinstance(value, enum.Enum) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _accepted() -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for entry, reason in ACCEPTED.items():
        by_reason.setdefault(reason, []).append(f"`{entry}`")
    return (f"| {', '.join(entries)} | {_cell(reason)} |" for reason, entries in by_reason.items())


def _refused() -> Iterator[str]:
    for reason, names in REFUSED.items():
        yield f"| {_cell(reason)} | {', '.join(f'`{name}`' for name in names.split())} |"
    for flag, reasons in REFUSED_VALUES.items():
        for reason in dict.fromkeys(reasons.values()):
            values = [f"`{flag} {value}`" for value in reasons if reasons[value] == reason]
            yield f"| {_cell(reason)} | {', '.join(values)} |"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
