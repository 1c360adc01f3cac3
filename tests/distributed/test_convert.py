"""Imported models compute what Hugging Face's library computes, on every layout, and continue training."""

import argparse
import dataclasses
import itertools
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import unwrap_model

from megatron_balance.checkpoint.saved_flags import MODEL_FIELDS
from megatron_balance.convert.conversion import export_model, import_megatron, import_model
from megatron_balance.convert.safetensors_files import Weights
from megatron_balance.training.loop import train_step
from megatron_balance.training.run import Run
from tests import hf_models
from tests.distributed.checkpoints import patient, tensors_of
from tests.distributed.runs import build
from tests.variants import variants

LAYOUTS = {
    "ep1": (1, ""),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "ep4": (4, "--expert-model-parallel-size 4"),
    "ep2 etp2": (4, "--expert-model-parallel-size 2 --expert-tensor-parallel-size 2"),
    "tp2 ep2": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1",
    ),
}
TRAINING = (
    "--micro-batch-size 2 --seq-length 16 --lr 1e-3 --train-iters 4 --mock-data --tokenizer-type NullTokenizer "
    "--num-workers 0 --moe-token-dispatcher-type alltoall"
)


def imported(directory: str, flags: str):
    """Load a run of the imported model; the checkpoint supplies the model's flags."""
    run = build(f"--load {directory} --use-checkpoint-args {TRAINING} {flags}", base="")
    patient(run).load()
    return run


def logits_of_tokens(run: Run, tokens: torch.Tensor) -> torch.Tensor:
    (chunk,) = run.model
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return gather_from_tensor_model_parallel_region(chunk.eval()(tokens, positions, None), run.groups.tp)


def logits_and_copy(directory: str, flags: str, tokens: torch.Tensor, copy: str) -> torch.Tensor:
    run = imported(directory, f"--save {copy} --no-save-optim {flags}")
    logits = logits_of_tokens(run, tokens)
    patient(run).save()
    return logits


CASES = [
    (name, layout)
    for name, layout in itertools.product(hf_models.CONFIGS, LAYOUTS)
    # Each shard of an expert would add the second bias
    if (name, layout) != ("gpt_oss", "ep2 etp2")
]
QUICK = [("mixtral", "tp2 ep2"), *((name, "ep2 etp2") for name in ("qwen3_moe", "deepseek_v2", "deepseek_v3 yarn"))]
"""One model type with tensor parallelism, and three on the layout with the most shards."""


@pytest.mark.parametrize(("name", "layout"), variants(CASES, QUICK))
def test_logits_are_those_of_the_source(ranks, tmp_path, name: str, layout: str) -> None:
    hf = tmp_path / "hf"
    there = tmp_path / "there"
    copy = tmp_path / "copy"
    model = hf_models.save(name, hf)
    import_model(hf, there, lambda text: None)
    world_size, flags = LAYOUTS[layout]
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(5))
    expected = hf_models.logits(model, tokens)
    for found in ranks(world_size).run(logits_and_copy, str(there), flags, tokens, str(copy)):
        assert (found[..., :96] - expected).abs().max() <= 1e-5
    wanted, kept = (ranks(1).run(tensors_of, str(directory))[0] for directory in (there, copy))
    for key, tensor in wanted.items():
        assert torch.equal(kept[key][: len(tensor)], tensor)


CHANGED = {
    "qwen3_moe": "--rotary-base 1000000 --moe-router-topk 4 --norm-epsilon 1e-3",
    "mixtral": "--rotary-base 10000 --moe-router-topk 3 --vocab-size 120",
    "deepseek_v2": "--rope-type yarn --rotary-scaling-factor 4 --original-max-position-embeddings 8 --mscale-all-dim 1",
    "deepseek_v2 groups": "--moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5",
    "deepseek_v3": "--rotary-base 500000 --moe-router-group-topk 2 --moe-router-group-score-topk 2",
    "deepseek_v3 yarn": "--rotary-scaling-factor 2 --mscale-all-dim 0.5",
    "glm4_moe": "--rotary-percent 0.75 --rotary-base 500000 --moe-router-topk 3",
    "gpt_oss": "--yarn-rotary-scaling-factor 2 --activation-func-clamp-value 0.5",
    "minimax_m2": "--rotary-percent 0.25 --norm-epsilon 1e-3",
    "qwen3_moe yarn": "--position-embedding-type rope --rotary-base 5000",
}


