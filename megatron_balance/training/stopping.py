"""Early end of a run because of a signal, a time limit or an iteration. All ranks stop at the same iteration."""

import contextlib
import signal
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_balance.config.run_config import TrainConfig


class Stopping:
    """Decides after every iteration whether the run continues."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.start = time.monotonic()
        self.signalled = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """With `--exit-signal-handler`, record `--exit-signal` instead of being killed by it."""
        if not self.config.exit_signal_handler:
            yield
            return
        previous = signal.signal(self.config.exit_signal, self._note)
        try:
            yield
        finally:
            signal.signal(self.config.exit_signal, previous)

    def _note(self, number: int, frame: object) -> None:
        self.signalled = True

    def reason(self, iteration: int) -> str | None:
        """Return the reason to stop after this iteration, or None; collective if a signal or a time limit is set."""
        config = self.config
        if config.exit_interval and iteration % config.exit_interval == 0:
            return f"--exit-interval {config.exit_interval}"
        limit = config.exit_duration_in_mins
        if not config.exit_signal_handler and limit is None:
            return None
        late = limit is not None and time.monotonic() - self.start > limit * 60
        # One rank's signal or clock decides for all
        state = torch.tensor([self.signalled, late], dtype=torch.int32, device=torch.cuda.current_device())
        dist.all_reduce(state, op=dist.ReduceOp.MAX)
        signalled, late = state.tolist()
        if signalled:
            return f"{self.config.exit_signal.name} was received"
        return f"--exit-duration-in-mins {limit}" if late else None
