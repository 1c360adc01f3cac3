"""--moe-permute-fusion: arguments of Transformer Engine's kernel, checked by a stand-in with its requirements."""

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from megatron_balance.comm.sharded import transposed

SIZES = torch.tensor([[2, 0, 1], [1, 3, 0]])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Replace the kernel with the stand-in, and return the sizes and orders that it receives."""
    given: list[torch.Tensor] = []

    def sort(rows: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        for tensor in (sizes, order):
            # The kernel reads the memory behind a pointer
            assert tensor.device == rows.device and tensor.is_contiguous() and not tensor.is_floating_point()
        assert rows.dim() == 2 and sizes.shape == order.shape == (sizes.numel(),)
        given.extend([sizes, order])
        if rows.is_meta:
            return torch.empty_like(rows)
        return moe_utils.sort_chunks_by_idxs(rows, sizes, order)[0]

    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    monkeypatch.setattr(moe_utils, "fused_sort_chunks_by_index", sort, raising=False)
    return given


@pytest.mark.parametrize("sizes", [SIZES, SIZES.T, SIZES[:, ::2]], ids=["rows", "columns", "every second column"])
def test_sizes_and_order_are_where_the_rows_are(kernel: list[torch.Tensor], sizes: torch.Tensor) -> None:
    """The device is `meta`, which every machine has; its tensors have no data."""
    rows = torch.empty(int(sizes.sum()), 4, device="meta")
    assert transposed(rows, sizes, (1, 0), fused=True).device == rows.device
    assert len(kernel) == 2


def test_fused_and_unfused_sort_alike(kernel: list[torch.Tensor]) -> None:
    rows = torch.arange(28.0).view(7, 4)
    assert torch.equal(transposed(rows, SIZES, (1, 0), fused=True), transposed(rows, SIZES, (1, 0)))
    assert [tensor.tolist() for tensor in kernel] == [[2, 0, 1, 1, 3, 0], [0, 3, 1, 4, 2, 5]]
