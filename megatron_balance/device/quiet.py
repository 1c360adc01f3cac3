"""Messages of megatron-core and torch that every run here would print and nobody has to act on."""

import logging
import warnings

EXPECTED_WARNINGS = (
    # Where they are missing, the command line has said so in one sentence
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    # megatron-core calls these by their old names
    r"`torch\.distributed\..*` is deprecated",
    "torch.distributed.*will be deprecated",
)
EXPECTED_LOGS = {
    # Our layer gets its arguments from its spec
    "megatron.core.transformer.transformer_layer": "Unknown MLP type",
    # On a CPU the two generators are one
    "megatron.core.tensor_parallel.random": "CPU RNG state changed within GPU RNG context",
    # Mock and blended samples are quick to index again
    "megatron.core.datasets.gpt_dataset": "path_to_cache is None",
    "megatron.core.datasets.blended_dataset": "path_to_cache is None",
    # The state machine that re-runs suspicious steps is off
    "megatron.core.rerun_state_machine": "",
}


def silence_expected_warnings() -> None:
    """Drop these messages for the life of the process; call it before megatron.core is imported."""
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name, text in EXPECTED_LOGS.items():

        def unexpected(record: logging.LogRecord, text: str = text) -> bool:
            return text not in record.getMessage() or record.levelno >= logging.ERROR

        logging.getLogger(name).addFilter(unexpected)
