"""Our extensions of argparse: files of flags, reasons for refused flags and values, help with lists."""

import argparse
import functools
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from megatron_balance.cli.upstream_flags import IN_SOME_VERSIONS, NOT_INSTALLED, REFUSED_VALUES, refusal, refused_values
from megatron_balance.config.flags import did_you_mean
from megatron_balance.files.reading import KIB, read_text
from megatron_balance.job.endings import Ending
from megatron_balance.messages import cleaned


class HelpFormatter(argparse.HelpFormatter):
    """Keeps one line per value in a help text, and wraps long lists of choices without breaking a flag."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [
            line
            for paragraph in text.splitlines()
            for line in textwrap.wrap(
                paragraph.removeprefix("- "),
                width,
                initial_indent="  " * paragraph.startswith("- "),
                subsequent_indent="    " * paragraph.startswith("- "),
                break_on_hyphens=False,
                break_long_words=False,
            )
        ]

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == "+" and action.choices:
            return f"{self._metavar_formatter(action, default_metavar)(1)[0]} ..."
        return super()._format_args(action, default_metavar)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # A tab marks a place where a list of choices may be wrapped
        header = super()._format_action_invocation(action).replace(",", ",\t").replace(",\t ", ", ")
        lines = textwrap.wrap(
            header,
            self._width - self._current_indent,
            subsequent_indent=" " * (self._current_indent + 4),
            expand_tabs=False,
            replace_whitespace=False,
            break_on_hyphens=False,
        )
        return "\n".join(lines).replace("\t", "")


class Parser(argparse.ArgumentParser):
    """A parser whose errors give the reason for a refused flag, and the file that contains the flag."""

    source = ""
    """Prefix of errors: the file that contains the flags; empty for the command line."""

    def add_without_effect(self, entries: Iterable[str]) -> None:
        """Add flags that do nothing: `--switch`, `--flag VALUE` or `--flag one|other` (these values only).

        The parsed value's attribute is named like the flag, dashes included.
        """
        for entry in entries:
            flag, _, value = entry.partition(" ")
            choices = None if value.isupper() else value.split("|")
            keywords: dict[str, Any] = {"choices": choices} if value else {"action": "store_true"}
            self.add_argument(flag, dest=flag, help=argparse.SUPPRESS, **keywords)

    def refuse_values(self) -> None:
        """Refuse unsupported values of Megatron's flags, each with its reason."""
        for flag in REFUSED_VALUES | IN_SOME_VERSIONS:
            action = self._option_string_actions.get(flag)
            if action is not None and action.choices:
                reasons = refused_values(flag, list(action.choices))
                action.type = functools.partial(_none_of, reasons)
                action.choices = [choice for choice in action.choices if choice not in reasons]

    def why_unknown(self, flag: str) -> str | None:
        """Return the reason why this parser lacks a flag; None if there is none to give."""
        return refusal(flag) or (NOT_INSTALLED if flag in IN_SOME_VERSIONS else None)

    def expanded(self, words: Iterable[str]) -> list[str]:
        """Return the command line with each `@FILE` replaced by the flags in it; `#` starts a comment in the file."""
        return [flag for word in words for flag in (self._flags_in(word[1:]) if word.startswith("@") else [word])]

    def _flags_in(self, path: str) -> list[str]:
        try:
            lines = read_text(path, 64 * KIB).splitlines()
        except ValueError as error:
            self.error(f"@{error}")
        flags = []
        for number, line in enumerate(lines, 1):
            try:
                words = shlex.split(line, comments=True)
            except ValueError as error:
                self.error(f"@{path}: line {number}: {cleaned(line, 80)!r}: {error}")
            if other := next((word for word in words if word.startswith("@")), None):
                remedy = "a flags file cannot include another; pass both on the command line"
                self.error(f"@{path}: line {number}: {cleaned(other, 80)!r}: {remedy}")
            flags += words
        return flags

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit as argparse does, but by raising an Ending."""
        ending = Ending(status)
        if message:
            self._print_message(message, sys.stderr)
            ending.reason = message.removeprefix(f"{self.prog}: error: ").strip()
        raise ending

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # typeshed's overloads
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        """Parse the flags; the error about a refused flag gives the reason."""
        values, unknown = self.parse_known_args(self.expanded(sys.argv[1:] if args is None else args), namespace)
        flags = [word.partition("=")[0] for word in unknown]
        if refused := {flag: reason for flag in flags if (reason := self.why_unknown(flag))}:
            self.error("; ".join(f"{flag}: {reason}" for flag, reason in refused.items()))
        if unknown:
            words = (word + did_you_mean(flag, self) for word, flag in zip(unknown, flags, strict=True))
            self.error(f"unrecognized arguments: {' '.join(words)}")
        return values

    def error(self, message: str) -> NoReturn:
        super().error(f"{self.source}{message}")


def _none_of(reasons: Mapping[str, str], text: str) -> str:
    """Convert the value of one of upstream's flags; the keys of `reasons` are refused."""
    if text in reasons:
        raise argparse.ArgumentTypeError(f"{text}: {reasons[text]}")
    return text
