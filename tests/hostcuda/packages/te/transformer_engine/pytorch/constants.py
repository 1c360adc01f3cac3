"""Types of elements."""

import torch

TE_DType = {
    name: str(name)
    for name in (
        *(torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32),
        *(torch.float32, torch.float16, torch.bfloat16),
    )
}
"""torch dtype -> the kernels' type."""
