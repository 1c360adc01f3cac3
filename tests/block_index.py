"""The definition of the row for each place, for a table of blocks of comm/blocks.py."""

import torch


def block_index(shift_N: torch.Tensor, sizes_N: torch.Tensor, rows: int) -> torch.Tensor:
    """Return [rows] int32: the number of each row plus the shift of its block; `rows` is the sum of the sizes."""
    shift_R = shift_N.repeat_interleave(sizes_N, output_size=rows)
    return shift_R.add_(torch.arange(rows, dtype=torch.int32, device=shift_N.device))
