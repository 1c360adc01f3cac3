"""What argparse leaves to the program: files of flags, why a flag is refused, and how parsing ends."""

import argparse
import shlex
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from megatron_balance.cli.upstream_flags import refusal
from megatron_balance.config.flags import did_you_mean
from megatron_balance.files.reading import KIB, read_text
from megatron_balance.job.endings import Ending
from megatron_balance.messages import cleaned

MAX_FILE_BYTES = 64 * KIB
"""Of a file of flags."""


class Parser(argparse.ArgumentParser):
    """Knows why it refuses a flag, and where the flags come from if not from the command line."""

    source = ""

    def expanded(self, words: Iterable[str]) -> list[str]:
        """A command line with the flags of each `@FILE` in its place; `#` begins a comment there."""
        return [flag for word in words for flag in (self._flags_in(word[1:]) if word.startswith("@") else [word])]

    def _flags_in(self, path: str) -> list[str]:
        try:
            lines = read_text(path, MAX_FILE_BYTES).splitlines()
        except ValueError as error:
            self.error(f"@{error}")
        flags = []
        for number, line in enumerate(lines, 1):
            try:
                words = shlex.split(line, comments=True)
            except ValueError as error:
                self.error(f"@{path}: line {number}: {cleaned(line, 80)!r}: {error}")
            if other := next((word for word in words if word.startswith("@")), None):
                self.error(f"@{path}: line {number}: {cleaned(other, 80)!r}: such files do not name others; give both")
            flags += words
        return flags

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """As argparse does, with an Ending."""
        if message:
            self._print_message(message, sys.stderr)
        ending = Ending(status)
        if message:
            ending.reason = message.removeprefix(f"{self.prog}: error: ").strip()
        raise ending

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> argparse.Namespace:
        """Parse; a flag that is neither ours nor Megatron's, or refused, ends the run with the reason."""
        values, unknown = self.parse_known_args(self.expanded(sys.argv[1:] if args is None else args), namespace)
        for flag in (text.partition("=")[0] for text in unknown):
            if reason := refusal(flag):
                self.error(f"{flag}: {reason}")
        if unknown:
            words = (word + did_you_mean(word.partition("=")[0], self) for word in unknown)
            self.error(f"unrecognized arguments: {' '.join(words)}")
        return values

    def error(self, message: str) -> NoReturn:
        super().error(f"{self.source}{message}")
