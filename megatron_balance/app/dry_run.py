"""Checks a layout of any size in one process, without its tensors' memory; prints groups, schedule and memory.

For the first rank of each pipeline stage, `build_run` builds groups, model, optimizer and guest slots as in a real job,
so their sizes are exact. Activations are estimated (memory.py).
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_attr_wrapped_model

from megatron_balance.app.memory import ChunkParts, Tokens, chunk_activations, peak
from megatron_balance.build.profiles import even_rows, microbatch_tokens
from megatron_balance.build.run import build_run
from megatron_balance.config.run_config import RunConfig
from megatron_balance.device import cpu
from megatron_balance.flow.device_dispatcher import most_rows
from megatron_balance.flow.layer import moe_layers
from megatron_balance.flow.plan import certified_rows
from megatron_balance.job.agreement import in_words
from megatron_balance.job.groups import Topology, imagined_job
from megatron_balance.job.layout import destroy_groups
from megatron_balance.profile.cluster import Cluster, is_cluster, read
from megatron_balance.timeline import hooks
from megatron_balance.timeline.actions import Operation
from megatron_balance.training.optimizer_state import allocate, optimizers, state_names
from megatron_balance.training.run import Run

GIB = 2**30

_print = functools.partial(print, sep="\n", flush=True)

TIGHT = 0.1
"""Warn if less than this fraction of a GPU's memory remains for what a dry run does not count."""

REMEDIES = {
    "parameters": "a larger --pipeline-model-parallel-size, --expert-model-parallel-size or "
    "--tensor-model-parallel-size",
    "gradients": "a larger --pipeline-model-parallel-size or --expert-model-parallel-size, or --grad-reduce-in-bf16",
    "optimizer": "--use-distributed-optimizer, more data-parallel ranks, or a larger --pipeline-model-parallel-size",
    "guests": "a smaller --balance-guest-slots, or --balance-policy none",
    "activations": "--recompute-granularity, a smaller --micro-batch-size, or tensor parallelism with "
    "--sequence-parallel",
}
"""Ways to reduce each use of memory."""

GROUPS = {
    **{"tensor parallel": "tp", "expert parallel": "ep", "expert tensor parallel": "expt_tp", "context parallel": "cp"},
    **{"data parallel": "dp", "expert data parallel": "expt_dp", "pipeline parallel": "pp"},
}
"""Group name in the output -> attribute of megatron-core's group collection."""

LEGEND = """\
parameters ... guests: on the first rank of each stage; other ranks may hold a smaller share of the optimizer.
activations: of all microbatches that the stage keeps at once.
Not counted, so leave room: temporary tensors, messages, buffers of libraries, fragmentation."""

CERTIFIED = (
    "activations of certified passes (--balance-certify, estimated), and rows of a rank's experts in a microbatch"
)

UNCERTIFIED = "  other passes have no useful bound: all rows of an expert-parallel group may arrive at one rank"


class StageMemory(NamedTuple):
    """Memory of a rank of a pipeline stage."""

    layers: int
    moe_layers: int
    parameters: int
    uses: dict[str, int]
    """Bytes by use, a key of REMEDIES; `optimizer` includes separate main parameters."""
    microbatches: int
    """Largest number of microbatches whose activations the rank keeps at the same time, summed over model chunks."""


