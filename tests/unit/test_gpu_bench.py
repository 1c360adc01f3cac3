"""Benches of one GPU, and the sanitizer's verdicts: all of them run at tiny sizes without CUDA, and can fail."""

import json
from pathlib import Path

import pytest

import gpu_overlap
import gpu_rates
import measured_cluster
from megatron_balance.profile.cluster import Ranks, profile_of, read
from tests.gpu.sanitized import verdict

H100 = Path(__file__).parents[2] / "configs/clusters/h100.yaml"


def test_rates_become_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = tmp_path / "rates.json"
    output = tmp_path / "measured.yaml"
    assert gpu_rates.main(["--cpu", "--output", str(rates), "--seconds", "1e9"]) == 0
    assert "forward grouped" in capsys.readouterr().out
    found = json.loads(rates.read_text())
    assert not found["failures"] and {"products", "attention", "rows", "memory-bound", "codecs"} <= {*found["tables"]}
    assert measured_cluster.main([str(rates), "--base", str(H100), "--output", str(output)]) == 0
    cluster = read(output)
    base = read(H100)
    assert (cluster.node, cluster.network, cluster.gpus_per_node) == (base.node, base.network, base.gpus_per_node)
    (gpu,) = cluster.gpus
    assert gpu.half_tflops is not None and "measured" in gpu.half_tflops.source
    profile = profile_of(cluster, Ranks(8, 8, 8), 64, 64)
    assert profile.forward.seconds_per_token == pytest.approx(4 * 64 * 64 / (1e12 * gpu.half_tflops.value))
    names = {table["name"] for table in cluster.measured}
    assert {"products, weight gradient, by slot", "attention, backward", "rows, combine", "device copy"} <= names
    assert len(names) == len(cluster.measured)


def test_numbers_with_time_of_the_host_are_left_out() -> None:
    row = {"bytes": 1, "value": 1234.567, "spread": 0.012345}
    dtypes = [{"dtype": dtype, "value": 5.0, "spread": 0.0} for dtype in ("float32", "bfloat16")]
    tables = {
        "device copy": {"unit": "GB/s", "columns": ["bytes"], "rows": [row, {**row, "bytes": 2, "ahead": False}]},
        "square product": {"unit": "TFLOP/s", "columns": ["dtype"], "rows": dtypes},
    }
    facts = {"device": "NVIDIA H100", "date": "2026-01-01", "torch": "2", "memory_bytes": 85 * 10**9}
    base = {"gpus": [{"name": "data sheet"}]}
    text = measured_cluster.described({"facts": facts, "tables": tables}, base, "some")
    assert "- [1, 1235.0, 0.01235]\n" in text and "[2," not in text and "memory_gb: {value: 85.0," in text
    with pytest.raises(ValueError, match="square product float32: was not measured"):
        measured_cluster.described({"facts": facts, "tables": {"device copy": tables["device copy"]}}, base, "some")


def test_what_fails_is_named_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_memory

    def copies(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(gpu_memory, "copies", copies)
    rates = tmp_path / "rates.json"
    common = ["--cpu", "--output", str(rates), "--sections", "copy", "square"]
    assert gpu_rates.main([*common, "--seconds", "1e9"]) == 1
    found = json.loads(rates.read_text())
    assert found["failures"] == ["copy: RuntimeError: no memory"] and "square product" in found["tables"]
    assert gpu_rates.main([*common, "--seconds", "0"]) == 1
    assert json.loads(rates.read_text())["failures"][1] == "square: left out, 0 s are over"


def test_overlap(tmp_path: Path) -> None:
    output = tmp_path / "overlap.json"
    assert gpu_overlap.main(["--cpu", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["tables"]["overlap"]["rows"]
    assert {row["side"] for row in rows} >= {"kernel", "device to host", "foreach_add_"}
    numbers = {row["number"]: row["value"] for row in rows if row["side"] == "kernel"}
    saved = numbers["main ms"] + numbers["side ms"] - numbers["both ms"]
    assert numbers["hidden"] == pytest.approx(saved / min(numbers["main ms"], numbers["side ms"]))


CLEAN = "========= ERROR SUMMARY: 0 errors"
RACES = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
FOUND = "========= {}\n=========     at {}+0x1f0\n=========     by thread (0,0,0)\n========= ERROR SUMMARY: 1 error"


@pytest.mark.parametrize(
    ("tool", "status", "text", "passed", "said"),
    [
        ("memcheck", 0, CLEAN, True, "0 errors"),
        ("racecheck", 0, RACES, True, "0 hazards"),
        ("memcheck", 0, "no kernel ran", False, "exit status 0: no kernel ran"),
        ("memcheck", 1, f"AssertionError: sums\n{CLEAN}", False, "exit status 1"),
        ("memcheck", 7, FOUND.format("Invalid __global__ read", "copy_kernel"), False, "read at copy_kernel"),
        ("initcheck", 7, FOUND.format("Uninitialized __global__ memory read", "sum_kernel"), False, "at sum_kernel"),
        ("initcheck", 7, FOUND.format("Uninitialized __global__ memory read", "void cub::Scan"), True, "cub::Scan"),
        ("initcheck", 7, "========= something new", False, "something"),
    ],
)
def test_verdicts(tool: str, status: int, text: str, passed: bool, said: str) -> None:
    found = verdict(tool, status, text)
    assert found.passed == passed and said in found.said
