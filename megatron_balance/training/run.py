"""Run: the objects that build/run.py constructs from a configuration, used by the training loop and checkpoints."""

from dataclasses import dataclass, field

from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import NumMicroBatchesCalculator
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_balance.config.run_config import RunConfig
from megatron_balance.flow.chunks.choice import ChunkChoice
from megatron_balance.job.stall import Position
from megatron_balance.timeline.runtime import Balancer
from megatron_balance.training.data import Data
from megatron_balance.training.loss_guard import LossGuard
from megatron_balance.training.objective import Objective
from megatron_balance.training.paired_passes import PairedPasses
from megatron_balance.training.progress import Progress
from megatron_balance.training.schedule import Length
from megatron_balance.workloads.forced_routing import BatchPart
from megatron_balance.workloads.replay import RecordedChoices


@dataclass(frozen=True, kw_only=True)
class Run:
    """A built run; only `progress` and the objects' own state change."""

    config: RunConfig
    groups: ProcessGroupCollection
    model: list[DistributedDataParallel]
    """Model chunks of this rank."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    batches: NumMicroBatchesCalculator
    length: Length
    data: Data
    vocab_size: int
    guard: LossGuard
    objective: Objective
    part: BatchPart
    """The tokens of a global batch that this rank's routers see."""
    recorded: RecordedChoices | None = None
    """The choices that the routers repeat; None: they choose by themselves."""
    balancer: Balancer | None = None
    chunks: ChunkChoice | None = None
    """Choice of each layer's chunks; None without chunks."""
    pairs: PairedPasses | None = None
    """None: one pass runs after the other."""
    progress: Progress = field(default_factory=Progress)
    position: Position = field(default_factory=Position)
