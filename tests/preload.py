"""Imports that every rank needs, done once in the server that forks the ranks."""

import gc
import importlib
import sys

from megatron_balance.device import cpu, quiet

# Until everything is imported, there is nothing to collect
gc.disable()

quiet.silence_expected_warnings()
cpu.install()
importlib.import_module("megatron_balance.build.run")
# Otherwise, the first optimizer of each rank would import it
importlib.import_module("torch._dynamo")

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset  # noqa: E402

from megatron_balance.cli.arguments import build_parser  # noqa: E402
from megatron_balance.device.compiled import Compiled  # noqa: E402
from megatron_balance.planning.policies import registered  # noqa: E402

# Building the parser reads the flags' help texts from source files and caches them
build_parser()
registered()

# Every process of ranks would read their machine code from disk
for module in [module for name, module in sys.modules.items() if name.startswith("megatron_balance.")]:
    for loop in vars(module).values():
        if isinstance(loop, Compiled):
            loop.prepare()

# The default of 100,000 documents makes millions of short samples, whose shuffling would dominate building a run
MockGPTLowLevelDataset.size = 1000

# The collector of a rank need not scan, and thereby copy, what all ranks share
gc.collect()
gc.freeze()
gc.enable()
