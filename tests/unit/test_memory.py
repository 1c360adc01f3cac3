"""The estimate of activation memory: the paper's formulas, recomputation, pipelines."""

import pytest

from megatron_balance.app.memory import ChunkParts, Kept, Tokens, chunk_activations, layer, peak
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.config.run_config import RunConfig
from megatron_balance.timeline.lower import Pass, one_forward_one_backward

SHAPE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --bf16"
)
TOKENS = Tokens(256, 256, 512)


def parsed(flags: str = "") -> RunConfig:
    return parse_args(f"{SHAPE} {flags}".split(), Machine(1, cuda=False, transformer_engine=False, apex=False)).config


def test_a_dense_layer_is_that_of_the_paper() -> None:
    assert layer(parsed(), False, TOKENS).stored == 256 * (34 * 64 + 5 * 4 * 128)


def test_sequence_parallelism_is_that_of_the_paper() -> None:
    config = parsed()
    config.transformer.tensor_model_parallel_size = 2
    assert layer(config, False, TOKENS._replace(part=128)).stored == 256 * (34 * 64 + 5 * 4 * 128) // 2
    # Without it, norms and dropout are the same on all ranks
    assert layer(config, False, TOKENS).stored == 256 * (10 * 64 + (24 * 64 + 5 * 4 * 128) // 2)


def test_fused_attention_keeps_no_scores() -> None:
    config = parsed()
    config.transformer.transformer_impl = "transformer_engine"
    # One float32 for each token and head
    assert layer(config, False, TOKENS).stored == 256 * (34 * 64 + 4 * 4)


@pytest.mark.parametrize("module", ["core_attn", "mlp", "moe", "layernorm"])
def test_what_is_recomputed_is_stored_otherwise(module: str) -> None:
    config = parsed("--num-experts 4")
    whole = layer(config, module != "mlp", TOKENS)
    config.transformer.recompute_granularity = "selective"
    config.transformer.recompute_modules = [module]
    part = layer(config, module != "mlp", TOKENS)
    assert whole.recomputed == 0 < part.recomputed
    assert sum(part) == sum(whole)


@pytest.mark.parametrize(("method", "boundaries", "stored"), [("uniform", 2, 0), ("block", 2, 2)])
def test_full_recomputation_keeps_what_lies_between_layers(method: str, boundaries: int, stored: int) -> None:
    chunk = ChunkParts((False,) * 4, False, False)
    one = layer(parsed(), False, TOKENS).stored
    config = parsed(f"--recompute-granularity full --recompute-method {method} --recompute-num-layers 2")
    kept = chunk_activations(config, chunk, TOKENS, 128)
    together = 2 if method == "uniform" else 1
    assert kept == Kept(boundaries * 256 * 64 * 2 + stored * one, together * one)


def test_the_head_keeps_a_softmax_in_full_precision() -> None:
    plain, head = (
        chunk_activations(parsed(), ChunkParts((), False, last), TOKENS, 128).stored for last in (False, True)
    )
    assert head - plain == 256 * (4 * 128 + 9 + 2 * 2 * 64)


@pytest.mark.parametrize(("ahead", "microbatches"), [(0, 1), (1, 2), (3, 4), (9, 8)])
def test_a_stage_keeps_as_many_microbatches_as_it_is_ahead(ahead: int, microbatches: int) -> None:
    passes = one_forward_one_backward([(0, number) for number in range(8)], 1, ahead)
    assert peak(passes, [Kept(10, 3)]) == (10 * microbatches + 3, microbatches)


@pytest.mark.parametrize(("ahead", "microbatches"), [(0, 2), (1, 3), (9, 8)])
def test_paired_passes_keep_one_more_microbatch(ahead: int, microbatches: int) -> None:
    passes = one_forward_one_backward([(0, number) for number in range(8)], 1, ahead, paired=True)
    assert peak(passes, [Kept(10, 3)]) == (10 * microbatches + 3, microbatches)


def test_chunks_count_by_their_own_sizes() -> None:
    passes = [Pass(0, 0, True), Pass(1, 0, True), Pass(1, 0, False), Pass(0, 0, False)]
    assert peak(passes, [Kept(10, 50), Kept(1, 2)]) == (60, 1)
