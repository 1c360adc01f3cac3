"""Base of tensors in low precision."""

import torch


class QuantizedTensor(torch.Tensor):
    """Only to be asked for: none is ever made."""

    def __new__(cls, *args: object, **kwargs: object) -> "QuantizedTensor":
        raise NotImplementedError(cls.__name__)
