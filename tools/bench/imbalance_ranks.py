"""What every rank of imbalance.py does: given routing, layers alone, exchanges alone, and the integer round trip.

A task has the keys `mode`, `workload`, `trace` and `write_trace` (paths or None), `seed`, `warmup`, `iterations`,
`common` (the flags of all runs) and `variants` (the additional flags of each).
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

import ranks
import routing_file
from megatron_balance.cost.model import balance_ratio
from megatron_balance.workloads import imbalance
from megatron_balance.workloads.synthetic import workload_choices
from routing_file import Routing
from slow_runs import Cluster, Variant, build

if TYPE_CHECKING:
    import torch

    from megatron_balance.cli.checks import Machine
    from megatron_balance.config.run_config import RunConfig
    from megatron_balance.training.run import Run

LARGEST = 4
"""Rows of the round trip have integers up to this: even in bfloat16, 64 copies add up exactly."""


def measure(task: ranks.Task, machine: "Machine") -> dict[str, Any]:
    """Build and measure all variants; the task of every rank."""
    return compare(
        ranks.build({name: f"{task['common']} {own}" for name, own in task["variants"].items()}, machine), task
    )


def measure_emulated(profile: Path, task: ranks.Task, cluster: Cluster) -> dict[str, Any]:
    """Build and measure all variants with emulated computation on the slow network; the task of every rank."""
    variants = {name: Variant(own) for name, own in task["variants"].items()}
    return compare(build(variants, task["common"], profile, cluster)[0], task)


def compare(runs: "dict[str, Run]", task: ranks.Task) -> dict[str, Any]:
    """Measure the runs under one workload in one mode; every rank calls it.

    Returns:
        load: max/mean of the tokens for each rank's own experts, the mean over measured iterations and layers.
        variants: by name, the seconds of every rank in every iteration, whether all ranks got their integer rows back
            exactly, and the copies of experts in the last placement.

    Raises:
        ValueError: a trace does not fit the runs, or cannot be written.
    """
    import torch.distributed as dist

    routing = functools.partial(routing_of, task, next(iter(runs.values())).config)
    for run in runs.values():
        _give_routing(run, routing, alone=task["mode"] != "training_step")
    if task["write_trace"] is not None and dist.get_rank() == 0:
        routing_file.save(routing(1, 0), Path(task["write_trace"]))
    step = functools.partial(_step, dispatch_only=task["mode"] == "dispatch_only")
    seconds = ranks.take_turns(runs, task["iterations"], task["warmup"], step=step)
    own = [(times, returns_integers(runs[name])) for name, times in seconds.items()]
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, own)
    variants = {}
    for (name, run), found in zip(runs.items(), zip(*by_rank, strict=True), strict=True):
        times, exact = zip(*found, strict=True)
        states = run.balancer.layers.values() if run.balancer is not None else ()
        copies = sum(state.placement.added_hosts for state in states)
        variants[name] = {"seconds": list(zip(*times, strict=True)), "exact": all(exact), "copies": copies}
    measured = range(task["warmup"], task["warmup"] + task["iterations"])
    layers = range(1, len(moe_layers(runs[name])) + 1)
    return {"load": _load([routing(layer, step) for layer in layers for step in measured]), "variants": variants}


def routing_of(task: ranks.Task, config: "RunConfig", layer: int, step: int) -> Routing:
    """Return the routing of a layer, numbered from 1, in a step.

    Raises:
        ValueError: a trace does not fit the run.
    """
    shape = config.transformer
    length = config.model.seq_length
    num_ranks = shape.expert_model_parallel_size
    ragged = task["mode"] != "training_step"
    assert length is not None and config.train.micro_batch_size is not None
    tokens = length * config.train.micro_batch_size
    size = {"num_experts": shape.num_moe_experts, "topk": shape.moe_router_topk}
    if task["trace"] is not None:
        return _checked(task["trace"], {**size, "ranks": num_ranks}, None if ragged else tokens)
    name = task["workload"]
    total = num_ranks * tokens
    seed = task["seed"] + layer - 1
    if name in imbalance.WORKLOADS:
        experts_TK, gates_TK = imbalance.draw(name, tokens=total, seed=seed, step=step, **size)
    else:
        experts_TK = workload_choices(name, tokens=range(total), total_tokens=total, seed=seed, step=step, **size)
        gates_TK = np.full(experts_TK.shape, 1 / shape.moe_router_topk, dtype=np.float32)
    sizes_D = imbalance.source_sizes(name if ragged else "balanced", total, num_ranks)
    return Routing(
        workload=imbalance.WORKLOADS.get(name, name),
        seed=seed,
        step=step,
        num_experts=size["num_experts"],
        num_ranks=num_ranks,
        hidden_size=shape.hidden_size,
        experts_TK=experts_TK,
        gates_TK=gates_TK,
        source_T=np.repeat(np.arange(num_ranks), sizes_D),
    )


@functools.cache
def _read(trace: str) -> Routing:
    return routing_file.load(Path(trace))


def _checked(trace: str, size: dict[str, int], tokens: int | None) -> Routing:
    """Return a trace's routing, which must have this size and, if given, as many tokens on each rank."""
    routing = _read(trace)
    found = {"num_experts": routing.num_experts, "topk": routing.experts_TK.shape[1], "ranks": routing.num_ranks}
    if found != size:
        raise ValueError(f"--trace {trace}: it is for {found}, and the run has {size}; change the run's flags")
    sizes_D = np.bincount(routing.source_T, minlength=routing.num_ranks)
    if tokens is not None and (sizes_D != tokens).any():
        raise ValueError(
            f"--trace {trace}: its ranks have {sizes_D.tolist()} tokens, and training_step has {tokens} on each; "
            "set --tokens if they are equal, or leave this mode out"
        )
    return routing


