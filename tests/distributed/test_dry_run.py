"""--dry-run reports a real run's needs: exact values exactly, and estimates closely."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_balance.app import launch
from megatron_balance.app.dry_run import held, imagined_run, model_chunk, reserved_tokens
from megatron_balance.app.memory import chunk_activations
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.config.run_config import RunConfig
from megatron_balance.training.loop import train_step
from tests.distributed import runs
from tests.distributed.runs import BASE

ROOT = Path(__file__).resolve().parents[2]

LAYOUTS = {
    "experts, guests, distributed optimizer": (
        "--expert-model-parallel-size 2 --bf16 --use-distributed-optimizer --balance-policy top2 "
        "--balance-guest-slots 3"
    ),
    "tensor parallel, full precision": (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --disable-bias-linear "
        "--expert-tensor-parallel-size 2 --swiglu --normalization RMSNorm"
    ),
    "virtual stages, distributed optimizer": (
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --num-layers 4 --global-batch-size 8 --bf16 "
        "--num-layers-per-virtual-pipeline-stage 1 --use-distributed-optimizer --overlap-grad-reduce "
        "--moe-layer-freq ([1]*3+[0]) --untie-embeddings-and-output-weights"
    ),
    "experts apart from data, main parameters": "--expert-model-parallel-size 4 --bf16 --grad-reduce-in-bf16",
    "moments of SGD": "--expert-model-parallel-size 2 --optimizer sgd --sgd-momentum 0.9 --moe-layer-impl megatron",
}


def hold(flags: str) -> dict[str, int]:
    """Return what this rank holds after a real step."""
    run = runs.build(flags)
    train_step(run)
    return held(run)


def parsed(flags: str, world_size: int) -> RunConfig:
    return parse_args(f"{BASE} {flags} --dry-run --distributed-backend gloo".split(), Machine.here(world_size)).config


@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_exact_is_what_a_real_run_holds(flags: str, ranks) -> None:
    config = parsed(flags, 4)
    for rank, real in enumerate(ranks(4).run(hold, flags)):
        with imagined_run(config, rank, 4) as run:
            assert held(run) == real, rank


ACTIVATIONS = {
    "group-query attention, experts with SwiGLU": (
        "--expert-model-parallel-size 2 --swiglu --disable-bias-linear --normalization RMSNorm --group-query-attention "
        "--num-query-groups 2 --position-embedding-type rope --untie-embeddings-and-output-weights"
    ),
    "dense layers, half precision": (
        "--bf16 --moe-layer-freq ([0]+[1]) --swiglu --position-embedding-type rope --qk-layernorm"
    ),
    "norms across heads, half precision": (
        "--bf16 --qk-layernorm-across-heads --normalization RMSNorm --position-embedding-type rope "
        "--tensor-model-parallel-size 2 --disable-bias-linear"
    ),
    "latent attention, split heads": (
        "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
        "--v-head-dim 12 --rope-type rope --position-embedding-type rope --normalization RMSNorm --qk-layernorm "
        "--disable-bias-linear --swiglu --tensor-model-parallel-size 2 --sequence-parallel"
    ),
    "multi-token prediction": "--mtp-num-layers 2 --position-embedding-type rope --vocab-size 1023",
    "recomputed multi-token prediction": (
        "--mtp-num-layers 2 --position-embedding-type rope --vocab-size 1023 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1"
    ),
    "shared experts": "--disable-bias-linear --swiglu --moe-shared-expert-intermediate-size 64",
    "recomputed attention": "--expert-model-parallel-size 2 --recompute-granularity selective",
    "recomputed experts": "--recompute-granularity selective --recompute-modules moe",
    "sequence parallel, sharded experts": (
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2 --disable-bias-linear"
    ),
    "certified passes": (
        "--expert-model-parallel-size 2 --balance-policy quota --balance-load exact --balance-certify 0.5"
    ),
    "documents apart": "--reset-attention-mask",
    "tokens split by s1": "--tensor-model-parallel-size 2 --disable-bias-linear --moe-parallel-schedule s1",
}
EVEN = "--seq-length 64 --hidden-size 64 --moe-router-force-workload balanced"
DEVIATION = 0.04
"""The estimate omits masks, label indices and norm statistics: at this size, up to 3.6% in total."""


def keep(flags: str) -> tuple[int, int]:
    """Return the bytes that a forward pass of this rank keeps for its backward pass, and their estimate."""
    run = runs.build(f"{EVEN} {flags}")
    batch = next(run.data.train[0])
    known = {parameter.untyped_storage()._cdata for chunk in run.model for parameter in chunk.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run.model[0](
            batch["tokens"],
            batch["position_ids"],
            batch.get("documents"),
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    assert loss.requires_grad
    kept = sum(storage.nbytes() for key, storage in storages.items() if key not in known)
    chunk = model_chunk(run.model[0])
    return kept, chunk_activations(run.config, chunk, reserved_tokens(run.config, run), run.vocab_size).stored


@pytest.mark.parametrize("flags", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_the_estimate_of_activations_is_near_what_autograd_keeps(flags: str, ranks) -> None:
    for measured, estimated in ranks(2 if "parallel-size" in flags else 1).run(keep, flags):
        assert estimated == pytest.approx(measured, rel=DEVIATION)


def told(flags: str) -> str:
    """Return the message with which the entry point ends."""
    with pytest.raises(SystemExit) as ended:
        launch.pretrain([*BASE.split(), *flags.split()])
    assert isinstance(ended.value.code, str), "a message, so that the exit status is 1"
    return ended.value.code


def test_a_mistake_that_building_finds_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "--rampup-batch-size 3 1 64: START" in told("--rampup-batch-size 3 1 64 --global-batch-size 16 --dry-run")
    assert not torch.distributed.is_initialized()


def test_flags_for_gpus_pass_on_any_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = (
        "--dry-run --distributed-backend nccl --transformer-impl transformer_engine --bf16 --swiglu "
        "--disable-bias-linear --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 "
        "--balance-policy top2 --moe-comm-node-size 2 --balance-ownership transfer --moe-comm-alltoall pipe"
    )
    launch.pretrain([*BASE.split(), *flags.split()])
    lines = capsys.readouterr().out.splitlines()
    assert "  expert parallel            2  ranks 0-1" in lines
    assert "  pipeline parallel          2  ranks 0, 2, on 2 nodes" in lines
    assert not torch.distributed.is_initialized()
    assert len([line for line in lines if re.match(r" +[01] +[02]-[13] +1 \(1\) ", line)]) == 2


MIXTRAL = (
    "@configs/models/mixtral_8x7b.args --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 "
    "--balance-policy pro_prophet --balance-overlap blockwise --balance-profile auto"
)
QWEN = (
    "@configs/models/qwen3_30b_a3b.args --expert-model-parallel-size 32 --tensor-model-parallel-size 2 "
    "--sequence-parallel --expert-tensor-parallel-size 1"
)
OTHERS = (
    "--micro-batch-size 1 --global-batch-size 512 --train-iters 10 --lr 1e-4 --bf16 --use-distributed-optimizer "
    "--mock-data --tokenizer-type NullTokenizer --dry-run"
)


@pytest.mark.parametrize(
    ("flags", "billions"),
    [pytest.param(MIXTRAL, 1.877, marks=pytest.mark.slow), pytest.param(QWEN, 1.683, marks=pytest.mark.slow)],
    ids=["mixtral", "qwen"],
)
def test_256_ranks_need_little_of_one_machine(flags: str, billions: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "pretrain_gpt_moe.py", *flags.split(), *OTHERS.split()],
        cwd=ROOT,
        env=os.environ | {"WORLD_SIZE": "256", "LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, output
    assert f" {billions:.3f} " in output
    assert used.ru_maxrss < 1.5e6, "KiB"
    # CPU time, not wall-clock time, because tests share their machine
    assert used.ru_utime + used.ru_stime < 30


def test_a_dry_run_compares_certified_passes_with_even_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    flags = (
        "--dry-run --distributed-backend gloo --expert-model-parallel-size 4 --pipeline-model-parallel-size 2 "
        "--seq-length 1024 --moe-ffn-hidden-size 8192 --global-batch-size 8 --balance-policy quota "
        "--balance-inner-policy quota"
    )
    even: list[str] = []
    certified: list[str] = []
    out = ""
    for more, found in (("", even), ("--balance-certify 0.125", certified)):
        launch.pretrain([*BASE.split(), *flags.split(), *more.split()])
        out = capsys.readouterr().out
        found += re.findall(r"^ +[01] +[0-9-]+ +1 \(1\) .* ([0-9.]+) +[0-9.]+ +[12]$", out, re.MULTILINE)
    stages = re.findall(
        r"^  stage ([01]): ([0-9.]+) GiB \(4608 rows\) .* ([0-9.]+) GiB \(4096 rows\) for even", out, re.MULTILINE
    )
    assert stages == [("0", certified[0], even[0]), ("1", certified[1], even[1])]
    assert float(certified[0]) > float(even[0]) and "estimated, for certified passes)" in out
