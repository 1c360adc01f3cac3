"""Stand-ins for NVIDIA's Transformer Engine and apex, for runs on a device in host memory.

Each directory below is a root for `sys.path`. With both, one or none of them there before megatron-core is imported, a
process takes its machine for one that has the packages. They compute with plain operators of torch, in the order in
which megatron-core's own modules do where both compute the same, so that losses can be compared; they raise where the
real ones raise, or would read memory that is not theirs; they take the arguments of the real ones and no others.

Nothing in them reads a tensor's values on the host, but where the real one does.
"""

from pathlib import Path

HERE = Path(__file__).parent

MACHINES = {"bare": (), "apex": ("apex",), "te": ("te",), "te and apex": ("te", "apex")}
"""Roots by the name of a machine."""


def roots(machine: str) -> list[str]:
    """What a process puts in front of `sys.path` to find itself on `machine`."""
    return [str(HERE / name) for name in MACHINES[machine]]