def _load(routings: Sequence[Routing]) -> float:
    ratios = []
    for routing in routings:
        counts_E = np.bincount(routing.experts_TK.ravel(), minlength=routing.num_experts)
        ratios.append(balance_ratio(counts_E.reshape(routing.num_ranks, -1).sum(1)))
    return statistics.fmean(ratios)


class Given:
    """The routing of one router, in place of megatron-core's router replay; it keeps this rank's rows of one step.

    Args:
        routing: step -> the routing of this router's layer.
        step: returns the step in progress.
    """

    def __init__(self, rank: int, routing: Callable[[int], Routing], step: Callable[[], int]) -> None:
        self.rank = rank
        self.routing = routing
        self.step = step
        self._drawn: int | None = None

    def draw(self) -> None:
        """Draw the rows of the step in progress, unless they are drawn already."""
        import torch

        if self._drawn == self.step():
            return
        self._drawn = self.step()
        routing = self.routing(self._drawn)
        device = torch.cuda.current_device()
        own_T = routing.source_T == self.rank
        self.experts_TK = torch.from_numpy(routing.experts_TK[own_T]).to(device)
        self.gates_TK = torch.from_numpy(routing.gates_TK[own_T]).to(device)

    def get_replay_topk(self, scores: "torch.Tensor", *_: object, **__: object) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the scores [T, K] of the given experts, and these experts [T, K]."""
        self.draw()
        return scores.gather(1, self.experts_TK), self.experts_TK

    def route(self, num_experts: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return what a router returns: gates [T, E] and chosen experts [T, E] bool."""
        self.draw()
        gates_TE = self.gates_TK.new_zeros(len(self.gates_TK), num_experts).scatter(1, self.experts_TK, self.gates_TK)
        return gates_TE, gates_TE.bool().scatter(1, self.experts_TK, True)