@pytest.mark.parametrize("name", variants(CHANGED.keys(), {*CHANGED} - {"minimax_m2", "qwen3_moe yarn"}))
def test_an_export_is_what_was_trained(ranks, tmp_path, name: str) -> None:
    """Its config.json describes the run's flags instead of the source's model."""
    hf, there, copy, back = (tmp_path / part for part in ("hf", "there", "copy", "back"))
    source = hf_models.save(name, hf)
    import_model(hf, there, lambda text: None)
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(5))
    (expected,) = ranks(1).run(logits_and_copy, str(there), CHANGED[name], tokens, str(copy))
    said: list[str] = []
    export_model(copy, back, said.append, hf_dir=there / "huggingface")
    found = hf_models.logits(hf_models.load(back), tokens)
    size = found.shape[-1]
    assert size == (120 if "--vocab-size 120" in CHANGED[name] else 96)
    assert f"{128 - size} rows of embedding.word_embeddings.weight are left out as padding" in said[0]
    assert (found - expected[..., :size]).abs().max() <= 1e-5
    assert (found[..., :96] - hf_models.logits(source, tokens)).abs().max() > 1e-3


ITERATIONS = 20

FAMILIES = [name for name in hf_models.CONFIGS if " " not in name]
"""One model of each type."""


def trained(directory: str, tokens: torch.Tensor, save: str) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Train from an imported model and save; return the logits before and after it, and the losses."""
    run = imported(directory, f"--save {save} --no-save-optim --train-iters {ITERATIONS}")
    before = logits_of_tokens(run, tokens)
    run.model[0].train()
    losses = [train_step(run).losses["lm loss"] for _ in range(ITERATIONS)]
    after = logits_of_tokens(run, tokens)
    patient(run).save()
    return before, after, losses


@pytest.mark.parametrize("name", variants(FAMILIES, ["gpt_oss"]))
def test_every_family_is_imported_trained_exported_and_reloaded(ranks, tmp_path, name: str) -> None:
    """With `-s`, print the row of the table in docs/converting.md."""
    hf, there, ours, back = (tmp_path / part for part in ("hf", "there", "ours", "back"))
    source = hf_models.save(name, hf)
    import_model(hf, there, lambda text: None)
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(5))
    ((before, after, losses),) = ranks(1).run(trained, str(there), tokens, str(ours))
    export_model(ours, back, lambda text: None, hf_dir=there / "huggingface")
    imported = (before[..., :96] - hf_models.logits(source, tokens)).abs().max()
    reloaded = (after[..., :96] - hf_models.logits(hf_models.load(back), tokens)).abs().max()
    print(f"| `{name}` | {imported:.1e} | {losses[0]:.3f} to {losses[-1]:.3f} | {reloaded:.1e} |")
    assert max(imported, reloaded) <= 1e-5
    assert losses[-1] < losses[0] and (after - before).abs().max() > 0.1


def train_on(directory: str, flags: str, save: str) -> tuple[list[float], int]:
    """Train two iterations from an imported model and save; return the losses and the number of hosts added."""
    run = imported(directory, f"--save {save} {flags}")
    reports = [train_step(run) for _ in range(2)]
    patient(run).save()
    losses = [[report.losses.get("lm loss") for report in reports]]
    dist.broadcast_object_list(losses, src=dist.get_world_size() - 1)
    return losses[0], sum(layer.hosts_added for report in reports for layer in report.balance.values())


def test_training_goes_on_with_balancing_and_an_export_differs(ranks, tmp_path) -> None:
    hf = tmp_path / "hf"
    there = tmp_path / "there"
    back = tmp_path / "back"
    hf_models.save("qwen3_moe", hf)
    import_model(hf, there, lambda text: None)
    flags = "--expert-model-parallel-size 4 --balance-policy top2"
    losses, hosts_added = ranks(4).run(train_on, str(there), flags, str(there))[0]
    assert all(loss < 6 for loss in losses) and hosts_added > 0
    export_model(there, back, lambda text: None)
    before = Weights(hf)
    after = Weights(back)
    assert before.shapes == after.shapes
    assert all(not torch.equal(before.read(name), after.read(name)) for name in before.shapes if "proj" in name)


def save_with_prediction(directory: str, save: str) -> None:
    """Save an untrained model of an imported one's shape, with a layer for multi-token prediction."""
    flags = f"--load {directory} --use-checkpoint-args {TRAINING} --expert-model-parallel-size 2 --mtp-num-layers 1"
    patient(build(f"{flags} --save {save}", base="")).save()


