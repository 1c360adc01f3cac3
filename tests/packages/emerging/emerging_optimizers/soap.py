"""Only a name that megatron-core imports."""


class SOAP:
    """Is not implemented."""
