"""scripts/: the flags of every model and layout parse for the layout's number of GPUs; schedulers start all nodes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.config.run_config import RunConfig
from megatron_balance.profile.cluster import read as read_cluster
from tests.unit.layout_headers import MODELS, Header

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"

SHELL = [
    *sorted(SCRIPTS.glob("*.sh")),
    *sorted(SCRIPTS.glob("slurm/*")),
    ROOT / "tests" / "gpu_campaign.sh",
    ROOT / ".ci" / "run",
]


@pytest.fixture
def torchrun(tmp_path: Path) -> Path:
    """Return a stand-in for torchrun that prints its arguments, each followed by a zero byte. Beside it is one for
    getent that knows all hosts but nod0."""
    path = tmp_path / "torchrun"
    path.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    path.with_name("getent").write_text('#!/bin/sh\n[ "$2" != nod0 ]\n')
    for program in (path, path.with_name("getent")):
        program.chmod(0o755)
    return path


def words(torchrun: Path, script: Path, *arguments: str, **environment: str) -> list[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "MASTER", "NODE_RANK", "NNODES"))
    }
    clean |= {"TORCHRUN": str(torchrun), "PATH": f"{torchrun.parent}:{clean['PATH']}"}
    ran = subprocess.run([script, *arguments], env=clean | environment, capture_output=True, check=True)
    return ran.stdout.decode().split("\0")[:-1]


@pytest.mark.parametrize(
    ("model", "flags", "given", "expected"),
    [
        ("tiny", [], None, ""),
        ("gpt2_moe", [], None, "1"),
        ("gpt2_moe", ["--tensor-model-parallel-size", "1"], None, ""),
        ("gpt2_moe", ["--tp-comm-overlap"], None, ""),
        ("tiny", ["--tensor-model-parallel-size=2"], None, "1"),
        ("tiny", ["--tensor-model-parallel-size", "2"], "32", "32"),
        ("tiny", [], "1", "1"),
    ],
)
def test_kernels_start_in_order_only_for_tensor_parallelism(
    model: str,
    flags: list[str],
    given: str | None,
    expected: str,
    torchrun: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torchrun.write_text("#!/bin/sh\nprintf '%s\\0' \"${CUDA_DEVICE_MAX_CONNECTIONS}\"\n")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    environment = {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    assert words(torchrun, SCRIPTS / f"pretrain_{model}.sh", "o", "none", "mock", *flags, **environment) == [expected]


def parsed(flags: list[str], world_size: int, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(ROOT)
    machine = Machine(world_size, cuda=True, transformer_engine=True, apex=False)
    # Otherwise megatron-core looks for the kernels of this machine
    return parse_args([*flags, "--dry-run"], machine).config


def test_every_model_has_a_layout_and_a_script() -> None:
    models, layouts = (
        {path.stem for path in (ROOT / "configs" / kind).glob("*.args")} for kind in ("models", "layouts")
    )
    assert models == set(MODELS) == {path.stem.removeprefix("pretrain_") for path in SCRIPTS.glob("pretrain_*.sh")}
    assert layouts == {model if model in layouts else model.rpartition("_")[0] for model in models}
    for model in models:
        lines = (SCRIPTS / f"pretrain_{model}.sh").read_text().splitlines()
        assert lines == ["#!/usr/bin/env bash", f'exec "$(dirname "$0")/pretrain.sh" {model} "$@"']


@pytest.mark.parametrize("model", MODELS)
def test_flags_parse_for_the_number_of_gpus(model: str, torchrun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = Header.of(model)
    script = SCRIPTS / f"pretrain_{model}.sh"
    nodes = str(header.nodes)
    several = {"NNODES": nodes, "NODE_RANK": "0", "MASTER_ADDR": "node0"}
    launch, flags = split(words(torchrun, script, "out put", "none", "mock", "--train-iters", "7", **several))
    assert launch["--nproc-per-node"] == str(header.gpus) and launch["--nnodes"] == nodes
    config = parsed(flags, header.nodes * header.gpus, monkeypatch)
    assert (config.checkpoint.save, config.checkpoint.load) == ("out put", "out put")
    assert config.train.train_iters == 7 and config.train.exit_signal_handler
    # Checkpoints can be resumed on any layout, and every rank owns an expert
    assert config.transformer.num_moe_experts % config.transformer.expert_model_parallel_size == 0
    assert config.transformer.cross_entropy_loss_fusion
    if header.cluster is not None:
        assert read_cluster(header.cluster).gpus_per_node.value == header.gpus


def test_a_layout_overrides_common_flags(torchrun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = SCRIPTS / "pretrain.sh"
    paths = ["out", "none", "mock"]
    launch, flags = split(words(torchrun, script, "tiny", *paths))
    config = parsed(flags, 4, monkeypatch)
    assert (config.train.train_iters, config.optimizer.lr, config.optimizer.weight_decay) == (200, 2e-3, 0.1)
    assert launch["--nproc-per-node"] == "4"
    launch, _ = split(words(torchrun, script, "tiny", *paths, GPUS_PER_NODE="2"))
    assert launch["--nproc-per-node"] == "2"
    launch, _ = split(words(torchrun, script, "mixtral_8x7b", *paths, SLURM_GPUS_ON_NODE="6"))
    assert launch["--nproc-per-node"] == "6"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("NNODES=2 NODE_RANK=1", "MASTER_ADDR=: every node needs the same address of node 0; NNODES is 2"),
        ("NNODES=2 NODE_RANK=0 MASTER_ADDR=localhost", "MASTER_ADDR=localhost: every node needs"),
        ("NNODES=2 NODE_RANK=0 MASTER_ADDR=::1", "MASTER_ADDR=::1: every node needs"),
        ("NNODES=2 NODE_RANK=1 MASTER_ADDR=nod0", "MASTER_ADDR=nod0: this node knows no such host"),
        ("NNODES=2 NODE_RANK=2 MASTER_ADDR=node0", "NODE_RANK=2: set it"),
        ("NNODES=2 NODE_RANK=first MASTER_ADDR=node0", "NODE_RANK=first: set it"),
        ("NODE_RANK=1 MASTER_ADDR=node0", "NODE_RANK=1: set it"),
        ("NNODES=two NODE_RANK=0 MASTER_ADDR=node0", "NNODES=two: give the number of nodes"),
        ("SLURM_NNODES=2 SLURM_NODEID=1", "MASTER_ADDR=: every node needs"),
        ("SLURM_NNODES=2 SLURM_NODEID=1 SLURM_LOCALID=3 MASTER_ADDR=node0", "SLURM_LOCALID=3: one task per node"),
    ],
)
def test_nodes_that_would_wait_for_each_other_are_refused(torchrun: Path, environment: str, message: str) -> None:
    given = dict(pair.split("=", 1) for pair in environment.split())
    with pytest.raises(subprocess.CalledProcessError) as failed:
        words(torchrun, SCRIPTS / "pretrain_tiny.sh", "out", "none", "mock", **given)
    assert failed.value.returncode == 2 and message in failed.value.stderr.decode()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ("", ("1", "0", "localhost")),
        ("NNODES=1 NODE_RANK=0 MASTER_ADDR=127.0.0.1", ("1", "0", "127.0.0.1")),
        ("NNODES=12 NODE_RANK=08 MASTER_ADDR=10.127.0.1", ("12", "08", "10.127.0.1")),
        ("SLURM_NNODES=2 SLURM_NODEID=1 SLURM_LOCALID=0 MASTER_ADDR=localcluster", ("2", "1", "localcluster")),
    ],
)
def test_nodes_that_find_each_other_start(torchrun: Path, environment: str, expected: tuple[str, str, str]) -> None:
    given = dict(pair.split("=", 1) for pair in environment.split())
    launch, _ = split(words(torchrun, SCRIPTS / "pretrain_tiny.sh", "out", "none", "mock", **given))
    assert (launch["--nnodes"], launch["--node-rank"], launch["--master-addr"]) == expected


def split(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return torchrun's flags and the training script's arguments."""
    at = arguments.index("pretrain_gpt_moe.py")
    return dict(zip(arguments[:at:2], arguments[1:at:2], strict=True)), arguments[at + 1 :]


