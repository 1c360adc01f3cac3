"""CommandLine: the values of all flags, which checks read, complete and name in their messages."""

import argparse
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from megatron_balance.config.flags import flag_of, in_words
from megatron_balance.device.machine import Machine


class CommandLine(argparse.Namespace):
    """Every flag's value, as an attribute named like the flag's field. Checks also store the settings that they derive.

    An item is the flag as it is written, for messages: `line["num_layers"]` is `--num-layers 4`. `given` contains the
    fields whose flags the user wrote.
    """

    def __init__(self, values: Mapping[str, Any], given: Collection[str], machine: Machine) -> None:
        super().__init__(**values)
        self.given = given
        self.machine = machine
        self.notices: list[str] = []
        """Decisions made for the user, as sentences for the log."""

    def __getitem__(self, name: str) -> str:
        value = getattr(self, name)
        return flag_of(name) if isinstance(value, bool) else f"{flag_of(name)} {in_words(value)}".rstrip()

    def get(self, name: str) -> Any:
        """Return a field's value; None if this version of megatron-core does not have the field."""
        return getattr(self, name, None)

    def refuse(self, names: Iterable[str], reason: str) -> None:
        """Refuse a flag of these fields that has any value but None, False or 0."""
        for name in names:
            if self.get(name):
                raise ValueError(f"{flag_of(name)}: {reason}")

    def refuse_idle(self, names: Iterable[str], other: str) -> None:
        """Refuse a flag of these fields that the user wrote, although it has no effect with another flag."""
        for name in names:
            if name in self.given:
                raise ValueError(f"{flag_of(name)}: has no effect with {other}; leave it out")

    @property
    def expert_tp(self) -> int:
        """The expert-tensor-parallel size; default: the tensor-parallel size."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def has_engine(self) -> bool:
        """Whether Transformer Engine can be used."""
        return self.machine.cuda and self.machine.transformer_engine
