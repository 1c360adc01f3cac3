"""The base class of tensors in low precision, of which no instance exists."""


class QuantizedTensor:
    pass
