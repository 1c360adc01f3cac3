"""Collectives of tensor parallelism, random states, and recomputation."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist


def get_distributed_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the group's size, or 1 if torch.distributed is not initialized."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def set_tensor_model_parallel_attributes(tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Set the tensor-parallel attributes of a parameter that has none of them."""
    marks = {"tensor_model_parallel": is_parallel, "partition_dim": dim, "partition_stride": stride}
    assert not any(hasattr(tensor, name) for name in marks)
    for name, value in marks.items():
        setattr(tensor, name, value)


def gather_along_first_dim(inp: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all ranks' rows."""
    out = inp.new_empty(group.size() * inp.shape[0], *inp.shape[1:])
    dist.all_gather_into_tensor(out, inp.contiguous(), group=group)
    return out


def reduce_scatter_along_first_dim(inp: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's rows of the sum."""
    out = inp.new_empty(inp.shape[0] // group.size(), *inp.shape[1:])
    dist.reduce_scatter_tensor(out, inp.contiguous(), group=group)
    return out


@contextlib.contextmanager
def activation_recompute_forward(activation_recompute: bool = False, recompute_phase: bool = False) -> Iterator[None]:
    """Do nothing: recomputation has no low-precision state."""
    yield


class CudaRNGStatesTracker:
    """The device's random states by name."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add a state from a seed; both the name and the seed must be new."""
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"cuda rng state {name} already exists")
        self.seeds_.add(seed)
        before = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(seed)
        self.states_[name] = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw random numbers from the named state inside the context."""
        if name not in self.states_:
            raise KeyError(f"cuda rng state {name} is not added")
        before = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(before)


class _Checkpoint(torch.autograd.Function):
    """Runs a function again in the backward pass, with the random states of its first run."""

    @staticmethod
    def forward(ctx: Any, function: Callable, tracker: Callable | None, kwargs: dict, *args: Any) -> Any:
        ctx.function = function
        ctx.tracker = tracker
        ctx.kwargs = kwargs
        ctx.states = _random_states(tracker)
        ctx.others = [None if torch.is_tensor(arg) else arg for arg in args]
        ctx.save_for_backward(*(arg if torch.is_tensor(arg) else None for arg in args))
        with torch.no_grad():
            return function(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple:
        saved = zip(ctx.saved_tensors, ctx.others, strict=True)
        inputs = [other if tensor is None else _leaf(tensor) for tensor, other in saved]
        here = _random_states(ctx.tracker)
        _set_random_states(ctx.tracker, ctx.states)
        with torch.enable_grad():
            outputs = ctx.function(*inputs, **ctx.kwargs)
        _set_random_states(ctx.tracker, here)
        outputs = (outputs,) if torch.is_tensor(outputs) else outputs
        wanted = [place for place, output in enumerate(outputs) if torch.is_tensor(output) and output.requires_grad]
        if not wanted:
            raise RuntimeError("none of output has requires_grad=True, this checkpoint() is not necessary")
        torch.autograd.backward([outputs[place] for place in wanted], [gradients[place] for place in wanted])
        return None, None, None, *(one.grad if torch.is_tensor(one) else None for one in inputs)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _random_states(tracker: Callable | None) -> tuple:
    named = None if tracker is None else tracker().get_states()
    return torch.get_rng_state(), torch.cuda.get_rng_state(), named


def _set_random_states(tracker: Callable | None, states: tuple) -> None:
    torch.set_rng_state(states[0])
    torch.cuda.set_rng_state(states[1])
    if tracker is not None:
        tracker().set_states(states[2])


def checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Recompute `function` in the backward pass.

    Args:
        kwargs: `distribute_saved_activations`, `tp_group`, `get_rng_state_tracker` and `use_reentrant` belong to this
            function; all others are passed to `function`.
    """
    tracker = kwargs.pop("get_rng_state_tracker", None)
    kwargs.pop("tp_group", None)
    if kwargs.pop("distribute_saved_activations", False) or not kwargs.pop("use_reentrant", True):
        raise NotImplementedError("checkpoint: distribute_saved_activations, use_reentrant=False")
    return _Checkpoint.apply(function, tracker, kwargs, *args)
