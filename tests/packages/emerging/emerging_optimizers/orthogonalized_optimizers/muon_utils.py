"""Newton-Schulz iterations, which turn a matrix into about the nearest orthogonal one."""

from typing import Literal

import torch
import torch.distributed as dist

NSCoeffT = Literal["simple", "quintic"]

COEFFICIENTS = {
    # Of Keller Jordan's Muon, for every iteration
    "simple": [(3.4445, -4.7750, 2.0315)],
    # One for each iteration (https://leloykun.github.io/ponder/muon-opt-coeffs/)
    "quintic": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
}


def newton_schulz(
    x: torch.Tensor,
    steps: int,
    coefficient_type: str = "quintic",
    transpose: bool | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Return about the orthogonal matrix nearest to `x` [O, I] in float32. With `group`, its columns are divided among
    ranks if `transpose` is false, else its rows."""
    assert x.dim() == 2 and x.dtype == torch.float32
    if transpose is None:
        transpose = x.size(0) > x.size(1)
    x = x.T if transpose else x
    square = x.square().sum()
    if group is not None:
        dist.all_reduce(square, group=group)
    x = x / square.sqrt().clamp_min(1e-15)
    if torch.get_float32_matmul_precision() == "medium":
        x = x.bfloat16()
    coefficients = COEFFICIENTS[coefficient_type]
    for step in range(steps):
        a, b, c = coefficients[step % len(coefficients)]
        gram = x @ x.T
        if group is not None:
            dist.all_reduce(gram, group=group)
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.float()
    return x.T if transpose else x


def newton_schulz_tp(
    x: torch.Tensor,
    steps: int,
    coefficient_type: str,
    tp_group: dist.ProcessGroup,
    partition_dim: int | None = None,
    tp_mode: str = "duplicated",
    mode: str | None = None,
) -> torch.Tensor:
    """Return this rank's part of `newton_schulz` of the matrix whose parts along `partition_dim` the ranks have."""
    if partition_dim is None:
        return newton_schulz(x, steps, coefficient_type)
    if (mode or tp_mode) == "distributed":
        return newton_schulz(x, steps, coefficient_type, transpose=partition_dim == 0, group=tp_group)
    parts = [torch.empty_like(x) for _ in range(tp_group.size())]
    dist.all_gather(parts, x.contiguous(), group=tp_group)
    whole = newton_schulz(torch.cat(parts, partition_dim), steps, coefficient_type)
    return whole.chunk(tp_group.size(), partition_dim)[tp_group.rank()]
