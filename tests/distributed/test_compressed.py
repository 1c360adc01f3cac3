"""Compressed rows arrive exactly as the codec encodes and decodes them, in the chosen directions only."""

import pytest
import torch
import torch.distributed as dist

from megatron_balance.comm.alltoall import Exchange, FlatAllToAll, P2PAllToAll
from megatron_balance.comm.codecs import CODECS, Codec, load_codec
from megatron_balance.comm.compressed import Directions, token_exchange
from megatron_balance.job.layout import build_groups
from tests.distributed import runs
from tests.distributed.layers import HIDDEN, build_layer, moe_config

DIRECTIONS = {"dispatch": (1, 0, 0), "combine": (0, 1, 0), "forward": (1, 1, 0), "all": (1, 1, 1)}
"""Whether rows to the experts, rows back, and gradients are compressed."""


def there_and_back(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(rows), rows.shape[1], rows.dtype)


def exchange_rows(names: list[str], dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    size = dist.get_world_size()
    splits_DD = torch.tensor([[(3 * i + 5 * j) % 4 * 7 for j in range(size)] for i in range(size)])
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(int(splits_DD[rank].sum()), 13, generator=generator).to(dtype)
    weights = torch.randn(int(splits_DD[:, rank].sum()), 13, generator=generator).to(dtype)
    plain = FlatAllToAll(dist.group.WORLD)
    for name in names:
        codec = load_codec(name)
        for directions, (to, back, gradients) in DIRECTIONS.items():
            exchange = token_exchange(P2PAllToAll(dist.group.WORLD), codec, directions)
            for member, coded in ((exchange.dispatch, to), (exchange.combine, back), (exchange.probs, 0)):
                sent = there_and_back(codec, values) if coded else values
                returned = there_and_back(codec, weights) if coded and gradients else weights
                for way, rows, expected, splits in (
                    (member, values, sent, splits_DD),
                    (member.reverse, weights, returned, splits_DD.T),
                ):
                    found = way.start(rows, splits).wait()
                    assert torch.equal(found, plain.start(expected, splits).wait()), (name, directions)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_arrive_as_the_codec_leaves_them(ranks, dtype: torch.dtype) -> None:
    ranks(4).run(exchange_rows, list(CODECS), dtype)


def widths_of_a_layer(name: str, directions: Directions) -> list[int]:
    """Return the bytes per row of every exchange in a float64 layer's two passes, in the order of starts."""
    config = moe_config()
    groups = build_groups(config, seed=7)
    layer = build_layer(config, groups)
    widths: list[int] = []

    class Watched(P2PAllToAll):
        def start(self, rows: torch.Tensor, splits_DD: torch.Tensor) -> Exchange:
            widths.append(rows[:1].nbytes)
            return super().start(rows, splits_DD)

    layer.dispatcher.exchange = token_exchange(Watched(groups.ep), load_codec(name), directions)
    hidden = torch.randn(20, 1, HIDDEN, dtype=torch.float64).requires_grad_()
    layer(hidden)[0].sum().backward()
    return widths


@pytest.mark.parametrize("directions", DIRECTIONS)
def test_what_travels_compressed(ranks, directions: Directions) -> None:
    plain = 8 * HIDDEN
    coded = load_codec("int8").bytes_per_row(HIDDEN, torch.float64)
    prob = 8
    to, back, gradients = ((plain, coded)[chosen] for chosen in DIRECTIONS[directions])
    for widths in ranks(4).run(widths_of_a_layer, "int8", directions):
        assert widths == [to, prob, back, gradients, prob, gradients]


RUN = "--expert-model-parallel-size 4"


@pytest.mark.slow
def test_training_feels_the_codec_a_little(ranks) -> None:
    flags = [
        "",
        *(f"--moe-comm-codec {name}" for name in ("fp16", "fp8", "zfp")),
        "--moe-comm-codec int8 --moe-comm-codec-directions all",
    ]
    plain, *curves = (ranks(4).run(runs.train_curve, f"{RUN} {given}", 3)[0] for given in flags)
    assert len({tuple(curve) for curve in (plain, *curves)}) == len(flags)
    for curve in curves:
        assert [loss for loss, _ in curve] == pytest.approx([loss for loss, _ in plain], rel=5e-3)
        assert [norm for _, norm in curve] == pytest.approx([norm for _, norm in plain], rel=0.1)
