"""The flags of Megatron-LM's scripts keep their meaning here, and train.

`--slow` trains the flags of every script.
"""

import math

import pytest

from megatron_balance.training.loop import train_step
from tests.distributed.runs import Curve, build, curve_of
from tests.megatron_lm_scripts import SCRIPTS, Script, without
from tests.variants import variants

SMALL = (
    "--hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 8 --num-experts 16 --seq-length 32 "
    "--micro-batch-size 1 --global-batch-size 4 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--num-workers 0"
)
SIZES = {
    "--kv-channels": "8",
    "--num-query-groups": "2",
    "--max-position-embeddings": "32",
    "--moe-ffn-hidden-size": "32",
    "--moe-shared-expert-intermediate-size": "32",
    "--q-lora-rank": "24",
    "--kv-lora-rank": "32",
    "--qk-head-dim": "16",
    "--qk-pos-emb-head-dim": "8",
    "--v-head-dim": "16",
    "--padded-vocab-size": "256",
    "--no-rope-freq": "2",
    "--train-iters": "2",
    "--train-samples": "8",
    "--num-layers-per-virtual-pipeline-stage": "1",
    "--num-virtual-stages-per-pipeline-rank": "2",
}
"""Sizes of scripts that give them."""

GPUS_ONLY = (
    *("--distributed-backend", "--transformer-impl", "--attention-backend", "--moe-permute-fusion", "--fp16"),
    *("--cross-entropy-fusion-impl", "--moe-router-fusion", "--ddp-average-in-collective", "--moe-enable-deepep"),
)
"""Flags of kernels and collectives that a CPU lacks."""

NAMED_FILES = (
    *("--vocab-file", "--merge-file"),
    *("--wandb-project", "--wandb-entity", "--wandb-exp-name", "--wandb-save-dir"),
)

STAGES = (
    *("--pipeline-model-parallel-layout", "--num-layers-per-virtual-pipeline-stage"),
    "--num-virtual-stages-per-pipeline-rank",
)
QUICK = ("DeepSeek-V3 proxy, DeepEP", "Sinkhorn, ETP2, stages before replicas")
OTHER_PROGRAMS = ("Nemotron-3-Nano", "GRPO of Qwen3-30B-A3B")
"""Scripts of which the flags that are not refused make no sense on their own."""


def in_small(script: Script) -> str:
    """Return a script's flags with its sizes reduced to those of a model that two CPU ranks train."""
    words = without(script.kept, (*GPUS_ONLY, *NAMED_FILES))
    words = [word for word in words if word != "layernorm"]  # needs Transformer Engine to be recomputed
    value = dict(zip(words, [*words[1:], ""], strict=True))
    staged = any(flag in words for flag in STAGES)
    layers = 4 if staged else 2

    def two(flag: str) -> int:
        """Return 2 if the script shares this work out and its ranks are not needed for stages."""
        return 2 if value.get(flag, "1") != "1" and not staged else 1

    shards = two("--expert-tensor-parallel-size")
    small = [SMALL, *(f"{flag} {size}" for flag, size in SIZES.items() if flag in words)]
    if "--pipeline-model-parallel-layout" in words:
        end = "mL" if "--mtp-num-layers" in words else "L"
        small.append(f"--pipeline-model-parallel-layout Et|tt|t|{end}")
    if "--moe-layer-freq" in words:
        small.append(f"--moe-layer-freq [0]*1+[1]*{layers - 1}")
    if value.get("--moe-token-dispatcher-type") == "flex":
        small.append("--moe-token-dispatcher-type alltoall")
    small.append(
        f"--num-layers {layers} --tensor-model-parallel-size {two('--tensor-model-parallel-size')} "
        f"--context-parallel-size {two('--context-parallel-size')} --expert-tensor-parallel-size {shards} "
        f"--pipeline-model-parallel-size {2 if staged else 1} "
        f"--expert-model-parallel-size {1 if staged or shards > 1 else 2}"
    )
    return f"{' '.join(words)} {' '.join(small)}"


def train_in_small(flags: str) -> tuple[Curve, int]:
    """Return the curve of a script's run, and its number of words."""
    run = build("", base=flags)
    assert run.length.iterations == 2
    return curve_of([train_step(run) for _ in range(2)]), run.vocab_size


@pytest.mark.parametrize("name", variants([name for name in SCRIPTS if name not in OTHER_PROGRAMS], QUICK))
def test_script_trains_in_small(ranks, name: str) -> None:
    for curve, vocab_size in ranks(2).run(train_in_small, in_small(SCRIPTS[name])):
        assert len(curve) == 2
        for loss, norm in curve:
            assert math.log(64) < loss < math.log(2 * vocab_size) and math.isfinite(norm) and norm > 0
