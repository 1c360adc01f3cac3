"""Facilities of the machine, and replacements for those that megatron-core expects and the machine lacks.

machine           processes, CUDA, Transformer Engine, apex: the machine that flags are checked against
cpu               megatron-core without CUDA
without_engine    megatron-core without Transformer Engine
attention         layer norms and attention that megatron-core lacks, alone or without Transformer Engine
shards            which parameters are shards and which are copies
recomputation     decisions of a forward pass, for the pass that repeats it
side_stream       a CUDA stream, or a thread, for work that overlaps with computation
host_memory       copies to and from the host that let both go on
clock             points in time on the device
memory            how much memory a rank has in use
versions          differences between versions of megatron-core
copies            copies between host and device for which nobody waits
compiled          loops in machine code
quiet             silence messages that need no action
"""
