"""Join processes into a job: read the launcher's variables, connect to the store, initialize torch.distributed."""

import contextlib
import datetime
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_balance.job import agreement, launcher, limits
from megatron_balance.job.endings import Ending
from megatron_balance.job.groups import Topology, backend_minutes
from megatron_balance.messages import cleaned, described

AGREEMENT = "agreement"
"""Prefix of the keys through which ranks compare their settings."""

SPARE_SECONDS = 2.0
"""Extra time for a connection after its own timeout, because its own error may be more informative."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The launcher's settings for this process, from environment variables of torchrun or srun."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    store_rank: int | None = 0
    """The rank whose process holds the key-value store; None if the launcher holds it."""
    address: str | None = None
    """Host of the key-value store; None if the launcher sets none."""
    port: int = 0
    """Port of the key-value store."""
    name: str = "job"
    """Name of this start of the job: equal on all its ranks, and unique among jobs that may find its store."""
    job: str | None = None
    """The launcher's name of the job, which survives restarts; None if there is none."""
    restarts: int = 0
    """Number of restarts of the job by torchrun and SLURM."""

    @classmethod
    def from_environment(cls) -> "Launch":
        """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and torchrun's variables; default: a single process.

        Raises:
            ValueError: a variable has a value that no launcher sets.
        """
        world_size = _number("WORLD_SIZE", 1, 1)
        local_world_size = _number("LOCAL_WORLD_SIZE", world_size, 1)
        has_address = {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        # torchrun calls a job without a name "none"
        torchrun = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        return cls(
            rank=_number("RANK", 0, 0, end=world_size, end_name="WORLD_SIZE"),
            world_size=world_size,
            local_rank=_number("LOCAL_RANK", 0, 0, end=local_world_size, end_name="LOCAL_WORLD_SIZE"),
            local_world_size=local_world_size,
            store_rank=None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
            address=os.environ["MASTER_ADDR"] if has_address else None,
            port=_number("MASTER_PORT", 0, 1, end=2**16, end_name="65536") if has_address else 0,
            name=_name(world_size, local_world_size),
            job=os.environ.get("SLURM_JOB_ID", None if torchrun == "none" else torchrun),
            restarts=_number("TORCHELASTIC_RESTART_COUNT", 0, 0) + _number("SLURM_RESTART_COUNT", 0, 0),
        )


def _number(name: str, default: int, least: int, *, end: int | None = None, end_name: str = "") -> int:
    """Return an environment variable's integer, which must be at least `least` and below `end` (if given)."""
    text = os.environ.get(name)
    if text is None:
        return default
    remedy = "start the processes with torchrun, or set it as torchrun does"
    try:
        number = int(text)
    except ValueError as error:
        raise ValueError(f"{name}={cleaned(text, 80)}: is not a whole number; {remedy}") from error
    if number < least or (end is not None and number >= end):
        below = "" if end is None else f" and below {end_name}{'' if end_name == str(end) else f', which is {end}'}"
        raise ValueError(f"{name}={number}: has to be at least {least}{below}; {remedy}")
    return number


def _name(world_size: int, local_world_size: int) -> str:
    """Derive a name for this start of the job from values that are equal on all nodes.

    Ranks of a killed job may survive for a while and find the next job's store at the same address.
    """
    known = os.environ
    parts = []
    agent = launcher.find() if world_size == local_world_size else None
    nodes = known.get("SLURM_STEP_NUM_NODES", "")
    if agent is not None:
        with contextlib.suppress(OSError):
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [str(agent.process), agent.started]
    elif nodes.isdecimal() and int(nodes) * local_world_size == world_size:
        # Only if one step started all ranks; otherwise the step's number would differ between ranks
        parts += [known.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
    # The launcher's store outlives an attempt: without the restart count, ranks would find addresses of the last one
    return " ".join(["job", *parts, known.get("TORCHELASTIC_RUN_ID", ""), known.get("TORCHELASTIC_RESTART_COUNT", "0")])


def node_topology(launch: Launch, node_size: int | None) -> Topology:
    """Return the topology of nodes of `--moe-comm-node-size` ranks; default: LOCAL_WORLD_SIZE."""
    size = node_size if node_size is not None else launch.local_world_size
    if not 1 <= size <= launch.world_size:
        raise ValueError(f"--moe-comm-node-size {size}: choose 1 to {launch.world_size} (the number of processes)")
    return Topology(launch.world_size, size)


@contextlib.contextmanager
def declining_on_error(launch: Launch) -> Iterator[None]:
    """If the block fails, also end the ranks that wait in `start` for this rank, with the reason."""
    try:
        yield
    except Ending as ending:
        if ending.code:
            _decline(launch, ending.reason)
        raise
    except Exception as error:
        _decline(launch, str(error) if isinstance(error, ValueError) else described(error))
        raise


def _decline(launch: Launch, reason: str) -> None:
    if launch.world_size == 1:
        return
    # If the store cannot be reached either, report only the first problem
    with contextlib.suppress(ValueError, dist.DistError):
        store = dist.PrefixStore(launch.name, _meet(launch, agreement.DECLINE_SECONDS / 60))
        agreement.decline(dist.PrefixStore(AGREEMENT, store), _member(launch), reason)


def _member(launch: Launch) -> agreement.Member:
    return agreement.Member(launch.rank, launch.world_size, launch.rank == launch.store_rank)


def start(launch: Launch, backend: str, timeout_minutes: float, facts: agreement.Facts | None = None) -> dist.Store:
    """Join the job: select this process's device, compare `facts` with all ranks, and initialize torch.distributed.

    Returns:
        The job's key-value store.

    Raises:
        ValueError: the processes cannot connect, some are missing, two have the same rank, or their facts differ.
    """
    with declining_on_error(launch):
        limits.open_files(backend, launch.world_size, launch.rank == launch.store_rank)
        if torch.cuda.is_available():
            _pick_device(launch.local_rank)
    if dist.is_initialized():
        assert dist.group.WORLD is not None
        return dist.group.WORLD.get_group_store()
    timeout = datetime.timedelta(minutes=backend_minutes(timeout_minutes))
    store = dist.PrefixStore(launch.name, _meet(launch, timeout_minutes))
    if launch.world_size > 1:
        meeting = dist.PrefixStore(AGREEMENT, store)
        where = f"{launch.address}:{launch.port}"
        agreement.agree(meeting, _member(launch), facts or {}, timeout_minutes=timeout_minutes, where=where)
    store.set_timeout(timeout)
    dist.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.world_size, timeout=timeout)
    return store


def _pick_device(local_rank: int) -> None:
    devices = torch.cuda.device_count()
    if local_rank >= devices:
        raise ValueError(
            f"LOCAL_RANK={local_rank}: this process sees {devices} GPUs; start at most one process for each "
            f"(--nproc-per-node {devices}), or check CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.set_device(local_rank)


def _meet(launch: Launch, timeout_minutes: float) -> dist.Store:
    """Connect to the key-value store at the launcher's address; a single process may create its own."""
    if launch.address is None and launch.world_size == 1:
        return dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    if launch.address is None:
        problem = f"WORLD_SIZE {launch.world_size}: MASTER_ADDR and MASTER_PORT are not set"
        raise ValueError(f"{problem}; start the processes with torchrun")
    try:
        socket.getaddrinfo(launch.address, launch.port)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"MASTER_ADDR={cleaned(launch.address, 80)}: {cleaned(error)}; give the name or the address of rank 0's "
            "machine"
        ) from error
    return _connect(launch, launch.address, timeout_minutes)


def _wait_for_listener(launch: Launch, address: str, deadline: float) -> bool:
    """Return whether a process listens there before the deadline. (If torch waited, it would log stack traces.)

    The first process of a node says after NOTICE_SECONDS what it waits for.
    """
    notice: float | None = time.monotonic() + agreement.NOTICE_SECONDS if launch.local_rank == 0 else None
    while True:
        left = deadline - time.monotonic()
        try:
            # Where packets are lost, an attempt would wait for its own limit before the notice
            patience = min(max(1.0, left), agreement.NOTICE_SECONDS)
            socket.create_connection((address, launch.port), timeout=patience).close()
            return True
        except OSError as error:
            if left <= 0:
                return False
            if notice is not None and time.monotonic() >= notice:
                notice = None
                waits = f"waiting for {_holder(launch)} at {address}:{launch.port} (MASTER_ADDR, MASTER_PORT)"
                print(f"{waits}: {_obstacle(address, error)}", file=sys.stderr, flush=True)
            time.sleep(0.1)


def _obstacle(address: str, error: OSError) -> str:
    """Say what kept a process from connecting, and what the user can check."""
    found = {ipaddress.ip_address(str(place[0]).partition("%")[0]) for *_, place in socket.getaddrinfo(address, None)}
    if all(one.is_loopback for one in found):
        remedy = "this is each machine's own address; give all nodes the same address of the first node"
    else:
        remedy = "check that the first node has this address, that it has started, and that no firewall is between"
    return f"{cleaned(error)}; {remedy}"


def _holder(launch: Launch) -> str:
    return "the launcher" if launch.store_rank is None else f"rank {launch.store_rank}"


def _connect(launch: Launch, address: str, timeout_minutes: float) -> dist.Store:
    """Connect to the store in a thread, because another program at that address may accept and never answer."""
    found: list[dist.Store] = []
    holds = launch.rank == launch.store_rank
    deadline = time.monotonic() + timeout_minutes * 60
    listening = holds or _wait_for_listener(launch, address, deadline)
    seconds = max(1.0, deadline - time.monotonic())
    reason = "something listens there and does not answer" if listening else "nothing listens there"

    def connect() -> None:
        nonlocal reason
        try:
            patience = datetime.timedelta(seconds=seconds)
            # `agree` waits for the ranks and names the missing ones; the constructor would only count them
            settings = {"wait_for_workers": False, "multi_tenant": True, "timeout": patience}
            found.append(dist.TCPStore(address, launch.port, launch.world_size, holds, **settings))
        except RuntimeError as error:
            reason = str(error)

    if listening:
        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(seconds + SPARE_SECONDS)
    if found:
        return found[0]
    where = f"{address}:{launch.port} (MASTER_ADDR, MASTER_PORT)"
    if holds and "EADDRINUSE" in reason:
        raise ValueError(f"MASTER_PORT={launch.port}: another program listens on this port here; choose another port")
    holder = _holder(launch)
    raise ValueError(
        f"{where}: no key-value store of {holder} there within {timeout_minutes:g} minutes "
        f"(--distributed-timeout-minutes): {cleaned(reason)}; check that {holder} has started, and look at its output"
    )
