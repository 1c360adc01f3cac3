"""How collectives share links, against the flow model of SimGrid, where its Python package is installed.

SimGrid shares links fairly in bytes per second, and we share them in relative speed. Both are the same where all flows
are equally fast alone, so each has a link of its own, which is not faster than others. SimGrid has one engine for each
process, so a process of its own executes all cases, each on links of its own.
"""

import importlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from megatron_balance.simulate.engine import Compute, Engine, Start, Wait, Work

CASES = 60
LINKS = 5

PLAIN = (
    *("network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0", "network/weight-S:0"),
    *("network/bandwidth-factor:1", "network/latency-factor:1", "contexts/factory:thread"),
)
"""Settings with which SimGrid has no corrections for TCP."""

RATE = 1e6
"""Bytes per second of a flow alone."""


def drawn_cases() -> list[dict[str, Any]]:
    """Return random cases: relative rates of links; a start in seconds, a length in seconds and links of each flow."""
    generator = random.Random(0)
    cases = []
    for _ in range(CASES):
        links = [generator.choice([1.0, 1.25, 2.0, 3.0]) for _ in range(LINKS)]
        flows = []
        for _ in range(generator.randint(2, 8)):
            used = sorted(generator.sample(range(LINKS), generator.randint(1, LINKS - 1)))
            flows.append((generator.choice([0.0, 0.0, generator.uniform(0, 3)]), generator.uniform(0.5, 4), used))
        cases.append({"links": links, "flows": flows})
    return cases


def ours(case: dict[str, Any]) -> list[float]:
    """Return the end of each flow in our simulation."""
    ends: dict[int, float] = {}

    class Ends:
        def computed(self, *args: Any, **named: Any) -> None:
            pass

        def waited(self, *args: Any, **named: Any) -> None:
            pass

        def communicated(self, teams: Sequence[int], label: str, lane: str, start: float, end: float) -> None:
            ends[int(label)] = end

    def commands(number: int, begin: float, work: Work) -> Iterator:
        yield Compute("before", np.array([begin]))
        yield Start(number, str(number), work)
        yield Wait(number)

    programs = []
    for number, (begin, seconds, used) in enumerate(case["flows"]):
        # The flow's own link is not shared, and works as long as the flow takes alone
        resources = np.array([*used, LINKS + number])
        work = Work(0.0, resources, np.array([*(seconds / case["links"][one] for one in used), seconds]))
        programs.append((1, commands(number, begin, work)))
    Engine(programs, LINKS + len(programs), Ends()).run()
    return [ends[number] for number in range(len(programs))]


def simulated_by_simgrid(cases: list[dict[str, Any]]) -> list[list[float]]:
    """Return the end of each flow of each case; once for each process."""
    simgrid = importlib.import_module("simgrid")
    engine = simgrid.Engine(["oracle", *(f"--cfg={one}" for one in PLAIN), "--log=root.thresh:error"])
    # Version 4 has other names
    new = hasattr(simgrid.NetZone, "add_netzone_full")
    zone = engine.netzone_root.add_netzone_full("all") if new else simgrid.NetZone.create_full_zone("all")
    add_host, add_link = (zone.add_host, zone.add_link) if new else (zone.create_host, zone.create_link)
    ends: list[list[float]] = [[0.0] * len(case["flows"]) for case in cases]

    def send(case: int, number: int, begin: float, seconds: float, source: Any, target: Any) -> None:
        simgrid.this_actor.sleep_for(begin)
        simgrid.Comm.sendto(source, target, int(seconds * RATE))
        ends[case][number] = simgrid.Engine.clock

    actors = []
    for index, case in enumerate(cases):
        links = [add_link(f"link-{index}-{i}", one * RATE).seal() for i, one in enumerate(case["links"])]
        for number, (begin, seconds, used) in enumerate(case["flows"]):
            source, target = (add_host(f"{end}-{index}-{number}", 1e9) for end in ("from", "to"))
            own = add_link(f"own-{index}-{number}", RATE).seal()
            route = [simgrid.LinkInRoute(one) for one in (own, *(links[i] for i in used))]
            if new:
                zone.add_route(source, target, route, False)
            else:
                zone.add_route(source.netpoint, target.netpoint, None, None, route, False)
            actors.append((source, (index, number, begin, seconds, source, target)))
    zone.seal()
    for source, arguments in actors:
        if new:
            source.add_actor("sender", send, *arguments)
        else:
            simgrid.Actor.create("sender", source, send, *arguments)
    engine.run()
    return ends


def test_links_are_shared_as_in_simgrid() -> None:
    pytest.importorskip("simgrid")
    cases = drawn_cases()
    ended = subprocess.run([sys.executable, "-m", __name__], input=json.dumps(cases), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for case, expected in zip(cases, json.loads(ended.stdout), strict=True):
        assert ours(case) == pytest.approx(expected, abs=1e-5)
    # Most flows wait for others, or little would be compared
    alone = [begin + seconds for case in cases for begin, seconds, _ in case["flows"]]
    assert np.mean(np.concatenate([ours(case) for case in cases]) > np.array(alone) + 1e-3) > 0.5


if __name__ == "__main__":
    print(json.dumps(simulated_by_simgrid(json.load(sys.stdin))))
