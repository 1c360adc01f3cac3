"""Imports that every rank on the device needs, done once in the server that forks the ranks."""

import importlib

from megatron_balance.device import quiet
from tests.hostcuda import torch_cuda
from tests.hostcuda.library import library

quiet.silence_expected_warnings()
torch_cuda.install(library())
importlib.import_module("tests.preload")
