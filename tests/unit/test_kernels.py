"""Triton kernels: on a GPU here, and without one in processes of their own, where triton can be imported."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in (ROOT / "tests" / "kernels").glob("test_*.py"))
COMPILED = ["test_compile.py"]
"""Files whose tests compile kernels; all others interpret them."""

INTERPRETED = [file for file in FILES if file not in COMPILED]


def path_of_triton() -> list[str]:
    """Return what PYTHONPATH needs so that triton can be imported.

    The fetched triton comes first, because the interpreter of an older one may fail with the installed numpy.
    """
    (version,) = re.findall(r"^TRITON=(\S+)$", (ROOT / "scripts" / "fetch.sh").read_text(), re.MULTILINE)
    fetched = ROOT / ".cache" / f"triton-{version}"
    if fetched.is_dir():
        return [str(fetched)]
    if not importlib.util.find_spec("triton"):
        pytest.fail(f"{fetched} is missing: scripts/test.sh fetches it before it runs the tests")
    return []


@pytest.mark.parametrize("files", [COMPILED, INTERPRETED], ids=["compiled", "interpreted"])
def test_without_a_gpu(files: list[str], tmp_path: Path) -> None:
    inherited = [path for path in [os.environ.get("PYTHONPATH")] if path]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *path_of_triton(), *inherited]),
        "TRITON_INTERPRET": str(int(files == INTERPRETED)),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    # Without conftest.py, which imports megatron-core and leaves these files out of all other runs
    flags = ["--noconftest", "-p", "no:cacheprovider", "--timeout=120"]
    command = [sys.executable, "-m", "pytest", *flags, *(f"tests/kernels/{file}" for file in files)]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


# tests/kernels/equal.py imports triton, which not every machine has


def routing(tokens: int, experts: int, topk: int, empty: int) -> torch.Tensor:
    """Return a routing [T, E] in which tokens choose about `topk` experts, and nobody every `empty`-th one."""
    from tests.kernels import equal

    routing_TE = equal.routing(tokens, experts, topk / experts, seed=tokens + experts)
    routing_TE[:, ::empty] = False
    return routing_TE


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "experts", "topk"),
    [(0, 8, 2), (1, 8, 2), (33, 130, 4), (8192, 8, 2), (4097, 64, 6), (16384, 256, 8), (16384, 256, 0)],
)
def test_order_of_rows_on_a_gpu(tokens: int, experts: int, topk: int) -> None:
    from tests.kernels.equal import order_equal

    for empty in (3, experts + 1):
        order_equal(routing(tokens, experts, topk, empty), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [1, 40, 5000])
@pytest.mark.parametrize("blocks", [0, 1, 7, 64, 4096])
def test_index_of_blocks_on_a_gpu(blocks: int, largest: int) -> None:
    from tests.kernels.equal import blocks_equal

    generator = torch.Generator().manual_seed(blocks)
    blocks_equal(torch.randint(1, largest + 1, (blocks,), generator=generator).tolist(), blocks, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "experts", "topk", "hidden"),
    [
        *((0, 8, 2, 4096), (5, 8, 0, 4096), (31, 3, 1, 1), (33, 130, 4, 1030)),
        *((4096, 8, 2, 4096), (2048, 64, 6, 2048), (1024, 256, 8, 7168)),
    ],
)
def test_copies_and_sums_on_a_gpu(tokens: int, experts: int, topk: int, hidden: int) -> None:
    from tests.kernels.equal import rows_equal

    rows_equal(routing(tokens, experts, topk, empty=3), hidden, seed=tokens, device="cuda")


@pytest.mark.gpu
def test_offsets_beyond_31_bits_on_a_gpu() -> None:
    """One row for each token, so that copies and sums only move them: 4.3 GB."""
    from megatron_balance.kernels import rows

    tokens = 300_000
    hidden = 7168
    tokens_TH = torch.randn(1000, hidden, device="cuda").bfloat16().repeat(tokens // 1000, 1)
    tokens_TH[:, 0] = torch.arange(tokens, device="cuda") % 251
    row_T, first_T = (order(tokens, device="cuda").to(torch.int32) for order in (torch.randperm, torch.arange))
    rows_RH = rows.gather_rows(tokens_TH, row_T, first_T, tokens)
    for part in torch.arange(tokens, device="cuda").split(30_000):
        assert torch.equal(rows_RH[row_T[part]], tokens_TH[part])
    assert torch.equal(rows.combine(rows_RH, row_T, first_T), tokens_TH)
