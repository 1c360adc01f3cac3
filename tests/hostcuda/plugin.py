"""A plugin for pytest: `-p tests.hostcuda.plugin` runs tests on the device in host memory."""

from tests.hostcuda import torch_cuda
from tests.hostcuda.host_clock import HostClock
from tests.hostcuda.library import library

# Before conftest.py, which otherwise replaces what a machine without CUDA lacks
torch_cuda.install(library())
# It does not look at memory. Tensors that an error frees would leave the checker's lock closed
torch_cuda.report_to(HostClock())
