"""A layout of any size, checked in one process: groups, schedule and memory, with nothing allocated.

    for the first rank of each pipeline stage: an imagined job -> build_run, as in a real one -> what it holds

Groups, model, optimizer and guest slots are those that `build_run` makes, so their sizes are exact. Activations are
estimated (memory.py).
"""

import contextlib
import copy
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model

from megatron_balance.app.memory import Chunk, Tokens, chunk_activations, peak
from megatron_balance.build.run import build_run
from megatron_balance.build.tokens import layer_shape
from megatron_balance.config.run_config import RunConfig
from megatron_balance.device import cpu
from megatron_balance.flow.layer import BalancedMoELayer
from megatron_balance.job import groups
from megatron_balance.job.groups import Topology
from megatron_balance.job.layout import destroy_groups
from megatron_balance.timeline import hooks
from megatron_balance.timeline.actions import Operation
from megatron_balance.training.optimizer_state import allocate, optimizers, state_names
from megatron_balance.training.run import Run

GIB = 2**30

GROUPS = (
    ("tensor parallel", "tp"),
    ("expert parallel", "ep"),
    ("expert tensor parallel", "expt_tp"),
    ("data parallel", "dp"),
    ("expert data parallel", "expt_dp"),
    ("pipeline parallel", "pp"),
)
"""What groups are called here, and in megatron-core's collection."""

MOVES = (Operation.PLAN, Operation.TRANS, Operation.AGG)

COLUMNS = ("parameters", "gradients", "optimizer", "guests", "activations", "total")
"""Of memory."""

LEGEND = """\
parameters ... guests: of the first rank of each stage; the distributed optimizer's share may be smaller on others.
activations: of as many microbatches as are kept at once.
Not counted, so leave room: temporary tensors, messages, what libraries hold, fragmentation."""


@dataclass(frozen=True)
class Held:
    """What a rank holds through the whole run, in bytes; `count` are the elements of its parameters."""

    count: int
    parameters: int
    gradients: int
    optimizer: int
    """Main parameters, if they are others than the model's, and moments."""

    guests: int
    """Weights and gradients of guest slots."""


@dataclass(frozen=True)
class Stage:
    """A rank of a pipeline stage."""

    layers: int
    moe_layers: int
    held: Held
    activations: int
    microbatches: int
    """Whose activations are kept at once, at most, those of each model chunk counted."""


