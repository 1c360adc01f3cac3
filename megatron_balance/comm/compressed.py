"""Compression of a layer's exchanges."""

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_balance.comm.alltoall import AllToAll, Exchange
from megatron_balance.comm.codecs import Codec, NoCodec

Directions = Literal["dispatch", "combine", "forward", "all"]
"""Exchanges to compress: dispatch, combine, both (`forward`), or both and their gradients (`all`)."""


class CompressedAllToAll(AllToAll):
    """Sends the payload of rows [R, H] of floats over another all-to-all (ScheMoE section 3.1)."""

    def __init__(self, all_to_all: AllToAll, codec: Codec, gradients: bool) -> None:
        """`all_to_all` carries the payload; `gradients`: whether to compress gradients as well."""
        super().__init__(all_to_all.group)
        self.all_to_all = all_to_all
        self.codec = codec
        self.gradients = gradients
        self.reads_all_splits = all_to_all.reads_all_splits

    @property
    def reverse(self) -> AllToAll:
        return self if self.gradients else self.all_to_all

    def start(self, rows: torch.Tensor, splits_DD: torch.Tensor, room: int = 0) -> Exchange:
        hidden = rows.shape[1]
        dtype = rows.dtype
        # Decompressed rows get memory of their own, so `room` is of no use here
        exchange = self.all_to_all.start(self.codec.encode(rows.detach()), splits_DD)
        return Exchange(lambda: self.codec.decode(exchange.wait(), hidden, dtype))


@dataclass(frozen=True)
class TokenExchange:
    """The all-to-alls of a layer."""

    dispatch: AllToAll
    """Tokens to their experts."""
    combine: AllToAll
    """The experts' outputs back."""
    probs: AllToAll
    """Combine weights to the experts, one number per row; never compressed."""

    @property
    def four(self) -> tuple[AllToAll, ...]:
        """The exchanges of rows in an iteration: dispatch, combine, and the exchanges of their gradients."""
        return self.dispatch, self.combine, self.combine.reverse, self.dispatch.reverse

    @property
    def reads_all_splits(self) -> bool:
        """Whether any exchange reads more of the split matrix than this rank's row and column."""
        return any(exchange.reads_all_splits for exchange in (*self.four, self.probs, self.probs.reverse))

    @property
    def compressed_share(self) -> float:
        """Compressed fraction of the four exchanges."""
        return sum(isinstance(exchange, CompressedAllToAll) for exchange in self.four) / 4

    def bytes_per_row(self, hidden: int, dtype: torch.dtype) -> float:
        """Return the bytes of a row, averaged over the four exchanges."""
        coded = (exchange.codec for exchange in self.four if isinstance(exchange, CompressedAllToAll))
        saved = sum(hidden * dtype.itemsize - codec.bytes_per_row(hidden, dtype) for codec in coded)
        return hidden * dtype.itemsize - saved / 4


def token_exchange(all_to_all: AllToAll, codec: Codec, directions: Directions) -> TokenExchange:
    """Return a layer's exchanges, with `codec` applied to `directions`; a single rank compresses nothing."""
    if isinstance(codec, NoCodec) or all_to_all.group.size() == 1:
        return TokenExchange(all_to_all, all_to_all, all_to_all)
    compressed = CompressedAllToAll(all_to_all, codec, gradients=directions == "all")
    return TokenExchange(
        dispatch=all_to_all if directions == "combine" else compressed,
        combine=all_to_all if directions == "dispatch" else compressed,
        probs=all_to_all,
    )
