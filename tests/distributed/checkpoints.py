"""Runs that save and resume, as tasks for ranks."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import MegatronOptimizer

from megatron_balance.checkpoint.checkpoints import Checkpoints
from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.planning.manager import Manager
from megatron_balance.planning.policies.interface import owners_host
from megatron_balance.training.loop import train_step
from megatron_balance.training.run import Run
from tests.distributed.runs import build
from tests.harness import forget_auxiliary_losses


@dataclass
class Said:
    """Stands in for the run's log, and keeps its messages."""

    lines: list[str] = field(default_factory=list)

    def message(self, text: str) -> None:
        self.lines.append(text)


def patient(run: Run, said: Said | None = None) -> Checkpoints:
    """Return the run's checkpoints; they wait for writers as long as a busy machine may take."""
    return Checkpoints(run, Said() if said is None else said, patience=600.0)


@dataclass
class Outcome:
    """One rank's state after a run: everything that learning depends on, and the log messages."""

    losses: list[tuple[float | None, float | None]]
    weights: dict[str, torch.Tensor]
    moments: list[torch.Tensor]
    said: list[str]
    placements: list[list[str]] = field(default_factory=list)
    """Placements of all layers, after each iteration."""


def forget_placements(run: Run) -> None:
    """Reset all placements to their state before any plan."""
    assert run.balancer is not None
    for state in run.balancer.layers.values():
        manager = state.manager
        fresh = Manager(manager.policy, manager.cost, manager.predictor, owners_host(manager.placement))
        state.manager.restore(fresh.state())


def train_and_save(
    flags: str,
    directory: Path | None,
    iterations: int,
    save_at: int = 0,
    spoil: Callable[[Run], None] | None = None,
) -> Outcome:
    """Train `iterations`, resuming from `directory` if it holds checkpoints, and save after `save_at` iterations."""
    where = f"--save {directory} --load {directory}" if directory else ""
    run = build(f"{flags} {where}")
    checkpoints = patient(run, said := Said())
    checkpoints.prepare()
    checkpoints.load()
    if spoil is not None:
        spoil(run)
    losses = []
    placements = []
    for count in range(1, iterations + 1):
        report = train_step(run)
        losses.append((report.losses.get("lm loss"), report.grad_norm))
        if run.balancer is not None:
            placements.append([str(state.placement) for state in run.balancer.layers.values()])
        if count == save_at:
            checkpoints.save()
        checkpoints.poll()
    checkpoints.finish()
    return dataclasses.replace(outcome(run, losses, said), placements=placements)


