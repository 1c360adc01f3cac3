"""Kernels in Triton for the benches of a GPU; triton can be imported only where it is installed."""

import triton
import triton.language as tl

BLOCK = 8192
"""Elements that a program of `copy_kernel` moves at once."""


@triton.jit
def empty_kernel(numbers):
    """Do nothing with a tensor."""


@triton.jit
def copy_kernel(source, target, count, BLOCK: tl.constexpr):
    """Copy `count` elements with as many blocks as programs are launched, as NCCL does with its channels."""
    for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        tl.store(target + place, tl.load(source + place, mask=place < count), mask=place < count)
