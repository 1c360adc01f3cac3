"""Stand-ins for NVIDIA's Transformer Engine and apex, and for DeepEP, for runs on a device in host memory.

Each directory below is a root for `sys.path`. A process that adds a root before it imports megatron-core appears to
run on a machine with that package. The stand-ins compute with plain operators of torch. Where megatron-core's own
modules compute the same, they use the same order of operations, so that losses can be compared. They have what
megatron-core and this project call, refuse arguments that the real packages do not have, and refuse tensors in host
memory. They read a tensor's values on the host only where the real packages do.
"""

from pathlib import Path

HERE = Path(__file__).parent

MACHINES = {"bare": (), "apex": ("apex",), "te": ("te",), "te and apex": ("te", "apex"), "deep_ep": ("deep_ep",)}
"""Machine name -> roots."""


def roots(machine: str) -> list[str]:
    """Return the entries that put a process on `machine` when prepended to `sys.path`."""
    return [str(HERE / name) for name in MACHINES[machine]]
