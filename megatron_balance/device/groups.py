"""Process groups as values, and which ranks share a node."""

import datetime
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

Result = TypeVar("Result")

BACKSTOP_SECONDS = 6.0
"""Collectives time out this much after `--distributed-timeout-minutes`: first the hang guard names the stalled rank."""


@dataclass(frozen=True)
class Launch:
    """What the launcher (torchrun, srun) told this process through its environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store_rank: int | None = 0
    """The rank whose process holds the key-value store; None: the launcher does."""

    attempt: int = 0
    """How often the launcher has started the job again."""

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and torchrun's; without them, a single process."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            world_size=world_size,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))),
            store_rank=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
            attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )


@dataclass(frozen=True)
class Topology:
    """Which ranks share a node: rank r lives on node r // node_size."""

    world_size: int
    node_size: int

    def node_of(self, rank: int) -> int:
        return rank // self.node_size

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.node_size)


def node_topology(launch: Launch, node_size: int | None) -> Topology:
    """`--moe-comm-node-size` if given, else LOCAL_WORLD_SIZE."""
    size = node_size if node_size is not None else launch.local_world_size
    if not 1 <= size <= launch.world_size:
        raise ValueError(f"--moe-comm-node-size {size}: choose 1 to {launch.world_size} (the number of processes)")
    return Topology(launch.world_size, size)


def expert_node_size(topology: Topology, expert_parallel: int, expert_tensor_parallel: int) -> int:
    """How many ranks of an expert-parallel group share a node.

    The i-th rank of such a group then lives on the group's node i // size. (megatron-core numbers expert tensor
    parallel ranks first and expert-parallel ones next.)

    Raises:
        ValueError: nodes cut the groups into unequal parts.
    """
    block = expert_parallel * expert_tensor_parallel
    firsts = [rank for rank in range(topology.world_size) if rank % block < expert_tensor_parallel]
    size = expert_parallel
    for first in firsts:
        ranks = range(first, first - first % block + block, expert_tensor_parallel)
        shares = [len(list(run)) for _, run in itertools.groupby(ranks, topology.node_of)]
        if first == 0:
            size = shares[0]
        if any(share != size for share in shares[:-1]) or shares[-1] > size:
            raise ValueError(
                f"--moe-comm-node-size {topology.node_size} (default: the launcher's processes per node): nodes cut "
                f"the expert-parallel group of ranks {[*ranks]} unevenly; choose a multiple or a divisor of {block}"
            )
    return size


def start(launch: Launch, backend: str, timeout_minutes: float) -> dist.Store:
    """Join the job: pick this process's device and initialise torch.distributed (rendezvous by environment).

    Returns:
        The job's key-value store.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(launch.local_rank)
    if dist.is_initialized():
        return dist.group.WORLD.get_group_store()
    timeout = datetime.timedelta(minutes=_backend_minutes(timeout_minutes))
    store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    store.set_timeout(timeout)
    # A launcher's store outlives the attempt: without the prefix, ranks would look for addresses of the last attempt
    store = dist.PrefixStore(f"attempt{launch.attempt}", store)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    return store


def _backend_minutes(timeout_minutes: float) -> float:
    return timeout_minutes + BACKSTOP_SECONDS / 60


def build_groups(config: TransformerConfig, seed: int, timeout_minutes: float = 10) -> ProcessGroupCollection:
    """Create the process groups of `config`'s layout and seed this rank's random number generators.

    megatron-core keeps its groups in `parallel_state`, which some of its parts still read; ours take the returned
    collection as a parameter. Call it again after `destroy_groups` for another layout in the same processes.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=_backend_minutes(timeout_minutes),
    )
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)
    return ProcessGroupCollection.use_mpu_process_groups()


def destroy_groups() -> None:
    """Forget the current layout's groups."""
    parallel_state.destroy_model_parallel()


def on_first_rank(action: Callable[[], Result]) -> Result:
    """Call `action` on the job's rank 0 only; every rank gets its result, or raises its error."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # whatever it is, all ranks have to know
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
