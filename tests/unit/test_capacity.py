"""A dry run says whether a layout fits a described cluster."""

from pathlib import Path

import pytest

from megatron_balance.app import launch
from megatron_balance.app.dry_run import GIB, REMEDIES, read_cluster, verdict
from megatron_balance.job.groups import Topology
from megatron_balance.profile.cluster import Cluster, read
from tests.distributed.runs import BASE

CLUSTERS = Path(__file__).resolve().parents[2] / "configs/clusters"
H100 = "--cluster h100.yaml"


def h100() -> Cluster:
    return read(CLUSTERS / "h100.yaml")


def uses(**gib: float) -> dict[str, int]:
    return {use: int(gib.get(use, 0) * GIB) for use in REMEDIES}


def test_the_largest_stage_decides() -> None:
    assert verdict([uses(parameters=10), uses(parameters=20, activations=30)], h100(), H100) == (
        "--cluster h100.yaml: the job fits: stage 1 needs 50.00 GiB, and a GPU has 74.51 (80 GB); 24.51 GiB remain for "
        "what is not counted"
    )


@pytest.mark.parametrize(("needed", "words"), [(67.0, "the job fits: "), (67.1, "the job fits barely: ")])
def test_a_tenth_should_remain(needed: float, words: str) -> None:
    assert words in verdict([uses(gradients=needed)], h100(), H100)


@pytest.mark.parametrize("use", REMEDIES)
def test_the_largest_use_decides_what_helps(use: str) -> None:
    said = f"{H100}: the job does not fit: stage 0 needs 80.00 .* 74.51 .*; 80.00 GiB are {use}, .*: {REMEDIES[use]}"
    with pytest.raises(ValueError, match=said):
        verdict([uses(**{use: 80}), uses(guests=1)], h100(), H100)


def test_a_file_without_memory_says_nothing(tmp_path: Path) -> None:
    text = (CLUSTERS / "h100.yaml").read_text()
    (tmp_path / "c.yaml").write_text("".join(line for line in text.splitlines(True) if "memory_gb:" not in line))
    assert "so it is unknown" in verdict([uses(parameters=99)], read(tmp_path / "c.yaml"), H100)


def test_all_clusters_give_a_memory() -> None:
    assert all(read(path).memory for path in CLUSTERS.glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "topology", "said"),
    [
        ("h100", Topology(64, 16), "its nodes have 8 GPUs, but this job has 64 .*; set LOCAL_WORLD_SIZE=8, or"),
        ("parm_a", Topology(16, 8), "has 1 nodes, but this job has 16 processes, 8 on a node; start at most 8"),
        ("absent", Topology(8, 8), "cannot be read"),
    ],
)
def test_a_job_that_is_too_large(name: str, topology: Topology, said: str) -> None:
    with pytest.raises(ValueError, match=f"--cluster .*{name}.yaml: {said}"):
        read_cluster("--cluster", str(CLUSTERS / f"{name}.yaml"), topology)


BIG = "--num-layers 3 --hidden-size 8192 --num-attention-heads 64 --moe-ffn-hidden-size 32768 --dry-run"


@pytest.mark.parametrize(
    "flag", ["--cluster", pytest.param("--balance-policy top2 --balance-profile", marks=pytest.mark.slow)]
)
def test_a_dry_run_that_does_not_fit_fails(flag: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = f"{flag} {CLUSTERS / 'h100.yaml'} --expert-model-parallel-size 2"
    with pytest.raises(SystemExit) as ended:
        launch.pretrain(f"{BASE} {BIG} {flags}".split())
    assert isinstance(ended.value.code, str), "a message, so that the exit status is 1"
    assert f"error: {flag.split()[-1]} {CLUSTERS / 'h100.yaml'}: the job does not fit: stage 0 " in ended.value.code
    assert "memory per rank, GiB" in capsys.readouterr().out
    launch.pretrain(f"{BASE} --dry-run {flags}".split())
    assert "the job fits: stage 0 needs 0.00 GiB" in capsys.readouterr().out
