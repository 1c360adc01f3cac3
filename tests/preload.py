"""What every rank needs, imported once by the server that ranks are forked from."""

import importlib

from megatron_balance.device import cpu, quiet

quiet.silence_expected_warnings()
cpu.install()
importlib.import_module("megatron_balance.build.run")
# Optimizers import it when the first one is made
importlib.import_module("torch._dynamo")

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset  # noqa: E402

from megatron_balance.cli.arguments import build_parser  # noqa: E402

# The help texts of flags are read from source files, and kept
build_parser()

# 100,000 documents are millions of short samples, and shuffling them the longest part of building a run
MockGPTLowLevelDataset.size = 1000
