"""`--yaml-cfg`: a YAML file of flags -> the same flags as a command line.

The file is only parsed. Its values stay text and go through the same parser as the command line, so that every check
applies, and no object is ever constructed from the file.
"""

from collections.abc import Iterator

import yaml

from megatron_balance.cli.parser import Parser
from megatron_balance.config.flags import did_you_mean
from megatron_balance.files.reading import read_yaml
from megatron_balance.messages import cleaned

BOOL = "tag:yaml.org,2002:bool"
NULL = "tag:yaml.org,2002:null"


def read_flags(path: str, parser: Parser) -> list[str]:
    """Return the flags in the YAML file `path`, in the order of the file.

    A key is the name of one of `parser`'s flags without the leading dashes, written with `-` or `_`. Its value is
    `true` or `false` for a switch, a list for a flag with several values, null for the default. Any other key may have
    a mapping as its value: a section, whose name has no meaning.

    Raises:
        ValueError: the file contains anything else; the error names the file, the key and the remedy.
    """
    root = read_yaml(path, "--yaml-cfg")
    try:
        return [token for flag in _Flags(parser).read(root) for token in flag] if root else []
    except ValueError as error:
        raise ValueError(f"--yaml-cfg {path}: {cleaned(error, 300)}") from error


class _Flags:
    """Reader of the mapping, which remembers the flags that it has seen."""

    def __init__(self, parser: Parser) -> None:
        self.parser = parser
        self.actions = {flag: action for action in parser._actions for flag in action.option_strings}
        self.seen: dict[str, str] = {}

    def read(self, section: yaml.Node) -> Iterator[list[str]]:
        """Yield the flags in a mapping and in its sections."""
        if not isinstance(section, yaml.MappingNode):
            raise ValueError("is not a mapping; write one `flag-name: value` per line")
        for key, value in section.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error(key, "is not a name; write `flag-name: value`")
            flag = f"--{key.value.replace('_', '-')}"
            if flag not in self.actions and isinstance(value, yaml.MappingNode):
                yield from self.read(value)
            else:
                yield self._flag(key, flag, value)

    def _flag(self, key: yaml.ScalarNode, flag: str, value: yaml.Node) -> list[str]:
        action = self.actions.get(flag)
        if action is None and (reason := self.parser.why_unknown(flag)):
            raise _error(key, reason)
        if action is None or flag in ("--help", "--yaml-cfg"):
            raise _error(
                key, f"is not a flag that a file can give{did_you_mean(flag, self.parser)}; --help shows all flags"
            )
        if action.dest in self.seen:
            raise _error(key, f"was given as {self.seen[action.dest]} before; keep one of them")
        self.seen[action.dest] = key.value
        if isinstance(value, yaml.ScalarNode) and value.tag == NULL:
            return []
        if action.nargs == 0:
            if not isinstance(value, yaml.ScalarNode) or value.tag != BOOL:
                raise _error(key, "is a switch; write true or false")
            return [flag] if yaml.SafeLoader.bool_values[value.value.lower()] else []
        if isinstance(value, yaml.SequenceNode):
            if action.nargs is None or not value.value:
                raise _error(key, "takes a value, not this list")
            return [flag, *(_text(key, item, in_list=True) for item in value.value)]
        return [f"{flag}={_text(key, value)}"]


def _text(key: yaml.ScalarNode, value: yaml.Node, in_list: bool = False) -> str:
    """Return a scalar as it is written in the file."""
    if not isinstance(value, yaml.ScalarNode) or value.tag in (BOOL, NULL):
        raise _error(key, "takes a number or text here; put text such as yes, no, on, off in quotes")
    if in_list and value.value.startswith(("-", "@")):
        raise _error(key, f"{value.value[:80]!r} in the list would be taken for a flag, or for a file of flags")
    return value.value


def _error(key: yaml.Node, message: str) -> ValueError:
    name = key.value[:80] if isinstance(key, yaml.ScalarNode) else "a key"
    return ValueError(f"line {key.start_mark.line + 1}: {name}: {message}")
