"""Nodes as network namespaces: building their network, entering it, and removing it."""

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil

from traffic import BURST

NAMESPACES = Path("/run/netns")

MTU, SEGMENT_BYTES = 9000, BURST // 2
"""The segments of a packet must together stay below the burst; otherwise tbf splits them again, which costs CPU time.
Short segments also cost more CPU time."""

QUEUE_BYTES = 16 << 20

TCP = (
    "net.ipv4.tcp_congestion_control=reno",
    "net.ipv4.tcp_slow_start_after_idle=0",
    # A message counts as sent when little of it remains. By default, sockets and queues buffer megabytes, and the
    # kernel then shares the links in its own way, regardless of the order in which a rank sends
    "net.ipv4.tcp_notsent_lowat=131072",
    "net.ipv4.tcp_rmem='4096 131072 524288'",
)


class TestbedUnavailable(RuntimeError):
    """This machine does not support a testbed; the message says what is missing."""

    __test__ = False


def address(node: int) -> str:
    """Return the IP address of a node."""
    return f"10.77.0.{node + 1}"


def setup_commands(prefix: str, nodes: int, link_mbit: float, bus_mbit: float | None) -> list[list[str]]:
    """Return the commands that build namespaces PREFIX0, PREFIX1, ..., and PREFIXsw with the bridge between them."""
    switch = f"{prefix}sw"
    lines = [
        f"ip netns add {switch}",
        f"ip -n {switch} link add br0 type bridge stp_state 0 forward_delay 0",
        f"ip -n {switch} link set br0 mtu {MTU} up",
    ]
    for index in range(nodes):
        node = f"{prefix}{index}"
        port = f"p{index}"
        wire = f"mtu {MTU} gso_max_size {SEGMENT_BYTES}"
        lines += [
            f"ip netns add {node}",
            f"ip link add eth0 netns {node} type veth peer name {port} netns {switch}",
            f"ip -n {node} link set eth0 {wire}",
            f"ip -n {switch} link set {port} {wire} master br0 up",
            f"ip -n {node} link set lo up",
            f"ip -n {node} addr add {address(index)}/24 dev eth0",
            f"ip -n {node} link set eth0 up",
            f"ip netns exec {node} sysctl -qw {' '.join(TCP)}",
            # A queue limits only outgoing traffic, so both ends have one: for traffic from the node and to the node
            _limit(node, "eth0", link_mbit),
            _limit(switch, port, link_mbit),
        ]
        if bus_mbit is not None:
            lines.append(_limit(node, "lo", bus_mbit))
    return [shlex.split(line) for line in lines]


def _limit(namespace: str, device: str, mbit: float) -> str:
    rate = f"{round(mbit * 1e6)}bit"
    return f"tc -n {namespace} qdisc replace dev {device} root tbf rate {rate} burst {BURST} limit {QUEUE_BYTES}"


def build(commands: Iterable[list[str]]) -> None:
    """Run `setup_commands`; raise TestbedUnavailable with the message of the first failure."""
    for command in commands:
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            complaint = " ".join(result.stderr.split()) or "failed"
            raise TestbedUnavailable(f"no testbed here: {' '.join(command)}: {complaint}")


def require_tools() -> None:
    """Raise TestbedUnavailable without root privileges or the tools; only building a testbed shows if tbf is there."""
    if os.geteuid() != 0:
        raise TestbedUnavailable("no testbed here: network namespaces need root")
    missing = [tool for tool in ("ip", "tc", "sysctl") if shutil.which(tool) is None]
    if missing:
        raise TestbedUnavailable(f"no testbed here: {' and '.join(missing)} not found (Debian: iproute2, procps)")


def existing_namespaces() -> list[str]:
    """Return the names of all network namespaces, including those of others."""
    return sorted(os.listdir(NAMESPACES)) if NAMESPACES.exists() else []


def abandoned(names: Iterable[str]) -> list[str]:
    """Return the namespaces of testbeds whose process has ended; a zombie has."""
    owned = [(name, re.match(r"testbed-(\d+)-", name)) for name in names]
    return [name for name, match in owned if match and not _is_running(int(match[1]))]


def _is_running(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def remove(names: Iterable[str]) -> None:
    """End every process in these namespaces and remove them; another process may do the same at the same time."""
    for name in names:
        end_processes(name)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def end_processes(name: str) -> None:
    """Kill all processes in a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    for number in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)


def enter(namespace: str) -> None:
    """Move this thread, and all threads and processes that it will start, into a network namespace."""
    new_network = 0x40000000
    descriptor = os.open(NAMESPACES / namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, new_network):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    os.close(descriptor)
