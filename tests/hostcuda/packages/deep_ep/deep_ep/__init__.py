"""HybridEP as megatron-core calls it: DeepEP, branch hybrid-ep, at commit 94a9f8f.

The real kernels exchange tokens over NVLink and RDMA; here, collectives of the group do, each with as many tokens as
all ranks have. Rows are in the order of experts, then of sources. Rows that a kernel does not write hold NaN; with real
kernels they hold uninitialized memory. Rows for which there is no room are lost, as they are there.
"""

from typing import Any

import torch
import torch.distributed as dist

from tests.hostcuda.packages import kernels

__all__ = ["HybridEPBuffer"]

TOKENS = kernels.HALVES
"""Types of tokens without fp8."""

HARMLESS = ("fuse_permute_dispatch", "fuse_unpermute_combine", "num_dispatched_tokens", "num_of_experts")
"""Arguments that change no result."""


class HybridEPBuffer:
    def __init__(self, group: dist.ProcessGroup, **others: Any) -> None:
        kernels.check_names("deep_ep:HybridEPBuffer", others)
        assert group.size() > 1, f"The hybrid-ep kernel should be used with at least 2 ranks, but got {group.size()}."
        assert not others.get("use_fp8"), "not in this stand-in"
        self.group = group
        self.rank = group.rank()
        self.group_size = group.size()
        self.buffers: dict[tuple, torch.Tensor] = {}
        """All exchanges write to the same memory."""

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        num_of_experts_per_rank: int | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        num_permuted_tokens: int | None = None,
        handle: tuple | None = None,
        non_blocking: bool = False,
        **others: Any,
    ) -> tuple:
        kernels.check_others("deep_ep:HybridEPBuffer.dispatch_with_permute", others, harmless=HARMLESS)
        kernels.dense(hidden=hidden, routing_map=routing_map, probs=probs)
        kernels.require(hidden.dtype in TOKENS, "tokens have 16 bits")
        if non_blocking:
            assert num_permuted_tokens is not None and num_permuted_tokens >= 0, (
                "The num_permuted_tokens is required for non-blocking mode."
            )
        tokens_per_expert = None
        if handle is None:
            assert routing_map.dtype == torch.bool
            assert hidden.size(0) == routing_map.size(0), (
                "The hidden and the routing_map should have the same row number."
            )
            kernels.require(routing_map.size(1) == num_of_experts_per_rank * self.group_size, "experts of all ranks")
            first = self.rank * num_of_experts_per_rank
            local_BS = self._gathered(routing_map)[:, first : first + num_of_experts_per_rank]
            tokens_per_expert = local_BS.sum(0)
            if not non_blocking:
                tokens_per_expert = tokens_per_expert.cpu()
            if num_permuted_tokens is None:
                num_permuted_tokens = int(tokens_per_expert.sum())
            slot_R, token_R = local_BS.T.nonzero_static(size=num_permuted_tokens, fill_value=-1).unbind(1)
            handle = slot_R, token_R, len(hidden), num_of_experts_per_rank
        slot_R, token_R, _, slots = handle
        kernels.require(int(num_permuted_tokens) == len(token_R), "as many rows as in the forward pass")
        rows_RH = _taken(self._gathered(hidden), token_R)
        probs_R = None
        if probs is not None:
            kernels.require(probs.dtype == torch.float32, "probabilities in single precision")
            local_BS = self._gathered(probs)[:, self.rank * slots : (self.rank + 1) * slots].contiguous()
            flat_R = torch.where(token_R < 0, -1, token_R * slots + slot_R)
            probs_R = _taken(local_BS.view(-1, 1), flat_R).squeeze(1)
        return rows_RH, probs_R, None, tokens_per_expert, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: tuple | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        kernels.check_others("deep_ep:HybridEPBuffer.combine_with_unpermute", others, harmless=HARMLESS)
        assert handle is not None, "The handle is necessary in the combine pass."
        kernels.dense(hidden=hidden, probs=probs)
        kernels.require(hidden.dtype in TOKENS, "tokens have 16 bits")
        slot_R, token_R, tokens, slots = handle
        kernels.require(len(hidden) == len(token_R), "as many rows as in the dispatch")
        sums_BH = _added(hidden.float(), token_R, tokens * self.group_size).to(hidden.dtype)
        output_TH = self._returned(sums_BH).float().sum(0).to(hidden.dtype)
        if probs is None:
            return output_TH, None
        kernels.require(probs.dtype == torch.float32, "gradients of probabilities in single precision")
        flat_R = torch.where(token_R < 0, -1, token_R * slots + slot_R)
        own_BS = _added(probs.unsqueeze(1), flat_R, tokens * self.group_size * slots).view(-1, slots)
        return output_TH, self._returned(own_BS).transpose(0, 1).reshape(tokens, -1)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, B in total."""
        everyone = self._buffer(tensor, len(tensor) * self.group_size)
        dist.all_gather_into_tensor(everyone, tensor, group=self.group)
        return everyone

    def _returned(self, rows_BX: torch.Tensor) -> torch.Tensor:
        """Return what each rank has for this one's tokens: [D, T, X]."""
        back = self._buffer(rows_BX, len(rows_BX))
        dist.all_to_all_single(back, rows_BX, group=self.group)
        return back.view(self.group_size, -1, rows_BX.shape[1])

    def _buffer(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        key = tensor.dtype, rows, *tensor.shape[1:]
        if key not in self.buffers:
            self.buffers[key] = tensor.new_empty(rows, *tensor.shape[1:])
        return self.buffers[key]


def _taken(rows_BX: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """Return a row for each index, and NaN for -1."""
    if not len(rows_BX):
        return rows_BX.new_full((len(index_R), rows_BX.shape[1]), torch.nan)
    return rows_BX[index_R.clamp(min=0)].masked_fill_(index_R.unsqueeze(1) < 0, torch.nan)


def _added(rows_RX: torch.Tensor, index_R: torch.Tensor, size: int) -> torch.Tensor:
    """Return the sum of the rows of each index; those of -1 are not read."""
    sums = rows_RX.new_zeros(size + 1, rows_RX.shape[1])
    return sums.index_add_(0, torch.where(index_R < 0, size, index_R), rows_RX)[:size]
