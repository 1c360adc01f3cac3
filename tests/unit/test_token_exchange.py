"""What a codec leaves of a layer's four exchanges of rows."""

from types import SimpleNamespace

import pytest
import torch

from megatron_balance.comm.alltoall import FlatAllToAll
from megatron_balance.comm.codecs import load_codec
from megatron_balance.comm.compressed import token_exchange

HIDDEN = 64


@pytest.mark.parametrize(("directions", "compressed"), [("dispatch", 1), ("combine", 1), ("forward", 2), ("all", 4)])
def test_bytes_of_a_row_are_the_mean_of_the_four_exchanges(directions, compressed: int) -> None:
    codec = load_codec("int8")
    wire = FlatAllToAll(SimpleNamespace(size=lambda: 4, rank=lambda: 0))
    exchange = token_exchange(wire, codec, directions)
    assert exchange.compressed_share == compressed / 4
    plain = 4 * HIDDEN
    coded = codec.bytes_per_row(HIDDEN, torch.float32)
    assert coded < plain / 2
    found = exchange.bytes_per_row(HIDDEN, torch.float32)
    assert found == (compressed * coded + (4 - compressed) * plain) / 4


def test_without_a_codec_rows_are_plain() -> None:
    wire = FlatAllToAll(SimpleNamespace(size=lambda: 4, rank=lambda: 0))
    exchange = token_exchange(wire, load_codec("none"), "all")
    assert (exchange.compressed_share, exchange.bytes_per_row(HIDDEN, torch.bfloat16)) == (0, 2 * HIDDEN)
