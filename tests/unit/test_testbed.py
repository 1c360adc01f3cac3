"""tools/bench: the slow network as data, the limits of its links, and mistakes found before anything is built."""

import os
import re
import subprocess

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import alltoall
import namespaces
import testbed
import traffic


def seconds(megabytes: float) -> float:
    """Return the seconds at 1 Mbit/s, with headers, without the burst that passes without delay."""
    return 8 * (megabytes / 0.9938 - 0.131072)


layouts = st.tuples(st.integers(1, 4), st.integers(1, 4))


def test_every_node_is_limited_either_way() -> None:
    lines = [" ".join(command) for command in namespaces.setup_commands("x-", 3, 400, None)]
    limits = [re.search(r"tc -n (\S+) .* dev (\S+) root tbf rate (\d+)bit", line) for line in lines]
    found = {match.groups() for match in limits if match}
    ways = {(f"x-{node}", "eth0") for node in range(3)} | {("x-sw", f"p{node}") for node in range(3)}
    assert found == {(*way, "400000000") for way in ways}
    with_bus = [" ".join(command) for command in namespaces.setup_commands("x-", 3, 400, 1600)]
    added = [line for line in with_bus if line not in lines]
    assert len(added) == 3 and all("dev lo root tbf rate 1600000000bit" in line for line in added)


def test_only_testbeds_of_ended_processes_are_abandoned() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f"testbed-{ended.pid}-ab-0", f"testbed-{ended.pid}-ab-sw", f"testbed-{os.getpid()}-ab-0", "testbed", "sw"]
    assert namespaces.abandoned([*names, f"my-testbed-{ended.pid}-x"]) == names[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 400), "--nodes 0"),
        ((2, -1, 400), "--ranks-per-node -1"),
        ((2, 2, 0.0), "--link-mbit 0.0"),
        ((2, 2, 400, -5), "--bus-mbit -5"),
    ],
)
def test_mistakes_name_their_flag(arguments: tuple, message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        testbed.Testbed(*arguments)
    flags = ("--nodes", "--ranks-per-node", "--link-mbit", "--bus-mbit")
    words = [f"{flag}={value}" for flag, value in zip(flags, arguments, strict=False)]
    with pytest.raises(SystemExit, match=r"^2$"):
        testbed.main([*words, "--", "script.py"])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("obstacle", ["user", "tools"])
def test_a_machine_that_cannot_is_told_so_in_one_line(obstacle: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000 if obstacle == "user" else 0)
    if obstacle == "tools":
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(testbed.TestbedUnavailable, match="need root" if obstacle == "user" else "ip and tc"):
        testbed.Testbed(2, 1, 400).__enter__()
    assert testbed.main(["--nodes", "2", "--ranks-per-node", "1", "--link-mbit", "400", "--", "script.py"]) == 2
    assert alltoall.main(["--layouts", "2x1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and all("no testbed here" in line for line in errors)


def test_a_failed_command_says_which_and_why() -> None:
    with pytest.raises(testbed.TestbedUnavailable, match=r"ls --nonsense: .*nonsense"):
        namespaces.build([["true"], ["ls", "--nonsense"]])


@given(layouts, st.sampled_from(traffic.SPLITS), st.integers(0, 5000), st.integers(0, 9))
def test_every_split_sends_all_rows(layout: tuple[int, int], kind: str, rows: int, seed: int) -> None:
    nodes, node_size = layout
    rows_DD = traffic.split_rows(kind, nodes * node_size, node_size, rows, seed)
    assert (rows_DD >= 0).all() and (rows_DD.sum(1) == rows).all()
    if kind == "even":
        assert rows_DD.max() - rows_DD.min() <= 1
    if kind == "one-hot-node":
        assert not rows_DD[:, node_size:].any()


def test_the_busiest_link_sets_the_limit() -> None:
    bytes_DD = np.zeros((4, 4))
    bytes_DD[0, 1] = 3e6
    bytes_DD[0, 0] = 1e9
    bytes_DD[0, 2] = 5e6
    bytes_DD[1, 3] = 7e6
    bytes_DD[3, 1] = 1e6
    found = traffic.limit(bytes_DD, 2, 1, 0.5)
    assert found.inter == pytest.approx(seconds(12))
    assert found.intra == pytest.approx(2 * seconds(3))
    assert found.seconds == found.inter
    assert found.largest_speedup == pytest.approx((seconds(12) + 2 * seconds(3)) / seconds(12))
    free = traffic.limit(bytes_DD, 2, 1, None)
    assert free.intra == 0 and free.largest_speedup == 1
    # Three ranks send to the last one: a node's incoming traffic is limited like its outgoing traffic
    bytes_DD = np.zeros((4, 4))
    bytes_DD[:3, 3] = 1e6
    assert traffic.limit(bytes_DD, 1, 1, None).seconds == pytest.approx(seconds(3))
    # The burst that passes without delay takes no time
    assert traffic.limit(bytes_DD / 100, 1, 1, None).seconds == 0


def test_a_row_is_over_all_ranks_and_rejected_when_the_cpu_was_busy() -> None:
    def samples(delay: float, process: float, programs: float) -> list:
        starts = (10.0, 20.0)
        return [alltoall.Sample(at + delay, at + 1 + 2 * delay, process, programs, kernel=0.05) for at in starts]

    row = alltoall.Row.of([samples(0, 0.1, 0.25), samples(0.5, 0.1, 0)])
    assert row.seconds == pytest.approx([2, 2])
    assert row.own_cores == pytest.approx(0.2 / 2) and row.kernel_cores == pytest.approx(0.05 / 2)
    assert row.foreign_cores == pytest.approx(0.05 / 2)
    assert not row.objection
    assert "our own" in alltoall.Row.of([samples(0, 0.6, 0.6)]).objection
    assert "others" in alltoall.Row.of([samples(0, 0.1, 0.8)]).objection


def test_the_table_gives_ratios_and_what_eq_18_allows() -> None:
    rows = {name: alltoall.Row([seconds], 0.1, 0.2, 0.0) for name, seconds in (("flat", 0.4), ("p2p", 0.2))}
    rows["sequential"] = alltoall.Row([0.3], 0.9, 0.2, 0.0)
    lines = alltoall.table(rows, traffic.Limit(inter=0.2, intra=0.1)).splitlines()
    assert lines[1].split() == ["flat", "400.0", "(400-400)", "1.000", "2.000", "2.000", "0.10", "0.20", "0.00"]
    assert lines[3].split()[3:6] == ["0.750", "1.500", "1.500"] and "REJECTED" in lines[3]
    assert lines[4] == "sequential / p2p: 1.50; S_max (Eq. 18) 1.50"
