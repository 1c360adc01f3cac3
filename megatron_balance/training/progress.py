"""Progress of a run, and reports about its iterations."""

import math
from dataclasses import dataclass, field

from megatron_balance.cost.calibration import UNCALIBRATED, Factors
from megatron_balance.observe.balance import LayerReport


@dataclass(kw_only=True)
class Progress:
    """Counters of a run, which checkpoints save."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    bad_in_a_row: int = 0

    def advance(self, samples: int, *, skipped: bool, bad: bool, nan: bool) -> None:
        """Count an iteration.

        Args:
            samples: number of samples that it consumed.
            skipped: whether the optimizer did not step.
            bad: whether this was because of a NaN or infinite loss or gradient.
            nan: whether a loss was NaN.
        """
        self.iteration += 1
        self.consumed_samples += samples
        self.skipped_iterations += skipped
        self.nan_iterations += bad or nan
        self.bad_in_a_row = self.bad_in_a_row + 1 if bad else 0


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Report about one iteration, the same on every rank, except that only the last stage has `losses`."""

    iteration: int
    losses: dict[str, float]
    """`lm loss` per token, and the auxiliary losses averaged over MoE layers."""

    grad_norm: float | None
    learning_rate: float | None
    """None on a rank without parameters."""

    loss_scale: float
    global_batch_size: int
    consumed_samples: int
    """Number of samples that the run has consumed after this iteration."""

    skipped: bool
    """Whether the optimizer did not step (fp16 overflow, or a fault)."""

    num_zeros: float | None = None
    """Number of zeros in the gradients; None unless it is asked for (`--log-num-zeros-in-grad`)."""

    params_norm: float | None = None
    """Norm of all parameters after the step; None until the device has finished it, and unless it is asked for
    (`--log-params-norm`)."""

    layer_losses: dict[str, list[float]] = field(default_factory=dict)
    """Auxiliary losses of every layer of the model, by name; empty unless asked for (`--moe-per-layer-logging`)."""

    seconds: float = math.nan
    """Time of the iteration on the device; NaN until the device has finished it."""

    balance: dict[int, LayerReport] = field(default_factory=dict)
    """Balance of each layer, by layer number; empty until the device has finished the iteration, without a policy, and
    where nobody uses it."""

    calibration: Factors = UNCALIBRATED
    """The factors that the predictions in `balance` contain."""

    fault: str | None = None
    """Source of a NaN or infinite loss or gradient; None if there was none."""
