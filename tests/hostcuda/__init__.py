"""The CUDA path executed without a GPU: a device `cuda:0` in host memory, and what watches over it.

device.cpp     the device: a library that makes torch's CPU build believe in it
library.py     builds that library where there is a C++ compiler
torch_cuda.py  what programs ask of `torch.cuda`, answered for the device
checker.py     kernels, streams, memory and waits as they come -> races, freed memory in use, waits of the host
ranks.py       gloo ranks on the device, for tests
packages/      stand-ins for Transformer Engine and apex

It executes the branches of the program that CUDA and NCCL take, on real data and on several real ranks. So it shows
crashes, tensors on the wrong device, streams that do not wait for each other, memory that is freed in use, waits of the
host, and a program that computes something else than on the CPU. It says nothing about the numbers that CUDA's kernels
compute, about NCCL itself, or about speed.
"""
