"""Silences messages of megatron-core and torch that appear in every run and need no action."""

import logging
import sys
import warnings

EXPECTED_WARNINGS = (
    # The command line reports missing packages in one sentence
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # Autograd's threads use a device without a current context; torch then makes its context current
    "Attempting to run cuBLAS, but there was no current CUDA context",
    # A forward pass that takes turns has a stream of its own; autograd orders the sums of gradients
    "The AccumulateGrad node's stream does not match",
    # megatron-core uses the old names
    r"`torch\.distributed\..*` is deprecated",
    "torch.distributed.*will be deprecated",
    "`load_state_dict` is deprecated",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    # A checkpoint's plain values are loaded without a process group
    "torch.distributed is disabled, unavailable or uninitialized",
    "The argument order of load has been changed",
    # megatron-core 0.19 reads gradients of the distributed optimizer's shards, which are views
    "The .grad attribute of a Tensor that is not a leaf Tensor",
    # megatron-core 0.19 imports it, for models that are not built here
    "MimoModelConfig is experimental",
)
EXPECTED_LOGS = {
    # The only GPT model that all supported versions have
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # Only megatron-core's planning is used; `checkpoint/writer.py` writes
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    # Versions before 0.19 work without it
    "megatron.core.distributed.distributed_data_parallel": "full_param_layout not provided",
    # Our layer gets arguments from its spec
    "megatron.core.transformer.transformer_layer": "Unknown MLP type",
    # On a CPU, both generators are the same one
    "megatron.core.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",
    # Rebuilding the index of mock and blended samples is fast
    "megatron.core.datasets.gpt_dataset": "path_to_cache is None",
    "megatron.core.datasets.blended_dataset": "path_to_cache is None",
    # The state machine that re-runs suspicious steps is off
    "megatron.core.rerun_state_machine": "",
}


def show_logs(level: int) -> None:
    """Print log messages from this level on, without those of torch.distributed, like Megatron-LM."""
    handler = logging.StreamHandler(sys.stdout)
    handler.addFilter(lambda record: not record.name.startswith("torch.distributed"))
    logging.basicConfig(level=level, handlers=[handler], format="%(message)s")


def silence_expected_warnings() -> None:
    """Drop the messages above for the life of the process. Call this before importing megatron.core."""
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name, text in EXPECTED_LOGS.items():

        def unexpected(record: logging.LogRecord, text: str = text) -> bool:
            return text not in record.getMessage() or record.levelno >= logging.ERROR

        logging.getLogger(name).addFilter(unexpected)
