"""Where a run is, and what each of its iterations was like."""

from dataclasses import dataclass, field

from megatron_balance.observe.balance import LayerReport


@dataclass
class Progress:
    """Where a run is."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    bad_in_a_row: int = 0


@dataclass(frozen=True)
class StepReport:
    """What one iteration was like; the same on every rank, except that `losses` is empty off the last stage."""

    iteration: int
    losses: dict[str, float]
    """`lm loss` per token, then the auxiliary losses averaged over MoE layers."""

    grad_norm: float | None
    learning_rate: float
    loss_scale: float
    global_batch_size: int
    skipped: bool
    """The optimizer did not step (fp16 overflow, or a fault)."""

    seconds: float
    balance: dict[int, LayerReport] = field(default_factory=dict)
    """What balancing did, by layer number; empty without a policy."""

    fault: str | None = None
    """Where a NaN or infinite loss or gradient came from; None if there was none."""
