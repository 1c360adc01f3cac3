"""Only a name that megatron-core imports."""


class Lion:
    """Is not implemented."""
