"""`--yaml-cfg`: a YAML file of flags -> the same flags as a command line.

The file's values stay text and go through the same parser as the command line, so every check applies. No object is
ever constructed from the file.
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

    A key is the name of one of `parser`'s flags without the leading dashes, written with `-` or `_`. A value is `true`
    or `false` for a switch, a list for a flag with several values, null for the default. Any other key is a section
    whose name has no meaning, and its value is a mapping of flags.

    Raises:
        ValueError: the file contains anything else; the error names the file, the key and the remedy.
    """
    root = read_yaml(path, "--yaml-cfg")
    try:
        return [*_flags(root, parser, {})] if root else []
    except ValueError as error:
        raise ValueError(f"--yaml-cfg {path}: {cleaned(error, 300)}") from error


def _flags(section: yaml.Node, parser: Parser, seen: dict[str, str]) -> Iterator[str]:
    """Yield the flags of a mapping and of its sections; `seen` maps fields to their keys."""
    if not isinstance(section, yaml.MappingNode):
        raise ValueError("is not a mapping; write one `flag-name: value` per line")
    for key, value in section.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _error(key, "is not a name; write `flag-name: value`")
        flag = f"--{key.value.replace('_', '-')}"
        action = parser._option_string_actions.get(flag)
        if action is None and isinstance(value, yaml.MappingNode):
            yield from _flags(value, parser, seen)
            continue
        if action is None and (reason := parser.why_unknown(flag)):
            raise _error(key, reason)
        if action is None or flag in ("--help", "--yaml-cfg"):
            meant = did_you_mean(flag, parser)
            raise _error(key, f"is not a flag that a file can give{meant}; --help shows all flags")
        if action.dest in seen:
            raise _error(key, f"was given as {seen[action.dest]} before; keep one of them")
        seen[action.dest] = key.value
        yield from _words(key, flag, value, action.nargs)


def _words(key: yaml.ScalarNode, flag: str, value: yaml.Node, nargs: int | str | None) -> list[str]:
    if value.tag == NULL:
        return []
    if nargs == 0:
        if value.tag != BOOL:
            raise _error(key, "is a switch; write true or false")
        return [flag] if yaml.SafeLoader.bool_values[value.value.lower()] else []
    if not isinstance(value, yaml.SequenceNode):
        return [f"{flag}={_text(key, value)}"]
    if nargs is None or not value.value:
        raise _error(key, "takes a value, not this list")
    words = [_text(key, item) for item in value.value]
    for word in words:
        if word.startswith(("-", "@")):
            raise _error(key, f"{word[:80]!r} in the list would be taken for a flag, or for a file of flags")
    return [flag, *words]


def _text(key: yaml.ScalarNode, value: yaml.Node) -> str:
    if not isinstance(value, yaml.ScalarNode) or value.tag in (BOOL, NULL):
        raise _error(key, "takes a number or text here; put text such as yes, no, on, off in quotes")
    return value.value


def _error(key: yaml.Node, message: str) -> ValueError:
    name = key.value[:80] if isinstance(key, yaml.ScalarNode) else "a key"
    return ValueError(f"line {key.start_mark.line + 1}: {name}: {message}")
