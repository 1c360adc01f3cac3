"""Early end of a run because of a signal, a time limit or an iteration. All ranks stop at the same iteration."""

import contextlib
import signal
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_balance.config.run_config import TrainConfig
from megatron_balance.device import copies


class Stopping:
    """Decides after every iteration whether the run continues."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.start = time.monotonic()
        self.signalled = False
        self._states: torch.Tensor | None = None
        """[2] whether any rank was signalled, and whether any rank's time was up, after the iteration before."""

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
        """Return the reason to stop after this iteration, or None; collective if a signal or a time limit is set.

        A signal and the time limit end the run one iteration later: by then the device has finished the collective, and
        nobody has to wait for it.
        """
        config = self.config
        if config.exit_interval and iteration % config.exit_interval == 0:
            return f"--exit-interval {config.exit_interval}"
        limit = config.exit_duration_in_mins
        if not config.exit_signal_handler and limit is None:
            return None
        late = limit is not None and time.monotonic() - self.start > limit * 60
        before = self._states
        # One rank's signal or clock decides for all
        states = copies.to_device([self.signalled, late], torch.int32)
        dist.all_reduce(states, op=dist.ReduceOp.MAX)
        self._states = copies.to_host(states)
        signalled, late = (False, False) if before is None else before.tolist()
        if signalled:
            return f"{self.config.exit_signal.name} was received"
        return f"--exit-duration-in-mins {limit}" if late else None
