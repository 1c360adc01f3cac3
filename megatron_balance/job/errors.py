"""Raise the error of one rank on all ranks, at the same place."""

from collections.abc import Callable
from typing import TypeVar

from megatron_balance.job.groups import gather

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. Every rank raises it at the same place.

    The message names the file and the checkpoints that remain.
    """


def outcome(action: Callable[[], object]) -> Exception | None:
    """Run an action and return its exception, or None."""
    try:
        action()
    except Exception as error:
        return error
    return None


def raise_everywhere(error: Exception | None) -> None:
    """Raise the error of the first rank that has one, on every rank. Collective."""
    for rank, failure in enumerate(gather(None if error is None else f"{type(error).__name__}: {error}")):
        if failure is not None:
            raise CheckpointError(f"rank {rank}: {failure}") from error


def everywhere(action: Callable[[], Result]) -> Result:
    """Return the result of an action; if it fails on a rank, raise the first such error on every rank. Collective."""
    results: list[Result] = []
    raise_everywhere(outcome(lambda: results.append(action())))
    return results[0]
