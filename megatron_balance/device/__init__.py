"""Facilities of the machine, and replacements for those that megatron-core expects and the machine lacks.

machine, versions     processes, CUDA, NVIDIA's packages; differences between versions of megatron-core
cpu, without_engine   megatron-core without CUDA, and without Transformer Engine
attention             layer norms and attention that megatron-core lacks, alone or without Transformer Engine
shards                which parameters are shards and which are copies
recomputation         decisions of a forward pass, for the pass that repeats it
side_stream           a CUDA stream, or a thread, for work that overlaps with computation
host_memory, clock    copies to and from the host that let both go on; points in time on the device
memory, quiet         how much memory a rank has in use; silence messages that need no action
compiled              loops in machine code
"""