def dry_run(config: RunConfig, notices: Iterable[str], topology: Topology) -> None:
    """Print groups, schedule and memory of a job on `topology`; ValueError if it could not run or does not fit."""
    if not cpu.installed():
        raise ValueError("--dry-run: on a machine with CUDA, give it on the command line, not in a file")
    world_size = topology.world_size
    stages = config.transformer.pipeline_model_parallel_size
    flag = "--balance-profile" if config.launch.cluster is None else "--cluster"
    path = config.launch.cluster or config.balance.balance_profile
    cluster = read_cluster(flag, path, topology) if is_cluster(Path(path)) or flag == "--cluster" else None
    _print(f"dry run of {world_size} processes, {topology.node_size} on a node: nothing is allocated")
    _print(*(f"note: {notice}" for notice in (*notices, *_differences(config))))
    rows = []
    certified = []
    consecutive = world_size // stages
    if config.launch.use_tp_pp_dp_mapping:
        consecutive = config.transformer.tensor_model_parallel_size * config.transformer.context_parallel_size
    held_by = [[rank for rank in range(world_size) if rank // consecutive % stages == stage] for stage in range(stages)]
    for rank, *_ in held_by:
        with imagined_run(config, rank, world_size) as run:
            if rank == 0:
                _print(*_groups(run.groups, topology), *_pipeline(run))
            rows.append(inspect(config, run))
            if config.balance.balance_certify is not None:
                certified.append(_certified(config, run))
            _print(_balancing(run))
    _print(*_memory(rows, held_by, "certified passes" if certified else "even routing"))
    if certified:
        _print("", CERTIFIED, *certified, UNCERTIFIED)
    if cluster is None:
        _print("To see whether it fits, give --cluster FILE, such as configs/clusters/h100.yaml.")
    else:
        _print(verdict([row.uses for row in rows], cluster, f"{flag} {path}"))


@contextlib.contextmanager
def imagined_run(config: RunConfig, rank: int, world_size: int) -> Iterator[Run]:
    """Yield the run that one rank of a job would build, without data and without allocating memory."""
    with imagined_job(rank, world_size), cpu.allocating_nothing():
        try:
            yield build_run(_buildable(config), with_data=False)
        finally:
            destroy_groups()


def _buildable(config: RunConfig) -> RunConfig:
    """Return a configuration that can be built on any machine and has tensors of the same sizes."""
    transformer = copy.copy(config.transformer)
    # Transformer Engine's modules have the same parameters as megatron-core's own
    transformer.transformer_impl = "local"
    transformer.moe_grouped_gemm = False
    transformer.perform_initialization = False
    profile = config.balance.balance_profile
    balance = dataclasses.replace(config.balance, balance_profile="builtin" if profile == "auto" else profile)
    return config.replace(transformer=transformer, balance=balance)


def _differences(config: RunConfig) -> Iterator[str]:
    """Yield one sentence for each difference from a real run."""
    if config.balance.balance_profile == "auto":
        yield "--balance-profile auto: nothing is measured; the choices below are those of builtin"
    transformer = config.transformer
    engine = transformer.transformer_impl == "transformer_engine"
    if engine and transformer.multi_latent_attention and transformer.tensor_model_parallel_size > 1:
        yield "the projections to latent channels, which every tensor-parallel rank keeps whole, are counted as split"
    yield "no checkpoint is read; the data's files are checked on this machine, their tokens in a few places"


def held(run: Run) -> dict[str, int]:
    """Return by use the exact bytes that a built run holds on this rank once its optimizer has stepped."""
    allocate(run.optimizer)
    parameters = [parameter for chunk in run.model for parameter in chunk.parameters()]
    kept = []
    for part in optimizers(run.optimizer):
        names = state_names(part.optimizer)
        for main in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
            kept += [main, *(part.optimizer.state[main][name] for name in names)]
    # DDP replaces the method `buffers` of torch's modules by a list
    ddp: list[Any] = [*run.model]
    buffers = [buffer for chunk in ddp for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(buffer.grad_data for buffer in buffers),
        # In full precision, the main parameters are the model's parameters
        "optimizer": _bytes([*parameters, *kept]) - _bytes(parameters),
        "guests": 0 if run.balancer is None else run.balancer.guest_bytes,
    }


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({storage._cdata: storage.nbytes() for storage in (one.untyped_storage() for one in tensors)}.values())


def inspect(config: RunConfig, run: Run) -> StageMemory:
    """Return the memory of a rank of this stage; its activations are those of the modules of `config`, the real run."""
    layers = [moe for chunk in run.model for moe in model_chunk(chunk).moe]
    activations, microbatches = _activations(config, run)
    return StageMemory(
        layers=len(layers),
        moe_layers=sum(layers),
        parameters=sum(parameter.numel() for chunk in run.model for parameter in chunk.parameters()),
        uses=held(run) | {"activations": activations},
        microbatches=microbatches,
    )


def _activations(config: RunConfig, run: Run) -> tuple[int, int]:
    """Return the estimated bytes of activations, and the number of microbatches that have them at the same time."""
    tokens = reserved_tokens(config, run)
    kept = [chunk_activations(config, model_chunk(chunk), tokens, run.vocab_size) for chunk in run.model]
    return peak(hooks.stage_passes(config.transformer, run.groups.pp.rank(), run.batches.get()), kept)


def _certified(config: RunConfig, run: Run) -> str:
    """Return a line about the activations of this stage with and without `--balance-certify`."""
    without = config.replace(balance=dataclasses.replace(config.balance, balance_certify=None))
    constant, even = (
        f"{_activations(one, run)[0] / GIB:.2f} GiB ({reserved_tokens(one, run).rows} rows)"
        for one in (config, without)
    )
    return f"  stage {run.groups.pp.rank()}: {constant} for any load; without the flag, {even} for even routing"


def model_chunk(chunk: torch.nn.Module) -> ChunkParts:
    """Return the layers and ends of a built model chunk."""
    first = get_attr_wrapped_model(chunk, "pre_process")
    last = get_attr_wrapped_model(chunk, "post_process")
    layers = [module for module in chunk.modules() if isinstance(module, TransformerLayer)]
    predictions = sum(isinstance(module, MultiTokenPredictionLayer) for module in chunk.modules())
    return ChunkParts(tuple(isinstance(one.mlp, BaseMoELayer) for one in layers), bool(first), bool(last), predictions)


def reserved_tokens(config: RunConfig, run: Run) -> Tokens:
    """Return a microbatch's tokens and rows on each rank: rows under even routing, or for which memory is reserved."""
    transformer = config.transformer
    tensor = run.groups.tp.size()
    whole = microbatch_tokens(config)
    part = whole // tensor if transformer.sequence_parallel else whole
    if transformer.num_moe_experts is None:
        return Tokens(whole, part, 0)
    layers = [*moe_layers(run.model).values()]
    rows = even_rows(config, run.groups, layers[0].parallel if layers else None)
    if config.balance.balance_certify is not None:
        rows = certified_rows(rows, config.balance.balance_certify)
    if config.balance.moe_flex_rows == "bound":
        guests = config.balance.balance_guest_slots if config.balance.balance_policy != "none" else 0
        slots = transformer.num_moe_experts // run.groups.ep.size() + guests
        rows = most_rows(transformer, run.groups.ep.size(), part, slots)
    return Tokens(whole, part, rows)


def _groups(collection: ProcessGroupCollection, topology: Topology) -> list[str]:
    lines = ["", "groups of rank 0 (exact)"]
    for name, attribute in GROUPS.items():
        ranks = dist.get_process_group_ranks(getattr(collection, attribute))
        nodes = len({topology.node_of(rank) for rank in ranks})
        lines.append(f"  {name:22} {len(ranks):5}  {in_words(ranks)}{f', on {nodes} nodes' if nodes > 1 else ''}")
    lines.append(f"  {'node':22} {topology.node_size:5}  {in_words(range(topology.node_size))}")
    return lines


def _pipeline(run: Run) -> list[str]:
    config = run.config.transformer
    train = run.config.train
    microbatches = run.batches.get()
    stages = config.pipeline_model_parallel_size
    chunks = config.virtual_pipeline_model_parallel_size or 1
    passes = [hooks.stage_passes(config, stage, microbatches) for stage in range(stages)]
    ahead = [len([*itertools.takewhile(lambda one: one.forward, of_stage)]) for of_stage in passes]
    kind = "1F1B" if chunks == 1 else f"interleaved 1F1B, {chunks} model chunks on each"
    return [
        "",
        "schedule (exact)",
        f"  {run.length.iterations} iterations of {train.global_batch_size} samples: {microbatches} microbatches of "
        f"{train.micro_batch_size} on {run.groups.dp.size()} data-parallel ranks",
        f"  {stages} pipeline stages, {kind}; forward passes before the first backward pass: "
        f"{', '.join(map(str, ahead))}",
    ]


def _balancing(run: Run) -> str:
    """Return one line about the schedule of a stage's iteration. Computing the schedule also validates it."""
    stage = f"  stage {run.groups.pp.rank()}: "
    balance = run.config.balance
    if run.balancer is None or not run.balancer.layers:
        return f"{stage}every expert stays on its owner"
    schedule = run.balancer.schedule(run.batches.get())
    started = Counter(one.operation for step in schedule for one in (*step.planning, *step.communication))
    moves = (Operation.PLAN, Operation.TRANS, Operation.BTRANS, Operation.AGG)
    counts = ", ".join(f"{started[operation]} {operation}" for operation in moves if started[operation])
    return f"{stage}{balance.balance_policy}, overlap {balance.balance_overlap}: {counts} in {len(schedule)} steps"


def _memory(rows: Sequence[StageMemory], held_by: Sequence[Sequence[int]], passes: str) -> list[str]:
    """Return the memory table; `held_by[i]` are the ranks of stage i, and `passes` those with the activations."""
    names = "".join(f"{name:>13}" for name in (*rows[0].uses, "total"))
    lines = ["", f"memory per rank, GiB (exact, except for activations: estimated, for {passes})"]
    lines.append(f"stage {'ranks':>12} {'layers (MoE)':>12} {'10^9 param.':>11}{names} {'microbatches':>13}")
    for number, stage in enumerate(rows):
        sizes = stage.uses.values()
        cells = "".join(f"{size / GIB:13.2f}" for size in (*sizes, sum(sizes)))
        where = in_words(held_by[number]).partition(" ")[2]
        layers = f"{stage.layers} ({stage.moe_layers})"
        billions = stage.parameters / 1e9
        lines.append(f"{number:5} {where:>12} {layers:>12} {billions:11.3f}{cells} {stage.microbatches:13}")
    return [*lines, LEGEND]


def read_cluster(flag: str, path: str, topology: Topology) -> Cluster:
    """Read the cluster that a flag names; ValueError, naming the flag, if it has not as many GPUs as the job needs."""
    try:
        cluster = read(Path(path))
    except ValueError as error:
        raise ValueError(f"{flag} {error}") from error
    gpus = int(cluster.gpus_per_node.value)
    nodes = cluster.num_nodes
    job = f"this job has {topology.world_size} processes, {topology.node_size} on a node"
    if topology.node_size > gpus:
        remedy = f"set LOCAL_WORLD_SIZE={gpus}, or give --moe-comm-node-size {gpus}"
        raise ValueError(f"{flag} {path}: its nodes have {gpus} GPUs, but {job}; {remedy}")
    if nodes is not None and topology.num_nodes > nodes:
        most = f"{nodes * topology.node_size:.0f}"
        raise ValueError(f"{flag} {path}: has {nodes:.0f} nodes, but {job}; start at most {most}")
    return cluster


def verdict(stages: Sequence[Mapping[str, int]], cluster: Cluster, flag: str) -> str:
    """Return a sentence about GPU memory that the largest stage leaves; ValueError, with a remedy, if it needs more."""
    memory = cluster.memory
    if memory is None:
        return f"{flag}: does not give gpus[].memory_gb, so it is unknown whether the job fits"
    number, uses = max(enumerate(stages), key=lambda stage: sum(stage[1].values()))
    needed = sum(uses.values())
    amounts = f"stage {number} needs {needed / GIB:.2f} GiB, and a GPU has {memory / GIB:.2f} ({memory / 1e9:g} GB)"
    if needed > memory:
        most = max(uses, key=lambda use: uses[use])
        largest = f"{uses[most] / GIB:.2f} GiB are {most}, which these reduce: {REMEDIES[most]}"
        raise ValueError(f"{flag}: the job does not fit: {amounts}; {largest}")
    left = f"{(memory - needed) / GIB:.2f} GiB remain for what is not counted"
    barely = " barely" if memory - needed < TIGHT * memory else ""
    return f"{flag}: the job fits{barely}: {amounts}; {left}"
