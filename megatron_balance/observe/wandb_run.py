"""Scalars of a run in Weights & Biases (`--wandb-project`), with the optional package wandb."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_balance.messages import cleaned


class WandbRun:
    """A run in Weights & Biases; wandb sends its numbers from a separate process.

    Args:
        directory: for wandb's local files; created if missing.
        name: of the run; None: wandb chooses one.
        settings: shown as the run's configuration.

    Raises:
        ValueError: wandb cannot start a run.
    """

    def __init__(
        self, project: str, *, name: str | None, entity: str | None, directory: Path, settings: Mapping[str, Any]
    ) -> None:
        import wandb

        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(project=project, name=name, entity=entity, dir=str(directory), config=dict(settings))
        # ValueError: an environment variable of wandb has an invalid value
        except (OSError, ValueError, wandb.Error) as error:
            remedy = "correct that, log in with `wandb login`, or set WANDB_MODE=offline"
            raise ValueError(f"--wandb-project {project}: {cleaned(error).rstrip('.')}; {remedy}") from error

    def add_scalars(self, values: Mapping[str, float], iteration: int, samples: int | None = None) -> None:
        """Add numbers by their tags, and consumed samples as `samples vs steps`; iterations must not decrease."""
        by_samples = {} if samples is None else {"samples vs steps": samples}
        self._run.log({**values, **by_samples}, step=iteration)

    def close(self, failed: bool = False) -> None:
        """Wait until all numbers are sent (or written, if wandb is offline); mark the run as finished or failed."""
        import wandb

        self._run.finish(exit_code=int(failed))
        # Waits for wandb's writing process, which `finish` does not always do
        wandb.teardown(exit_code=int(failed))