@pytest.mark.slow
def test_an_export_leaves_out_multi_token_prediction(ranks, tmp_path) -> None:
    hf, there, mine, back = (tmp_path / name for name in ("hf", "there", "mine", "back"))
    hf_models.save("deepseek_v3", hf)
    import_model(hf, there, lambda text: None)
    ranks(2).run(save_with_prediction, str(there), str(mine))
    said: list[str] = []
    export_model(mine, back, said.append, hf_dir=there / "huggingface")
    assert said[0].endswith(" tensors of multi-token prediction are left out: mtp.*\n")
    assert Weights(back).shapes == Weights(hf).shapes


SPLIT = {"singleton_local_shards": True}
"""megatron-core's format with a separate tensor for each expert."""


def save_as_upstream(flags: str, directory: str, metadata: dict) -> torch.Tensor:
    """Save a model of megatron-core's own layers as Megatron-LM does, and return its logits."""
    run = build(f"--moe-layer-impl megatron --expert-model-parallel-size 2 {flags}")
    path = Path(directory, "iter_0000007")
    path.mkdir(parents=True, exist_ok=True)
    shape = run.config.transformer
    model = run.config.model
    args = {
        **dataclasses.asdict(model),
        **{name: getattr(shape, name) for name in MODEL_FIELDS if hasattr(shape, name)},
    }
    args |= {"num_experts": shape.num_moe_experts, "norm_epsilon": shape.layernorm_epsilon, "vocab_size": 127}
    (chunk,) = unwrap_model(run.model)
    state = {
        "args": argparse.Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": chunk.sharded_state_dict(metadata={**metadata, "dp_cp_group": run.groups.dp_cp}),
    }
    dist_checkpointing.save(state, str(path))
    if dist.get_rank() == 0:
        Path(directory, "latest_checkpointed_iteration.txt").write_text("7")
    return logits(run)


def logits(run: Run) -> torch.Tensor:
    (chunk,) = run.model
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(5))
    # A model with multi-token prediction computes losses only
    labels = tokens if run.config.transformer.mtp_num_layers else None
    with torch.no_grad():
        return chunk.eval()(tokens, torch.arange(16).expand_as(tokens), None, labels=labels)


def logits_of(directory: str) -> torch.Tensor:
    return logits(imported(directory, ""))


@pytest.mark.parametrize("metadata", [{}, SPLIT], ids=["together", "one by one"])
@pytest.mark.parametrize(
    "flags",
    [
        "--swiglu --disable-bias-linear",
        "--moe-layer-freq [1,0]",
        pytest.param("--mtp-num-layers 2 --position-embedding-type rope", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_of_megatron_lm(ranks, tmp_path, flags: str, metadata: dict) -> None:
    theirs = tmp_path / "theirs"
    ours = tmp_path / "ours"
    expected = ranks(2).run(save_as_upstream, flags, str(theirs), metadata)[0]
    import_megatron(theirs, ours, lambda text: None)
    shutil.rmtree(theirs)
    (found,) = ranks(1).run(logits_of, str(ours))
    assert (found - expected).abs().max() <= 1e-6
