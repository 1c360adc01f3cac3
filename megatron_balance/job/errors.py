"""Errors of one rank that all ranks raise, at the same place."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the message names the file and says what is left.

    Every rank raises it, and at the same place.
    """


def outcome(action: Callable[[], object]) -> Exception | None:
    """The error that an action ends with, or None."""
    try:
        action()
    except Exception as error:
        return error
    return None


def gather(value: Result) -> list[Result]:
    """Every rank's value, by rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raise_everywhere(error: Exception | None) -> None:
    """Raise on every rank if any rank has an error: the first rank's that has one."""
    for rank, failure in enumerate(gather(None if error is None else f"{type(error).__name__}: {error}")):
        if failure is not None:
            raise CheckpointError(f"rank {rank}: {failure}") from error
