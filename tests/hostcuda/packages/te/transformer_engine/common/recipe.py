"""Names of the low-precision recipes; none is implemented."""


class DelayedScaling:
    """megatron-core derives a class from it."""
