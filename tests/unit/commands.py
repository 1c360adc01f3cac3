"""Command lines for tests of flags and their checks."""

import dataclasses

from megatron_balance.cli.arguments import Parsed, build_parser, parse_args
from megatron_balance.cli.checks import check
from megatron_balance.cli.command_line import CommandLine
from megatron_balance.device.machine import Machine

CPU = Machine(world_size=8, cuda=False, transformer_engine=False, apex=False)

GPU = Machine(world_size=8, cuda=True, transformer_engine=True, apex=True)

GOOD = {
    **{"--num-layers": "4", "--hidden-size": "48", "--num-attention-heads": "4", "--seq-length": "32"},
    **{"--micro-batch-size": "2", "--train-iters": "20", "--lr": "1e-3", "--num-experts": "8"},
    **{"--tokenizer-type": "NullTokenizer", "--vocab-size": "127"},
}
"""A valid command line, except for the data."""


def argv(flags: str = "", without: str = "") -> list[str]:
    """Return `GOOD` without the flags named in `without`, followed by `flags`, which take precedence."""
    data = [] if "data" in flags or "data" in without.split() else ["--mock-data"]
    good = [part for flag, value in GOOD.items() if flag not in without.split() for part in (flag, value)]
    return good + data + flags.split()


def parse(flags: str = "", world_size: int = 8) -> Parsed:
    return parse_args(argv(flags), dataclasses.replace(CPU, world_size=world_size))


def checked_on(machine: Machine, flags: str = "", given: tuple[str, ...] = ()) -> CommandLine:
    """Call only `check`, for which `machine` defines the available libraries."""
    return check(vars(PARSER.parse_args(argv(flags))), given, machine)


PARSER = build_parser()
