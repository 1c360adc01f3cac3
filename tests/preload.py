"""What every rank needs, imported once by the server that ranks are forked from."""

import importlib

from megatron_balance.device import cpu, quiet

quiet.silence_expected_warnings()
cpu.install()
importlib.import_module("megatron_balance.build.run")

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset  # noqa: E402

# 100,000 documents are millions of short samples, and shuffling them the longest part of building a run
MockGPTLowLevelDataset.size = 1000
