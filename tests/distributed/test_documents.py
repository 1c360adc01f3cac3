"""Documents that share a sample are computed as if each were alone: attention, then losses and gradients of a model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.utils import unwrap_model

from megatron_balance.device.documents import DocumentAttention
from megatron_balance.training.loop import train_step
from megatron_balance.training.run import Run
from tests import chat
from tests.distributed import runs
from tests.distributed.gradients import differences, measure
from tests.distributed.test_context_parallel import compared, in_every_form

LENGTHS = ((5, 1, 10), (16,), (3, 13))
"""Number of tokens of each document, by sample."""

CP2 = "--context-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn"
MTP = "--mtp-num-layers 2 --position-embedding-type rope"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 24 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12 "
    "--position-embedding-type rope --normalization RMSNorm --qk-layernorm --expert-tensor-parallel-size 1"
)
APART = "--reset-attention-mask --reset-position-ids"

WITHOUT_DATA = runs.BASE.replace("--mock-data ", "")

TOLERANCE = 1e-6
"""Of float32, relative to the norm of all gradients; that of a single parameter may differ by twice as much."""


def attention_deviation(kind: str, form: dict) -> float:
    """Return the largest difference from attention to each document alone, of outputs and gradients, in float64.

    AssertionError: a change of one document changes a bit of another's output.
    """
    both = compared(DocumentAttention, kind, form)
    documents = torch.tensor([0, *(length for lengths in LENGTHS for length in lengths)]).cumsum(0).int()

    def alone_each(*whole_inputs: torch.Tensor) -> torch.Tensor:
        columns = []
        for sample, lengths in enumerate(LENGTHS):
            parts = zip(*(one[:, sample : sample + 1].split(lengths) for one in whole_inputs), strict=True)
            columns.append(torch.cat([both.whole(*part, None) for part in parts]))
        return torch.cat(columns, 1)

    expected = alone_each(*both.inputs)
    found, deviation = both.deviation(expected, documents)
    changed = torch.zeros(expected.shape[:2], dtype=torch.bool)
    changed[5:6, 0] = changed[:3, 2] = True
    others = [both.own(one.detach() + changed[..., None, None]) for one in both.inputs]
    differ = (both.ours(*others, documents) != found).any(-1)
    assert not differ[~both.own(changed)].any() and differ[both.own(changed)].all()
    return deviation


@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_attention_is_that_of_each_document_alone(ranks, world_size: int) -> None:
    ranks(world_size).run(in_every_form, attention_deviation, ("p2p", "a2a") if world_size > 1 else ("p2p",))


MODEL = (
    "--num-layers 2 --disable-bias-linear --swiglu --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 "
    "--moe-z-loss-coeff 0 --clip-grad 0 --mtp-loss-scaling-factor 0.5 --init-method-std 0.2"
)
END = 127
"""End-of-document token of the base run's tokenizer."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the flags of a data set with documents of 2 to 14 tokens."""
    prefix = tmp_path_factory.mktemp("documents") / "short"
    write_documents(prefix, np.random.default_rng(1))
    return f"--data-path {prefix} --split 1,0,0"


def write_documents(prefix: Path, generator: np.random.Generator) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in generator.integers(1, 14, 400):
        builder.add_document(np.append(generator.integers(0, END, length), END), [length + 1])
    builder.finalize(f"{prefix}.idx")


def gradients(run: Run) -> dict[str, torch.Tensor]:
    return {name: weight.main_grad.clone() for name, weight in unwrap_model(run.model)[0].named_parameters()}


def packed(flags: str, data: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the gradients of an iteration, and its losses."""
    run = runs.build(f"{MODEL} --calculate-per-token-loss {flags} {data}", WITHOUT_DATA)
    losses = train_step(run).losses
    return gradients(run), losses


def separate(flags: str, data: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the same of a model that gets one document at a time; in a run with `--sft`, one conversation."""
    run = runs.build(f"{MODEL} {flags} {data}", WITHOUT_DATA)
    (model,) = run.model
    depths = run.config.transformer.mtp_num_layers or 0
    sums = [torch.zeros(()) for _ in range(1 + depths)]
    counts = [0.0] * (1 + depths)
    batch = next(run.data.train[0])
    starts = batch["position_ids"] == 0 if run.config.data.sft else batch["tokens"].roll(1, 1) == END
    documents = 0
    for sample, first in enumerate(starts):
        for part in torch.arange(len(first)).tensor_split(1 + first[1:].nonzero().flatten()):
            tokens, labels, mask = (batch[name][sample, part][None] for name in ("tokens", "labels", "loss_mask"))
            whole = torch.tensor([0, len(part)]).int() if run.config.data.sft else None
            losses = model(tokens, torch.arange(len(part))[None], whole, labels=labels, loss_mask=mask)
            documents += 1
            for depth, own in enumerate([losses, *unwrap_model(model).losses[:-1]] if depths else [losses]):
                kept = mask[:, depth:]
                sums[depth] = sums[depth] + (own[:, : kept.shape[1]] * kept).sum()
                counts[depth] += kept.sum().item()
    assert documents > 4
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    (means[0] + 0.5 * sum(means[1:]) / max(1, depths)).backward()
    model.finish_grad_sync()
    names = ("lm loss", *(f"mtp_{depth} loss" for depth in range(1, 1 + depths)))
    return gradients(run), {name: mean.item() for name, mean in zip(names, means, strict=True)}


@pytest.mark.parametrize(
    ("world_size", "flags", "layout"),
    [
        (1, "", ""),
        (2, MTP, f"{CP2} {RECOMPUTED}"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (1, MTP, ""),
                (1, "", RECOMPUTED),
                (1, MTP, SELECTIVE),
                (1, LATENT, ""),
                (1, f"{MTP} --eod-mask-loss", ""),
                (1, "--window-size 3,0 --position-embedding-type rope", ""),
                (2, "", CP2),
                (2, MTP, f"{CP2} --cp-comm-type a2a"),
                (2, f"{LATENT} --mtp-num-layers 1", f"{CP2} {SELECTIVE}"),
            )
        ),
    ],
)
def test_a_model_learns_from_each_document_alone(ranks, data: str, world_size: int, flags: str, layout: str) -> None:
    check(ranks, world_size, data, flags, f"{flags} {layout} {APART}")


