"""What every rank on the device needs, imported once by the server that ranks are forked from."""

import importlib

from megatron_balance.device import quiet
from tests.hostcuda import torch_cuda
from tests.hostcuda.library import library

quiet.silence_expected_warnings()
torch_cuda.install(library())
importlib.import_module("tests.preload")
