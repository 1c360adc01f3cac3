"""Facilities of the machine, and replacements for missing ones that megatron-core expects.

machine, versions     processes, CUDA, NVIDIA's packages; differences between versions of megatron-core
cpu, without_engine   megatron-core without CUDA, and without Transformer Engine
attention             layer norms and attention that megatron-core lacks, alone or without Transformer Engine
documents             attention of documents that share a sample, each on its own
shards                marks of parameters that are shards rather than copies
recomputation         decisions of a forward pass, kept for its recomputation
side_stream           a CUDA stream, or a thread, for work that overlaps with computation
turns                 two passes, of which one runs while the other waits
host_memory, clock    asynchronous copies to and from the host; points in time on the device
memory, quiet         memory usage of a rank; silencing messages that need no action
compiled              loops compiled to machine code
"""
