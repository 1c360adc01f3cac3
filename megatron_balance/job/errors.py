"""Raise the error of one rank on all ranks, at the same place."""

from collections.abc import Callable
from typing import TypeVar

from megatron_balance.job.groups import gather

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. Every rank raises it at the same place.

    The message names the file and the checkpoints that remain.
    """


def raise_everywhere(error: Exception | None, kind: type[Exception] = ValueError) -> None:
    """Raise the error of the first rank that has one, on every rank, as an error of this kind. Collective.

    The message of a ValueError stands alone; other messages begin with the error's type.
    """
    own = None
    if error is not None:
        own = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    for rank, failure in enumerate(gather(own)):
        if failure is not None:
            raise kind(f"rank {rank}: {failure}" if rank else failure) from error


def everywhere(action: Callable[[], Result], kind: type[Exception] = ValueError) -> Result:
    """Return the result of an action, or raise its error like `raise_everywhere`. Collective."""
    error = None
    results: list[Result] = []
    try:
        results.append(action())
    except Exception as own:
        error = own
    raise_everywhere(error, kind)
    return results[0]
