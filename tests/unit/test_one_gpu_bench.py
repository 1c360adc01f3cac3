"""tools/bench/one_gpu.py, executed on a CPU with a tiny model, and what it says about a GPU's trace."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import device_trace
import one_gpu
from megatron_balance.cli.checks import Machine
from tests.unit.profiler_traces import ITERATION, WINDOW, trace

ROOT = Path(__file__).parents[2]
TINY = (
    "--iterations 2 --tokens 8 16 32 64 --hidden-size 32 --num-attention-heads 2 --num-query-groups 2 "
    "--ffn-hidden-size 32 --moe-ffn-hidden-size 32 --seq-length 32 --global-batch-size 2 --vocab-size 100"
)


@pytest.mark.slow
def test_the_whole_script_runs_without_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    command = [sys.executable, str(ROOT / "tools/bench/one_gpu.py"), "--mixtral", "--output", str(file)]
    command += ["--cluster", str(ROOT / "configs/clusters/h100.yaml"), *TINY.split()]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "RANK": "3", "WORLD_SIZE": "4"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    numbers = json.loads(file.read_text())
    assert numbers["failed"] == [] and numbers["machine"]["device"] == "CPU" and numbers["memory"] is None
    assert numbers["shape"] == {"layers": 1, "microbatches": 2, "tokens": 32, "topk": 2, "waits_expected": 3}
    for part in (numbers["time"]["wall"], numbers["time"]["cpu"], numbers["layer"]):
        assert part["ratio"]["n"] == 2 and all(one["median"] > 0 for one in part["ms"].values())
    spans = numbers["profile"]["balanced"]["spans"]
    assert set(spans) == {"MoE layer", "MoE layer, backward", "experts", "experts, backward", "optimizer"}
    assert all(one["host_ms"] > 0 for one in spans.values())
    assert numbers["experts"]["forward"]["seconds_per_token"] >= 0
    assert numbers["predicted"]["h100"]["seconds"] > 0
    assert "predicted for h100 / measured, ms: iteration " in ran.stdout
    assert "not measured without CUDA: waits" in ran.stdout


def test_what_it_says_about_a_gpu() -> None:
    found = device_trace.summary(trace(*ITERATION), WINDOW, one_gpu.SPANS) | {"waits_expected": 3}
    assert list(one_gpu._profile_lines("balanced", found, cast(Machine, SimpleNamespace(cuda=True)))) == [
        "balanced: 0.94 of 1.00 ms host busy, 3 waits, 3 launches, 5 kernels, 0.095 ms",
        "balanced: the host waits 3 times an iteration (expected: 3)",
        "balanced: device busy 0.093 of 0.475 ms, idle 80.4%",
        "        0.070 ms     2  gemm",
        "        0.015 ms     2  gather",
        "        0.010 ms     1  triton_fit",
    ]
