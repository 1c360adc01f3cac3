"""configs/: published models have the shapes of their config.json, and every model fits its layout's cluster."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from megatron_balance.checkpoint.saved_flags import MODEL_FIELDS
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.config.run_config import RunConfig
from megatron_balance.convert.model import Model
from megatron_balance.convert.settings import run_config
from megatron_balance.profile.cluster import read as read_cluster
from tests.unit.layout_headers import MODELS, ROOT, Header
from tests.unit.published_models import PUBLISHED

PUBLISHED_AS = {
    "deepseek_v2_lite": "DeepSeek-V2-Lite",
    "deepseek_v3": "DeepSeek-V3",
    "glm45_air": "GLM-4.5-Air",
    "gpt_oss_120b": "gpt-oss-120b",
    "minimax_m2": "MiniMax-M2",
    "mixtral_8x22b": "Mixtral-8x22B",
    "mixtral_8x7b": "Mixtral-8x7B",
    "moonlight_16b_a3b": "Moonlight-16B-A3B",
    "olmoe_1b_7b": "OLMoE-1B-7B",
    "qwen15_moe_a2_7b": "Qwen1.5-MoE-A2.7B",
    "qwen3_235b_a22b": "Qwen3-235B-A22B",
    "qwen3_30b_a3b": "Qwen3-30B-A3B",
}
"""Files of configs/models, and the models in published_models.py."""


def shape(config: RunConfig) -> dict[str, Any]:
    """Return the fields that define a model."""
    fields = {**vars(config.transformer), **vars(config.model), **vars(config.tokenizer)}
    return {name: fields.get(name) for name in (*MODEL_FIELDS, "vocab_size", "seq_length")}


@pytest.mark.parametrize("model", PUBLISHED_AS)
def test_a_published_model_has_the_shape_of_its_config_json(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the file can therefore load what convert_checkpoint.py imports."""
    monkeypatch.chdir(ROOT)
    once = "--micro-batch-size 1 --train-iters 1 --lr 1e-5 --mock-data --tokenizer-type NullTokenizer"
    machine = Machine(1, cuda=False, transformer_engine=False, apex=False)
    config = parse_args([f"@configs/models/{model}.args", *once.split()], machine).config
    published = PUBLISHED[PUBLISHED_AS[model]][1]
    assert shape(config) == shape(run_config(Model(published), None))
    assert config.transformer.moe_router_dtype == "fp32"
    coefficient = config.transformer.moe_aux_loss_coeff
    assert coefficient == published.get("router_aux_loss_coef", coefficient) != 0


UNKNOWN_GB = {"flexmoe": 40, "demi": 16}
"""Memory of the smallest GPUs of their kind, for clusters whose papers do not give it."""

ROOM = 0.1
"""Part of a GPU's memory that stays free for what a dry run does not count."""

DOCUMENTED = re.compile(r"^\| `(\w+)` \| (\d+) x (\d+) .*\| (\d+\.\d) GiB \|", re.MULTILINE)
"""Rows of the table in docs/running.md: model, nodes, GPUs per node, memory of the fullest rank."""


def test_the_documentation_lists_every_published_model() -> None:
    rows = {row[1]: row for row in DOCUMENTED.finditer((ROOT / "docs" / "running.md").read_text())}
    assert rows.keys() == PUBLISHED_AS.keys()
    for model, row in rows.items():
        assert (int(row[2]), int(row[3])) == (Header.of(model).nodes, Header.of(model).gpus)


@pytest.mark.slow
@pytest.mark.parametrize("model", [model for model in MODELS if Header.of(model).cluster is not None])
def test_every_model_fits_the_cluster_of_its_layout(model: str) -> None:
    header = Header.of(model)
    assert header.cluster is not None
    given = [gpu.memory_gb.value for gpu in read_cluster(header.cluster).gpus if gpu.memory_gb is not None]
    memory_gb = min(given, default=UNKNOWN_GB.get(header.cluster.stem))
    assert memory_gb is not None
    ran = subprocess.run(
        [ROOT / "scripts" / "pretrain.sh", model, "out", "none", "mock", "--dry-run"],
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"dry run of {header.nodes * header.gpus} processes, {header.gpus} on a node" in ran.stdout
    totals = re.findall(r"^ +\d+ +\d+(?:-\d+)? +\d+ \(\d+\) .* ([\d.]+) +\d+$", ran.stdout, re.MULTILINE)
    fullest = max(map(float, totals))
    assert fullest * 2**30 <= (1 - ROOM) * memory_gb * 1e9
    documented = {row[1]: row[4] for row in DOCUMENTED.finditer((ROOT / "docs" / "running.md").read_text())}
    assert model not in documented or documented[model] == f"{fullest:.1f}"
