"""Numbers of a run in Weights & Biases (`--wandb-project`), by the package wandb, which is optional."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_balance.messages import cleaned


class WandbRun:
    """A run in Weights & Biases; wandb sends its numbers from a process of its own.

    Args:
        directory: for wandb's local files; created if it is missing.
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
        except (OSError, wandb.Error) as error:
            remedy = "log in with `wandb login`, or set WANDB_MODE=offline"
            raise ValueError(f"--wandb-project {project}: {cleaned(error)}; {remedy}") from error

    def add_scalars(self, values: Mapping[str, float], iteration: int) -> None:
        """Add numbers by their tags; iterations must not decrease."""
        self._run.log(dict(values), step=iteration)

    def close(self) -> None:
        """Wait until all numbers are sent, or written if wandb is offline."""
        self._run.finish()
