"""The CUDA path executed without a GPU: a device `cuda:0` in host memory, and a checker that watches it.

device.cpp     the device: a library that adds it to a CPU build of torch
library.py     builds that library where there is a C++ compiler
torch_cuda.py  `torch.cuda` for the device
checker.py     events on kernels, streams, memory and waits -> races, memory freed in use, host waits, work queued
host_clock.py  CPU time of the host's thread outside of kernels
waits.py       the golden tables of an iteration: waits, kernels, launches, bytes
ranks.py       gloo ranks on the device, for tests
packages/      stand-ins for Transformer Engine, apex and DeepEP

Tests on the device execute the program's CUDA and NCCL branches, on real data and on several real ranks. They reveal
crashes, tensors on the wrong device, streams that do not wait for each other, memory that is freed in use, host waits,
and results that differ from the CPU's. They do not test the numerics of CUDA's kernels, NCCL itself, or speed.
"""