def outcome(run: Run, losses: list, said: Said) -> Outcome:
    weights = {
        f"{index}.{name}": value.detach().clone()
        for index, chunk in enumerate(run.model)
        for name, value in chunk.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    return Outcome(losses, weights, moments(run.optimizer), said.lines)


def moments(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    """Return all optimizer state and main parameters of this rank, in the optimizer's order."""
    found = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                found += [parameter.detach().clone()]
                found += [state[name].clone() for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    return found


def differences(left: Outcome, right: Outcome) -> list[str]:
    """Return the names of everything that is not bitwise equal."""
    found = [] if left.losses == right.losses else [f"losses: {left.losses} {right.losses}"]
    pairs = enumerate(zip(left.placements, right.placements, strict=True), 1)
    found += [f"placements after iteration {iteration}: {a} {b}" for iteration, (a, b) in pairs if a != b]
    found += [name for name in left.weights if not torch.equal(left.weights[name], right.weights[name])]
    if left.weights.keys() != right.weights.keys() or len(left.moments) != len(right.moments):
        found.append("not the same tensors")
    pairs = zip(left.moments, right.moments, strict=False)
    return found + [f"moment {index}" for index, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


def straight_against_resumed(flags: str, directory: str, iterations: int) -> list[str]:
    """Train without a stop, then with a stop in the middle; return what differs on this rank.

    The second run trains half, saves, is rebuilt, loads, and trains the rest.
    """
    straight = train_and_save(flags, None, iterations)
    return differences(straight, _resumed(flags, directory, iterations, iterations // 2))


def straight_against_spoiled(
    flags: str, directory: str, iterations: int, spoil: Callable[[Run], None]
) -> tuple[list[str], list[str]]:
    """Return what differs from a run that saves in the middle: first in a run that goes on from there, then in one that
    `spoil` changes after it has loaded."""
    half = iterations // 2
    straight = train_and_save(flags, Path(directory), iterations, save_at=half)
    found = []
    for change in (None, spoil):
        _forget()
        rest = train_and_save(flags, Path(directory), iterations - half, spoil=change)
        found.append(differences(straight, _after(straight, half, rest)))
    return found[0], found[1]


def disturbed(
    flags: str, directory: str, iterations: int, save_at: int, disturb: Callable[[int, Run], None]
) -> tuple[Outcome, list[str], list[str]]:
    """Train twice, and once more with a stop after `save_at` iterations; disturb each part differently.

    Returns:
        This rank's first outcome, and its differences from the second run and from the resumed run.
    """
    ways = [functools.partial(disturb, number) for number in range(4)]
    first = train_and_save(flags, None, iterations, spoil=ways[0])
    _forget()
    second = train_and_save(flags, None, iterations, spoil=ways[1])
    resumed = _resumed(flags, directory, iterations, save_at, *ways[2:])
    return first, differences(first, second), differences(first, resumed)


def _resumed(flags: str, directory: str, iterations: int, save_at: int, *spoil: Callable[[Run], None]) -> Outcome:
    """Train, save, rebuild, load and continue; `spoil` changes the run before each of the two parts."""
    before, after = spoil or (None, None)
    _forget()
    first = train_and_save(flags, Path(directory), save_at, save_at=save_at, spoil=before)
    _forget()
    return _after(first, save_at, train_and_save(flags, Path(directory), iterations - save_at, spoil=after))


def _after(first: Outcome, iterations: int, second: Outcome) -> Outcome:
    """Return the second outcome with the history of the first one's `iterations` in front."""
    losses = first.losses[:iterations] + second.losses
    return dataclasses.replace(second, losses=losses, placements=first.placements[:iterations] + second.placements)


def losses_of(flags: str, load: str | None, save: str, iterations: int, copy_to: str = "") -> list[float]:
    """Resume from `load` (or start), save to `copy_to`, train, save to `save`; return losses and gradient norms."""
    run = build(f"{flags} --save {save}" + (f" --load {load}" if load else ""))
    patient(run).load()
    if copy_to:
        _save(run, copy_to)
    reports = [train_step(run) for _ in range(iterations)]
    _save(run, save)
    losses = [[report.losses.get("lm loss") for report in reports]]
    dist.broadcast_object_list(losses, src=dist.get_world_size() - 1)
    return [*losses[0], *(report.grad_norm for report in reports)]


def _save(run: Run, directory: str) -> None:
    settings = dataclasses.replace(run.config.checkpoint, save=directory)
    patient(dataclasses.replace(run, config=run.config.replace(checkpoint=settings))).save()


def tensors_of(directory: str) -> dict[str, torch.Tensor]:
    """Return every tensor of the newest checkpoint, unsharded, by its name in the checkpoint. Needs a single rank."""
    found = CheckpointDirectory(Path(directory))
    everything = dist_checkpointing.load_plain_tensors(str(found.path(found.iterations()[0])))
    return {name: value for name, value in everything.items() if isinstance(value, torch.Tensor)}


def unequal_tensors(left: str, right: str) -> tuple[int, list[str]]:
    """Return the number of tensors in the left checkpoint, and the names that differ between the two."""
    mine = tensors_of(left)
    theirs = tensors_of(right)
    unequal = [name for name in mine if name not in theirs or not torch.equal(mine[name], theirs[name])]
    return len(mine), unequal + [name for name in theirs if name not in mine]


def _forget() -> None:
    """Forget a run's process groups, and change the random state, which a resumed run must not depend on."""
    from megatron.core import parallel_state

    forget_auxiliary_losses()
    parallel_state.destroy_model_parallel()
    torch.manual_seed(999 + dist.get_rank())