def moe_layers(run: "Run") -> list[Any]:
    """Return the MoE layers of either implementation."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    return [module for chunk in run.model for module in chunk.modules() if isinstance(module, MoELayer)]


def _give_routing(run: "Run", routing: Callable[[int, int], Routing], alone: bool) -> None:
    """Give the routing to all routers; `alone`: leave only the MoE layers of the model, and no optimizer."""
    import torch.distributed as dist
    from megatron.core.utils import unwrap_model

    layers = moe_layers(run)
    for number, layer in enumerate(layers, start=1):
        given = Given(dist.get_rank(), functools.partial(routing, number), lambda: run.progress.iteration)
        layer.router.router_replay = given
    if alone:
        (chunk,) = run.model
        unwrap_model(chunk).forward = functools.partial(_layers_alone, run, layers)
        run.optimizer.step = lambda: (True, 0.0, 0)


def _layers_alone(run: "Run", layers: Sequence[Any], *_: object, labels: "torch.Tensor", **__: object) -> Any:
    """Replace the model's forward pass: return a loss of the MoE layers' output for each label."""
    hidden = _rows(run, layers[0]).requires_grad_()
    for layer in layers:
        hidden = hidden + layer(hidden)[0]
    return hidden.float().square().mean().expand(labels.shape)


def _rows(run: "Run", layer: Any) -> "torch.Tensor":
    """Return as many rows [T, 1, H] of small integers as this rank has tokens."""
    import torch

    given = layer.router.router_replay
    config = run.config.transformer
    given.draw()
    shape = len(given.experts_TK), 1, config.hidden_size
    rows = torch.randint(-LARGEST, LARGEST + 1, shape, generator=torch.Generator().manual_seed(given.rank))
    return rows.to(device=torch.cuda.current_device(), dtype=config.params_dtype)


def _step(run: "Run", dispatch_only: bool) -> float:
    """Run one iteration and return its seconds on this rank."""
    import torch
    import torch.distributed as dist

    from megatron_balance.training.loop import train_step

    layers = moe_layers(run)
    for layer in layers:
        layer.router.router_replay.draw()
    dist.barrier()
    seconds = train_step(run).seconds
    if not dispatch_only:
        return seconds
    with exchanging(layers), torch.no_grad():
        rows = _rows(run, layers[0])
        # Guests get their weights in the first pass
        return [_exchange_seconds(layers, rows) for _ in range(2)][-1]


def _exchange_seconds(layers: Sequence[Any], rows: "torch.Tensor") -> float:
    import torch
    import torch.distributed as dist

    dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for layer in layers:
        layer(rows)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def returns_integers(run: "Run") -> bool:
    """Send integer rows through every layer's placement; return whether this rank gets exactly K times its rows."""
    import torch

    layers = moe_layers(run)
    topk = run.config.transformer.moe_router_topk
    with exchanging(layers), torch.no_grad():
        sent = [_rows(run, layer) for layer in layers]
        # All layers, whatever the first ones return, because they communicate
        received = [layer(rows)[0] for layer, rows in zip(layers, sent, strict=True)]
    return all(torch.equal(back, topk * rows) for back, rows in zip(received, sent, strict=True))


@contextmanager
def exchanging(layers: Sequence[Any]) -> Iterator[None]:
    """Reduce MoE layers to their exchanges: routers do not compute, and experts return their rows."""
    from megatron_balance.flow.layer import BalancedMoELayer

    def unchanged(layer: Any, rows: "torch.Tensor", *_: object, **__: object) -> Any:
        return rows if isinstance(layer, BalancedMoELayer) else (rows, None)

    def route(layer: Any, *_: object, **__: object) -> "tuple[torch.Tensor, torch.Tensor]":
        return layer.router.router_replay.route(layer.config.num_moe_experts)

    with ExitStack() as replaced:
        for layer in layers:
            for module, replacement in ((layer.router, route), (layer.experts, unchanged)):
                replaced.enter_context(mock.patch.object(module, "forward", functools.partial(replacement, layer)))
        yield