def dry_run(config: RunConfig, notices: Iterable[str], topology: Topology) -> None:
    """Print what a run with this configuration would be like on `topology.world_size` processes.

    Raises:
        ValueError: as a real run would.
    """
    if not cpu.installed():
        raise ValueError("--dry-run: on a machine with CUDA, give it on the command line, not in a file")
    world_size, stages = topology.world_size, config.transformer.pipeline_model_parallel_size
    _say(f"dry run of {world_size} processes, {topology.node_size} on a node: nothing is allocated")
    _say(*(f"note: {notice}" for notice in (*notices, *_unlike(config))))
    rows = []
    for rank in range(0, world_size, world_size // stages):
        with imagined_run(config, rank, world_size) as run:
            if rank == 0:
                _say(*_groups(run.groups, topology), *_pipeline(run))
            rows.append(inspect(config, run))
            _say(_balancing(run))
    _say(*_memory(rows, world_size // stages))


@contextlib.contextmanager
def imagined_run(config: RunConfig, rank: int, world_size: int) -> Iterator[Run]:
    """The run that one rank of a job would build, without data and without memory."""
    with groups.imagined_job(rank, world_size), cpu.allocating_nothing():
        try:
            yield build_run(_buildable(config), with_data=False)
        finally:
            destroy_groups()


def _buildable(config: RunConfig) -> RunConfig:
    """The same sizes from what is at hand on every machine."""
    transformer, balance = copy.copy(config.transformer), config.balance
    # Transformer Engine's modules have the parameters of megatron-core's own
    transformer.transformer_impl, transformer.moe_grouped_gemm = "local", False
    transformer.perform_initialization = False
    if balance.balance_profile == "auto":
        balance = dataclasses.replace(balance, balance_profile="builtin")
    return config.replace(transformer=transformer, balance=balance)


def _unlike(config: RunConfig) -> Iterator[str]:
    """What differs from a real run, one sentence each."""
    if config.balance.balance_profile == "auto":
        yield "--balance-profile auto: nothing is measured; choices below are those of builtin"
    yield "no checkpoint is looked at, and of data a few places in those files that are here"


def held(run: Run) -> Held:
    """Bytes that a built run takes on this rank as soon as its optimizer has stepped; exact."""
    allocate(run.optimizer)
    parameters = [parameter for chunk in run.model for parameter in chunk.parameters()]
    buffers = [buffer for chunk in run.model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    kept = []
    for part in optimizers(run.optimizer):
        names = state_names(part.optimizer)
        for main in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
            kept += [main, *(part.optimizer.state[main][name] for name in names)]
    return Held(
        count=sum(parameter.numel() for parameter in parameters),
        parameters=_bytes(parameters),
        gradients=_bytes(buffer.grad_data for buffer in buffers),
        # In full precision, main parameters are the model's
        optimizer=_bytes([*parameters, *kept]) - _bytes(parameters),
        guests=0 if run.balancer is None else run.balancer.guest_bytes,
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of all storages behind them; each counts once."""
    return sum({storage._cdata: storage.nbytes() for storage in (one.untyped_storage() for one in tensors)}.values())


def inspect(config: RunConfig, run: Run) -> Stage:
    """What a rank of this pipeline stage holds; activations are those of `config`'s modules, not of `run`'s."""
    chunks = [model_chunk(chunk) for chunk in run.model]
    tokens = balanced_tokens(config, run)
    kept = [chunk_activations(config, chunk, tokens, run.vocab_size) for chunk in chunks]
    passes = hooks.stage_passes(config.transformer, run.groups.pp.rank(), run.batches.get())
    layers = [moe for chunk in chunks for moe in chunk.moe]
    return Stage(len(layers), sum(layers), held(run), *peak(passes, kept))


def model_chunk(chunk: torch.nn.Module) -> Chunk:
    """What a built model chunk consists of."""
    model = unwrap_model(chunk)
    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
    return Chunk(tuple(isinstance(one.mlp, BaseMoELayer) for one in layers), model.pre_process, model.post_process)


def balanced_tokens(config: RunConfig, run: Run) -> Tokens:
    """Of a microbatch on each rank, if every expert gets as many."""
    transformer, tensor = config.transformer, run.groups.tp.size()
    whole = config.train.micro_batch_size * config.model.seq_length // transformer.context_parallel_size
    part = whole // tensor if transformer.sequence_parallel else whole
    if transformer.num_moe_experts is None:
        return Tokens(whole, part, 0)
    layers = [module for chunk in run.model for module in chunk.modules() if isinstance(module, BalancedMoELayer)]
    splits = any(layer.parallel.splits_tokens or layer.parallel.splits_rows for layer in layers[:1])
    rows = layer_shape(config, run.groups).rows * run.groups.expt_tp.size()
    return Tokens(whole, part, rows // tensor if splits or transformer.sequence_parallel else rows)


def _groups(collection: ProcessGroupCollection, topology: Topology) -> list[str]:
    lines = ["", "groups of rank 0 (exact)"]
    for name, attribute in GROUPS:
        ranks = dist.get_process_group_ranks(getattr(collection, attribute))
        nodes = len({topology.node_of(rank) for rank in ranks})
        lines.append(f"  {name:22} {len(ranks):5}  {in_words(ranks)}{f', on {nodes} nodes' if nodes > 1 else ''}")
    lines.append(f"  {'node':22} {topology.node_size:5}  {in_words(range(topology.node_size))}")
    return lines


def in_words(ranks: Sequence[int]) -> str:
    """Such as `ranks 0-7`, `ranks 0, 8 ... 56` or `ranks 0, 1, 4, 5`."""
    steps = {after - before for before, after in itertools.pairwise(ranks)}
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if steps == {1}:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4:
        return f"ranks {ranks[0]}, {ranks[1]} ... {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _pipeline(run: Run) -> list[str]:
    config, train, microbatches = run.config.transformer, run.config.train, run.batches.get()
    stages, chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    ahead = []
    for stage in range(stages):
        passes = hooks.stage_passes(config, stage, microbatches)
        ahead.append(len([*itertools.takewhile(lambda one: one.forward, passes)]))
    kind = "1F1B" if chunks is None else f"interleaved 1F1B, {chunks} model chunks on each"
    return [
        "",
        "schedule (exact)",
        f"  {run.length.iterations} iterations of {train.global_batch_size} samples: {microbatches} microbatches of "
        f"{train.micro_batch_size} on {run.groups.dp.size()} data-parallel ranks",
        f"  {stages} pipeline stages, {kind}; forward passes before the first backward one: "
        f"{', '.join(map(str, ahead))}",
    ]


def _balancing(run: Run) -> str:
    """How a stage's iteration is scheduled; validates the schedule."""
    stage, balance = f"  stage {run.groups.pp.rank()}: ", run.config.balance
    if run.balancer is None or not run.balancer.layers:
        return f"{stage}every expert on its owner"
    schedule = run.balancer.schedule(run.batches.get())
    started = Counter(one.operation for step in schedule for one in (*step.planning, *step.communication))
    counts = ", ".join(f"{started[operation]} {operation}" for operation in MOVES)
    return f"{stage}{balance.balance_policy}, overlap {balance.balance_overlap}: {counts} in {len(schedule)} steps"


def _memory(rows: Sequence[Stage], ranks: int) -> list[str]:
    """The table of all stages."""
    names = "".join(f"{name:>13}" for name in COLUMNS)
    lines = ["", "memory per rank, GiB (exact, but for activations: estimated, for even routing)"]
    lines.append(f"stage {'ranks':>12} {'layers (MoE)':>12} {'10^9 param.':>11}{names} {'microbatches':>13}")
    for number, stage in enumerate(rows):
        own = stage.held
        sizes = (own.parameters, own.gradients, own.optimizer, own.guests, stage.activations)
        cells = "".join(f"{size / GIB:13.2f}" for size in (*sizes, sum(sizes)))
        where = f"{number * ranks}-{number * ranks + ranks - 1}" if ranks > 1 else f"{number}"
        layers, billions = f"{stage.layers} ({stage.moe_layers})", own.count / 1e9
        lines.append(f"{number:5} {where:>12} {layers:>12} {billions:11.3f}{cells} {stage.microbatches:13}")
    return [*lines, LEGEND]


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)
