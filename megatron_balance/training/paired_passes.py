"""Runs the forward pass of a microbatch together with the backward pass of another.

This is `--overlap-moe-expert-parallel-comm`: while one pass waits for an exchange, the other one computes.
"""

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import combined_1f1b, schedules
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_type
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_balance.comm.alltoall import keep_until_read
from megatron_balance.device.turns import Direction, Turns
from megatron_balance.flow.dispatcher import AtOnceDispatcher
from megatron_balance.flow.layer import BalancedMoELayer, moe_layers

ON_HOST: Mapping[str, Direction] = {
    "dispatch_wait": "forward",
    "combine_wait": "forward",
    "combine_backward_wait": "backward",
    "dispatch_backward_wait": "backward",
}
"""Where a pass gives way without CUDA: where its host waits for an exchange of rows -> the pass's direction."""

ON_DEVICE: Mapping[str, Direction] = {
    "load_wait": "forward",
    "dispatch_wait": "forward",
    "combine_backward_wait": "backward",
    "dispatch_backward_wait": "backward",
}
"""Where a pass gives way on CUDA: the host waits only for the load, and meanwhile the device must have work."""


class PairedPasses:
    """Pairs the passes of megatron-core's schedules: without a pipeline, and the interleaved one. A pipeline without
    virtual stages runs the latter with one chunk on each stage.

    A schedule decides which passes form a pair. megatron-core's own implementation splits layers into stages that it
    calls in turn; here, whole passes take turns. So a pass may have any layers, any precision and recomputation.

    On CUDA, autograd computes a backward pass on the stream of its forward pass. The passes of a pair therefore need
    different streams, and each forward pass takes the stream that the other pass does not use. All streams meet between
    two pairs, so weights, sums of gradients and messages of the pipeline are in order.
    """

    def __init__(self, groups: ProcessGroupCollection, model: Sequence[torch.nn.Module]) -> None:
        """`model`: the chunks of this rank, whose layers give way from now on."""
        self._groups = groups
        self._turns = Turns()
        self._signature = inspect.signature(combined_1f1b.combined_forward_backward_step)
        self._backward: Callable[..., Any] = schedules.backward_step
        # 0.19.2 has no such argument
        if "model_type" in inspect.signature(schedules.backward_step).parameters:
            self._backward = functools.partial(schedules.backward_step, model_type=get_model_type(model[0]))
        self._streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        self._stream_of: MutableMapping[torch.Tensor, torch.cuda.Stream] = WeakTensorKeyDictionary()
        """Stream of the forward pass that returned an output."""
        where = ON_DEVICE if torch.cuda.is_available() else ON_HOST
        if torch.cuda.is_available():
            _separate_buffers()
        exchanges = torch.cuda.Stream()
        for layer in moe_layers(model).values():
            give_way_in(layer, self._turns, where)
            if isinstance(layer.dispatcher, AtOnceDispatcher):
                layer.dispatcher.stream = exchanges

    @contextlib.contextmanager
    def in_schedules(self) -> Iterator[None]:
        """Run the schedules of megatron-core with these pairs."""
        theirs = combined_1f1b.combined_forward_backward_step
        combined_1f1b.combined_forward_backward_step = self._step
        try:
            yield
        finally:
            combined_1f1b.combined_forward_backward_step = theirs

    def _step(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Run a pair, or one of its passes alone. Takes the arguments of megatron-core's function, and returns what it
        returns: output, number of tokens, gradient of the backward pass's input."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        asked = SimpleNamespace(**bound.arguments)
        main = torch.cuda.current_stream()
        beside = self._streams[0] if asked.b_model is None else self._stream_of.pop(_first(asked.b_output_tensor))
        own = self._streams[self._streams.index(beside) - 1]
        for stream in self._streams:
            stream.wait_stream(main)
        forward = functools.partial(self._run_forward, asked, own)
        backward = functools.partial(self._run_backward, asked, beside)
        output = None
        num_tokens = None
        gradient = None
        if asked.b_model is None:
            output, num_tokens = forward()
        elif asked.f_model is None:
            gradient = backward()
        else:
            (output, num_tokens), gradient = self._turns.together(forward, backward)
        for stream in self._streams:
            main.wait_stream(stream)
        for one in (output, num_tokens, gradient):
            _keep(one)
        # Only now, so that all stages send their outputs first
        if asked.b_model is not None and asked.post_backward is not None:
            asked.post_backward(gradient)
        return output, num_tokens, gradient

    def _run_forward(self, asked: SimpleNamespace, stream: torch.cuda.Stream) -> tuple[Any, Any]:
        chunks = asked.config.virtual_pipeline_model_parallel_size
        last = asked.f_model_chunk_id is None or asked.f_model_chunk_id == (chunks or 1) - 1
        config = asked.config
        if asked.b_model is not None:
            # The first pass of the iteration has set the scales of auxiliary losses, which the backward pass reads now
            config = copy.copy(config)
            config.num_moe_experts = None
            config.mtp_num_layers = None
        with torch.cuda.stream(stream):
            if asked.pre_forward is not None:
                asked.pre_forward()
            _keep(asked.input_tensor)
            output, num_tokens = schedules.forward_step(
                asked.forward_step_func,
                asked.data_iterator,
                asked.f_model,
                asked.num_microbatches,
                asked.input_tensor,
                asked.forward_data_store,
                config,
                self._groups.cp.size(),
                asked.collect_non_loss_data,
                is_first_microbatch=asked.is_first_microbatch,
                current_microbatch=asked.current_microbatch,
                vp_stage=asked.f_model_chunk_id,
                is_last_stage=last and is_pp_last_stage(self._groups.pp),
            )
            self._stream_of[_first(output)] = stream
            if asked.post_forward is not None:
                asked.post_forward(output)
        return output, num_tokens

    def _run_backward(self, asked: SimpleNamespace, stream: torch.cuda.Stream) -> Any:
        with torch.cuda.stream(stream):
            if asked.pre_backward is not None:
                asked.pre_backward()
            _keep(asked.b_output_tensor_grad)
            return self._backward(
                asked.b_input_tensor, asked.b_output_tensor, asked.b_output_tensor_grad, config=asked.config
            )


def _separate_buffers() -> None:
    """Let each stream have its own buffers of megatron-core, to which the layers of both passes write."""
    buffers: Any = parallel_state.get_global_memory_buffer()
    get_tensor = type(buffers).get_tensor

    def of_stream(shape: Any, dtype: torch.dtype, name: str, *more: Any) -> torch.Tensor:
        return get_tensor(buffers, shape, dtype, f"{name}, stream {torch.cuda.current_stream().cuda_stream}", *more)

    buffers.get_tensor = of_stream


def give_way_in(layer: BalancedMoELayer, turns: Turns, where: Mapping[str, Direction]) -> None:
    """Let passes give way in a layer; `where` as ON_HOST."""
    begin = layer.begin

    def give_way_and_begin(work: Any) -> None:
        if work in where:
            turns.give_way(where[work])
        begin(work)

    layer.begin = give_way_and_begin


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, list) else output


def _keep(tensors: Any) -> None:
    """Keep tensors that another stream has allocated until the current stream has read them."""
    for tensor in tensors if isinstance(tensors, list) else [tensors]:
        if tensor is not None:
            keep_until_read(tensor)