@pytest.mark.skipif(not hasattr(GPTDatasetConfig, "inter_document_masking"), reason="newer versions only")
def test_documents_of_files_are_kept_apart(ranks, data: str) -> None:
    check(ranks, 2, data, MTP, f"{MTP} {CP2} --dataloader-inter-document-masking")


@pytest.mark.parametrize(("world_size", "layout"), [(1, ""), pytest.param(2, CP2, marks=pytest.mark.slow)])
def test_a_model_learns_from_each_conversation_alone(ranks, tmp_path: Path, world_size: int, layout: str) -> None:
    turns = [[" ".join(chat.WORDS[one : one + 2]) for one in range(number)] for number in (2, 4, 2, 2, 4, 2, 2, 4)]
    path = chat.write_conversations(tmp_path / "conversations.jsonl", [chat.conversation(*one) for one in turns])
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {chat.write_tokenizer(tmp_path)}"
    data = f"--sft --data-path {path} --split 1,0,0 {tokenizer} --tokenizer-hf-use-fast --seq-length 128"
    check(ranks, world_size, data, MTP, f"{MTP} {layout}")


def refused(flags: str) -> str:
    """Return the message with which this rank refuses to build a run."""
    with pytest.raises(ValueError) as refusal:
        runs.build(flags, WITHOUT_DATA)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("count", "problem"),
    [(9, "conversations.jsonl:10: is not JSON"), (2, "--split 8,1,1 leaves none of its 2 documents")],
)
def test_every_rank_refuses_bad_conversations(ranks, tmp_path: Path, count: int, problem: str) -> None:
    """Before a job starts, only the first conversations are tokenized."""
    path = chat.write_conversations(tmp_path / "conversations.jsonl", [chat.conversation("what", "rain")] * count)
    if count == 9:
        Path(path).write_text(f"{Path(path).read_text()}{{\n")
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {chat.write_tokenizer(tmp_path)}"
    flags = f"--sft --data-path {path} --split 8,1,1 {tokenizer} --tokenizer-hf-use-fast"
    assert all(problem in said for said in ranks(2).run(refused, flags))


def check(ranks, world_size: int, data: str, flags: str, packing: str) -> None:
    """Check that a run with the flags `packing` learns what one with `flags` learns from one document at a time."""
    expected, losses = ranks(1).run(separate, flags, data)[0]
    found, logged = ranks(world_size).run(packed, packing, data)[0]
    assert {name: logged[name] for name in losses} == pytest.approx(losses, rel=1e-6)
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= 2 * TOLERANCE * expected[name].norm(), name
    every, wanted = (torch.cat([one[name].flatten() for name in found]) for one in (found, expected))
    assert (every - wanted).norm() <= TOLERANCE * wanted.norm()


NUMBERS = "--log-params-norm --log-num-zeros-in-grad --make-vocab-size-divisible-by 64"
"""What `measure` reports, of a vocabulary that suits every layout."""

LAYOUTS = {
    "inner chunks": (2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "TP2": (2, TP2),
    "TP2xCP2": (4, f"{TP2} {CP2}"),
    "PP2xCP2, a2a": (4, f"{PP2} {CP2} --cp-comm-type a2a"),
    "PP2xTP2": (4, f"{PP2} {TP2} {RECOMPUTED}"),
    "PP4": (4, "--pipeline-model-parallel-size 4"),
    "EP2, paired passes": (2, "--expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if number else name for number, name in enumerate(LAYOUTS)]
)
def test_every_layout_keeps_documents_apart(ranks, data: str, name: str) -> None:
    world_size, layout = LAYOUTS[name]
    flags = f"{data} {MODEL} --calculate-per-token-loss {MTP} --num-layers 4 --global-batch-size 8 {APART} {NUMBERS}"
    (alone,) = ranks(1).run(measure, flags, WITHOUT_DATA)
    measured = ranks(world_size).run(measure, f"{flags} {layout}", WITHOUT_DATA)
    assert max(differences(measured, alone).values()) <= 1e-5