def test_tokenizers_and_slurm(torchrun: Path, tmp_path: Path) -> None:
    script = SCRIPTS / "pretrain_tiny.sh"
    there = words(torchrun, script, "out", str(tmp_path), "data", SLURM_NNODES="3", SLURM_NODEID="2", MASTER_ADDR="a")
    launch, flags = split(there)
    assert (launch["--nnodes"], launch["--node-rank"], launch["--master-addr"]) == ("3", "2", "a")
    assert flags[flags.index("--tokenizer-type") + 1] == "HuggingFaceTokenizer"
    _, flags = split(words(torchrun, script, "out", "tokenizer.model", "data"))
    assert flags[flags.index("--tokenizer-type") + 1] == "SentencePieceTokenizer"
    for command, message in (
        ([script, "out"], "CHECKPOINT_PATH TOKENIZER_MODEL DATA_PATH"),
        (
            [SCRIPTS / "pretrain.sh", "mixtral", "out", "none", "mock"],
            "mixtral: there is no configs/models/mixtral.args",
        ),
    ):
        failed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert failed.returncode == 2 and message in failed.stderr


@pytest.fixture
def slurm(tmp_path: Path, torchrun: Path) -> Path:
    """Return a directory of stand-ins for SLURM's commands: srun exits with STATUS, scontrol records its arguments."""
    commands = {
        "srun": 'shift && "$@" && exit "${STATUS}"',
        "scontrol": f'[ "$1" = show ] && printf "first\\nsecond\\n" || echo "$@" >>{tmp_path}/told',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(("status", "left", "queued"), [(1, 100, True), (1, 4000, False), (0, 100, False)])
def test_a_job_out_of_time_is_queued_again(slurm: Path, status: int, left: int, queued: bool) -> None:
    now = int(subprocess.run(["date", "+%s"], capture_output=True, text=True, check=True).stdout)
    job = {"SLURM_JOB_ID": "25000", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_END_TIME": str(now + left)}
    ran = subprocess.run(
        ["bash", "scripts/slurm/pretrain.sbatch", "scripts/pretrain.sh", "tiny", "out", "none", "mock"],
        cwd=ROOT,
        env={**os.environ, **job, "STATUS": str(status), "TORCHRUN": str(slurm / "torchrun")}
        | {"PATH": f"{slurm}:{os.environ['PATH']}", "SLURM_NNODES": "2", "SLURM_NODEID": "0"},
        capture_output=True,
        check=False,
    )
    launch, _ = split(ran.stdout.decode().split("\0")[:-1])
    assert (launch["--nnodes"], launch["--master-addr"], launch["--master-port"]) == ("2", "first", "25000")
    assert ran.returncode == status
    assert (slurm / "told").exists() == queued and (not queued or (slurm / "told").read_text() == "requeue 25000\n")


def test_ranks_have_less_time_to_save_than_slurm_gives_them() -> None:
    text = (SCRIPTS / "slurm" / "pretrain.sbatch").read_text()
    (given,) = re.findall(r"#SBATCH --signal=SIGTERM@(\d+)\n", text)
    (noted,) = re.findall(r"^NOTICE=(\d+)", text, re.MULTILINE)
    (taken,) = re.findall(r"SHUTDOWN_TIMEOUT:-(\d+)", (SCRIPTS / "pretrain.sh").read_text())
    assert int(taken) < int(given) == int(noted)


def test_shellcheck_passes() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([shellcheck, *SHELL], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_kubernetes_and_skypilot_start_the_nodes_of_a_job(torchrun: Path) -> None:
    job = yaml.safe_load((SCRIPTS / "kubernetes" / "pretrain.yaml").read_text())["spec"]
    replicas = job["pytorchReplicaSpecs"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    node = replicas["Worker"]["template"]["spec"]
    (container,) = node["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["nprocPerNode"])
    (taken,) = re.findall(r"SHUTDOWN_TIMEOUT:-(\d+)", (SCRIPTS / "pretrain.sh").read_text())
    assert int(taken) < node["terminationGracePeriodSeconds"]
    task = yaml.safe_load((SCRIPTS / "skypilot" / "pretrain.yaml").read_text())
    # What the operator and SkyPilot set on the second of four nodes
    operator = {"PET_NNODES": "4", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "8", "MASTER_ADDR": "10.0.0.1"}
    skypilot = {f"SKYPILOT_{name}": value for name, value in (("NUM_NODES", "4"), ("NODE_RANK", "1"))}
    skypilot |= {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4"}
    for command, environment in (
        ([*container["command"], *container["args"]], operator),
        (["bash", "-euc", task["run"].replace("/opt/megatron_balance", str(ROOT))], skypilot | task["envs"]),
    ):
        environment = {**os.environ, **environment, "TORCHRUN": str(torchrun)}
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True)
        launch, flags = split(ran.stdout.decode().split("\0")[:-1])
        assert launch["--nnodes"] == "4"
        assert launch["--node-rank"] == "1"
        assert launch["--nproc-per-node"] == "8"
        assert launch["--master-addr"] == "10.0.0.1"
        assert "@configs/models/mixtral_8x7b.args" in flags
