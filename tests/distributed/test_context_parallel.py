"""Context parallelism: attention on a CPU equals that of one rank; test_models.py trains runs."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.device.attention import ContextParallelAttention
from megatron_balance.job.groups import sequence_chunks
from megatron_balance.job.layout import build_groups, destroy_groups

TOKENS = 16
SAMPLES = 3
HEADS = 8
CHANNELS = 4

FORMS = {
    "causal": {},
    "window": {"window_size": (3, 0)},
    "groups": {"num_query_groups": 4},
    "sink": {"softmax_type": "learnable"},
}
"""Settings of attention, by name."""


class Compared(NamedTuple):
    """Attention on this rank's part of sequences, and megatron-core's on whole ones, in double precision."""

    ours: torch.nn.Module
    whole: DotProductAttention
    inputs: list[torch.Tensor]
    """Queries, keys and values of whole sequences."""
    gradient: torch.Tensor
    """Of the output."""
    own: Callable[[torch.Tensor], torch.Tensor]
    """Returns this rank's part."""

    def deviation(self, expected: torch.Tensor, *more: object) -> tuple[torch.Tensor, float]:
        """Return our output, and its and its gradients' largest difference from `expected`; `more`: our last inputs."""
        parts = [self.own(one.detach()).requires_grad_() for one in self.inputs]
        found = self.ours(*parts, *more)
        expected.backward(self.gradient)
        found.backward(self.own(self.gradient))
        gradients = ((part.grad, self.own(one.grad)) for part, one in zip(parts, self.inputs, strict=True))
        pairs = [(found, self.own(expected)), *gradients]
        return found, max(float((one - other).detach().abs().max()) for one, other in pairs)


def compared(implementation: Callable, kind: str, form: dict) -> Compared:
    ranks = dist.get_world_size()
    shape = {"num_layers": 1, "hidden_size": HEADS * CHANNELS, "num_attention_heads": HEADS, "attention_dropout": 0.0}
    config = TransformerConfig(**shape, params_dtype=torch.float64, context_parallel_size=ranks, **form)
    alone = TransformerConfig(**shape, params_dtype=torch.float64, **form)
    groups = build_groups(config, seed=1)
    settings = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    ours = implementation(config, **settings, cp_comm_type=kind, pg_collection=groups)
    whole = DotProductAttention(alone, **settings, pg_collection=groups)
    if form.get("softmax_type"):
        for one in (ours, whole):
            torch.nn.init.ones_(one.softmax_offset)
    generator = torch.Generator().manual_seed(2)
    widths = (HEADS, alone.num_query_groups, alone.num_query_groups)
    *inputs, gradient = (
        torch.randn(TOKENS, SAMPLES, *rest, dtype=torch.float64, generator=generator)
        for rest in (*((heads, CHANNELS) for heads in widths), (HEADS * CHANNELS,))
    )

    def own(tensor: torch.Tensor) -> torch.Tensor:
        chunks = tensor.chunk(2 * ranks)
        return torch.cat([chunks[chunk] for chunk in sequence_chunks(groups.cp.rank(), ranks)])

    return Compared(ours, whole, [one.requires_grad_() for one in inputs], gradient, own)


def in_every_form(deviation: Callable[[str, dict], float], kinds: Sequence[str]) -> None:
    """Check a deviation of attention, for each kind of communication and in each of FORMS."""
    for kind, name in itertools.product(kinds, FORMS):
        if (kind, name) != ("a2a", "sink"):
            assert deviation(kind, FORMS[name]) < 1e-14, (kind, name)
            # Groups must not end while another rank is still connecting
            dist.barrier()
            destroy_groups()


def attention_deviation(kind: str, form: dict) -> float:
    """Return the largest difference from one rank's attention, of outputs and gradients."""
    both = compared(ContextParallelAttention, kind, form)
    return both.deviation(both.whole(*both.inputs, None), None)[1]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_is_that_of_one_rank(ranks, world_size: int) -> None:
    ranks(world_size).run(in_every_form, attention_deviation, ("p2p", "all_gather", "a2a"))
