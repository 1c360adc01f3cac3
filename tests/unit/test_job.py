"""The launcher's environment: names of jobs, impossible numbers, addresses that do not answer."""

import dataclasses
import os
import socket
import time

import pytest
import torch

from megatron_balance.job import agreement, clocks, job, launcher
from megatron_balance.job.job import Launch

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}
TWO_NODES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """`environment(NAME=value)` returns the launch with these variables and no other launcher variables."""

    def of(**variables: str) -> Launch:
        for name in [*os.environ]:
            if name.startswith(("TORCHELASTIC_", "SLURM_")) or "RANK" in name or "WORLD_SIZE" in name:
                monkeypatch.delenv(name)
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return Launch.from_environment()

    return of


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"RANK": "8", "WORLD_SIZE": "4"}, "RANK=8: has to be at least 0 and below WORLD_SIZE, which is 4; start the"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK=-1: has to be at least 0 and below WORLD_SIZE, which is 4; "),
        ({"RANK": "one\n\x1b[31m", "WORLD_SIZE": "4"}, "RANK=one: is not a whole number; start the processes with"),
        ({"RANK": "3"}, "RANK=3: has to be at least 0 and below WORLD_SIZE, which is 1; "),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: has to be at least 1; "),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=: is not a whole number; "),
        ({"LOCAL_RANK": "2", **TWO_NODES}, "LOCAL_RANK=2: has to be at least 0 and below LOCAL_WORLD_SIZE, which is 2"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "65536"}, "MASTER_PORT=65536: has to be at least 1 and below 65536; "),
    ],
)
def test_numbers_that_cannot_be(environment, variables: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError) as error:
        environment(**variables)
    assert str(error.value).startswith(told)


def test_a_job_of_one_step_of_slurm_has_its_name(environment) -> None:
    def name(**more: str) -> str:
        return environment(**TWO_NODES, **{"TORCHELASTIC_RUN_ID": "none", **SLURM, **more}).name

    assert name() == name(SLURM_NODEID="1", SLURM_PROCID="3")
    others = [
        *(name(SLURM_JOB_ID="8"), name(SLURM_STEP_ID="1"), name(SLURM_RESTART_COUNT="1")),
        *(name(TORCHELASTIC_RUN_ID="another"), name(TORCHELASTIC_RESTART_COUNT="1")),
    ]
    assert len({name(), *others}) == 6
    # Steps that started one node each have different numbers
    one_each = {"SLURM_STEP_NUM_NODES": "1"}
    assert name(**one_each, SLURM_STEP_ID="0") == name(**one_each, SLURM_STEP_ID="1")


def test_a_job_on_one_node_has_the_name_of_its_agent(environment, monkeypatch: pytest.MonkeyPatch) -> None:
    def name(process: int, started: str) -> str:
        monkeypatch.setattr(launcher, "find", lambda: launcher.Launcher(process, started, 1))
        return environment(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2").name

    assert name(7, "1") == name(7, "1")
    assert len({name(7, "1"), name(7, "2"), name(8, "1")}) == 3
    # Other nodes have other agents
    assert environment(**TWO_NODES).name == "job  0"


def launch(port: int, rank: int = 1, address: str = "127.0.0.1") -> Launch:
    return Launch(rank=rank, world_size=2, local_rank=rank, local_world_size=2, address=address, port=port)


def test_an_address_that_nobody_has() -> None:
    with pytest.raises(
        ValueError, match=r"^MASTER_ADDR=no\.invalid: .*; give the name or the address of rank 0's mach"
    ):
        job._meet(launch(1, address="no.invalid"), 0.01)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"^MASTER_PORT={port}: another program listens on this port here; choose"):
            job._meet(launch(port, rank=0), 2)


@pytest.mark.parametrize("listens", [False, True])
def test_a_store_that_is_not_there(listens: bool, monkeypatch, capfd) -> None:
    monkeypatch.setattr(job, "SPARE_SECONDS", 0.1)
    monkeypatch.setattr(agreement, "NOTICE_SECONDS", 0.2)
    start = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        with pytest.raises(ValueError) as error:
            job._meet(dataclasses.replace(launch(port), local_rank=0), 0.01)
    assert time.monotonic() - start < 60
    # torch logs a lot about a closed connection
    time.sleep(0.2)
    assert str(error.value).startswith(
        f"127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT): no key-value store of rank 0 there within 0.01 minutes "
        f"(--distributed-timeout-minutes): {'something' if listens else 'nothing'} listens there"
    )
    told = (
        f"waiting for rank 0 at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT): Connection refused; this is each machine"
    )
    assert (told in capfd.readouterr().err.replace("[Errno 111] ", "")) != listens


@pytest.mark.parametrize(("address", "own"), [("localhost", True), ("::1", True), ("203.0.113.7", False)])
def test_an_address_of_each_machine_itself_is_named(address: str, own: bool) -> None:
    assert ("each machine's own address" in job._obstacle(address, OSError("refused"))) == own


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"^LOCAL_RANK=5: this process sees 4 GPUs; .*--nproc-per-node 4"):
        job._pick_device(5)


def test_clocks_that_differ_are_named() -> None:
    ahead, notice = clocks.difference([("node0", 100.0), ("node0", 100.02), ("node1", 137.1), ("node2", 99.9)])
    assert ahead == [0.0, 0.0, pytest.approx(37.1), 0.0]
    assert notice is not None and notice.startswith("clocks differ from that of node0: +37 s on node1; ")
    assert clocks.difference([("node0", 100.0), ("node1", 100.9)]) == ([0.0, 0.0], None)
