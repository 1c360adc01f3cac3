"""Python's garbage collection at chosen times (`--manual-gc`).

If each rank collects garbage when its own counters say so, the others wait for it in the next collective.
"""

import contextlib
import gc
from collections.abc import Iterator

from megatron_balance.config.training_config import TrainConfig


@contextlib.contextmanager
def at_chosen_times(settings: TrainConfig) -> Iterator[None]:
    """Collect garbage once, and inside the block only when the functions below do, if `--manual-gc` asks for it."""
    if not settings.manual_gc:
        yield
        return
    gc.disable()
    gc.collect()
    try:
        yield
    finally:
        gc.enable()


def after_step(settings: TrainConfig, iteration: int) -> None:
    """Collect garbage if this iteration is due."""
    if settings.manual_gc and settings.manual_gc_interval and iteration % settings.manual_gc_interval == 0:
        gc.collect()


@contextlib.contextmanager
def around_evaluation(settings: TrainConfig) -> Iterator[None]:
    """Collect garbage before the block, and afterwards what the block has left."""
    due = settings.manual_gc and settings.manual_gc_eval
    if due:
        gc.collect()
    yield
    if due:
        gc.collect(generation=0)
