"""Whatever an external policy does, the rank continues and logs it in one short line."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.manager import Decision, Manager
from megatron_balance.planning.policies import load_policy
from megatron_balance.planning.policy_process import PolicyProcess, start_policy
from megatron_balance.planning.predictor import Predictor
from megatron_balance.profile.cluster_profile import builtin
from tests.unit import misbehaving
from tests.variants import variants

OWNERS = Placement.identity(8, 4, 3)
COST = CostModel(builtin(4, 4, 64, 64), token_bytes=1, param_bytes=1, grad_bytes=1)
LOAD = np.arange(32).reshape(4, 8)
SOON = 60.0
"""Seconds within which a process starts or ends, even on a busy machine."""


def policy(name: str) -> PolicyProcess:
    made = PolicyProcess(f"{misbehaving.__name__}:{name}", {})
    made.ready(SOON)
    return made


def decide(one: PolicyProcess, load_DE: np.ndarray = LOAD) -> Decision:
    return Manager(one, COST, Predictor("last"), OWNERS).question(load_DE, 1).answer()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that no process outlives its policy, once the policy has no references."""
    before = set(psutil.Process().children(recursive=True))
    yield
    left = set(psutil.Process().children(recursive=True)) - before
    assert psutil.wait_procs(left, timeout=SOON)[1] == []


def test_it_plans_as_it_would_on_the_rank() -> None:
    top2 = load_policy("top2")
    one = policy("Good")
    assert one.split == "proportional"
    for load_DE in (LOAD, LOAD[::-1].copy()):
        planned = one.plan(load_DE, OWNERS, COST)
        assert planned == top2.plan(load_DE, OWNERS, COST) != OWNERS and type(planned) is Placement
    assert decide(one).placement == top2.plan(LOAD, OWNERS, COST)


def test_it_shares_nothing_with_the_rank() -> None:
    lock = threading.Lock()
    waiting = threading.Thread(target=lock.acquire, daemon=True)
    with lock:
        waiting.start()
        problem = decide(policy("IsHere")).problem
    assert problem is not None and problem.startswith("raised ValueError: ")
    process, modules, threads, files = problem.removeprefix("raised ValueError: ").rsplit(" ", 3)
    assert int(process) != os.getpid()
    # The listed directory itself is open as well
    assert (modules, threads, files) == ("[]", "1", "5")


def check(decision: Decision, problem: str, is_final: bool) -> None:
    assert decision.placement is None and decision.final == is_final
    assert decision.problem is not None and decision.problem.startswith(problem)
    assert decision.problem.isprintable() and len(decision.problem) < 250


def test_a_policy_that_made_a_mistake_is_asked_again() -> None:
    one = policy("Errs")
    for number, problem in enumerate(misbehaving.MISTAKES, start=1):
        load_DE = LOAD.copy()
        load_DE[:, 0] = [number, 0, 0, 0]
        check(decide(one, load_DE), problem, is_final=False)
    load_DE[:, 0] = 0
    assert decide(one, load_DE).placement == load_policy("top2").plan(load_DE, OWNERS, COST)


@pytest.mark.parametrize(
    ("name", "problem"), [("Exits", "exit status 0"), ("Crashes", "Segmentation fault (signal 11)")]
)
def test_a_policy_whose_process_ended_is_not(name: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_balance.planning.policy_process._LAST_SECONDS", SOON)
    check(decide(policy(name)), f"ended its process: {problem}", is_final=True)


MAKING = {
    f"{misbehaving.__name__}:ConstructorLeaves": "cannot be made: SystemExit: 0",
    f"{misbehaving.__name__}:ConstructorExits": "ended its process: exit status 0",
    f"{misbehaving.__name__}:ConstructorFails": "cannot be made: Colored: red and ?longggg",
    f"{misbehaving.__name__}:NeedsArguments": "cannot be made with options []: ",
    f"{misbehaving.__name__}:SplitIsATuple": "SplitIsATuple.split is ('local_first',): choose from local_first",
    f"{misbehaving.__name__}:SplitIsCalled": "SplitIsCalled.split is <bound method",
    f"{misbehaving.__name__}:SplitRaises": "raised SystemExit: 0",
    f"{misbehaving.__name__}:SplitIsUnknown": "SplitIsUnknown.split is best: choose from local_first, proportional",
    f"{misbehaving.__name__}:NoPlan": "has no method plan(counts, current, cost)",
    f"{misbehaving.__name__}:PlanRaises": "cannot be made: SystemExit: 0",
    f"{misbehaving.__name__}:Missing": "cannot be imported: AttributeError: module",
    "leaves_at_import:Policy": "cannot be imported: SystemExit: 0; choose from demi, demi_s1",
    "exits_at_import:Policy": "ended its process: exit status 0",
    "nowhere.at_all:Policy": "cannot be imported: ModuleNotFoundError: No module named 'nowhere'; choose from",
    ".relative:Policy": "cannot be imported: TypeError: ",
    ":Policy": "cannot be imported: ValueError: Empty module name",
    "math:pi": "cannot be made with options []: 'float' object is not callable",
    "collections:Counter": "has no method plan",
}
"""Policies that cannot be constructed, and the beginning of the message."""

ALIKE = ("ConstructorLeaves", "SplitIsCalled", "SplitIsUnknown", "PlanRaises")
LIKE_OTHERS = {
    *(f"{misbehaving.__name__}:{name}" for name in ALIKE),
    *(".relative:Policy", ":Policy", "math:pi", "collections:Counter"),
}
"""Those that end at the same place as others."""


@pytest.mark.parametrize("name", variants([*MAKING], {*MAKING} - LIKE_OTHERS))
def test_a_policy_that_cannot_be_made_is_a_users_mistake(name: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "leaves_at_import.py").write_text("import sys; sys.exit(0)")
    (tmp_path / "exits_at_import.py").write_text("import os; os._exit(0)")
    # Imported as the rank would import it
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError) as raised:
        start_policy(name).ready(SOON)
    text = str(raised.value)
    assert text.startswith(f"--balance-policy {name}: {MAKING[name]}") and text.isprintable()
    assert name.partition(":")[0] not in sys.modules or "at_import" not in name


def test_a_policy_that_is_not_made_in_time() -> None:
    name = f"{misbehaving.__name__}:ConstructorLoops"
    with pytest.raises(ValueError, match=f"^--balance-policy {name}: was not imported and made within 1 s"):
        PolicyProcess(name, {}).ready(1.0)


@pytest.mark.parametrize("name", ["Loops", "HoldsTheLock", "Stops"])
def test_a_policy_that_never_answers_can_be_stopped(name: str) -> None:
    one = policy(name)
    decisions = []
    thread = threading.Thread(target=lambda: decisions.append(decide(one)))
    thread.start()
    time.sleep(0.2)
    one.stop()
    thread.join(SOON)
    assert [decision.problem for decision in decisions] == ["ended its process: Killed (signal 9)"]
    assert decide(one).placement is None, "it is not started again"


def test_what_it_prints_goes_where_the_rank_prints(tmp_path: Path) -> None:
    code = "from tests.unit import test_policy_process as t; print(t.decide(t.policy('Prints')).placement)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    planned = load_policy("top2").plan(LOAD, OWNERS, COST)
    assert done.stdout == f"a policy prints\npast the interpreter, too\n{planned}\n", done.stderr


def test_policies_end_with_a_rank_that_is_killed() -> None:
    """One waits for a question, one computes, and one holds the interpreter's lock."""
    code = (
        "import sys, threading; from tests.unit import test_policy_process as t;"
        "every = [t.policy(name) for name in ('Good', 'Loops', 'HoldsTheLock')];"
        "[threading.Thread(target=t.decide, args=[one]).start() for one in every];"
        "print(*(one._process.pid for one in every), flush=True); sys.stdin.read()"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert rank.stdout is not None
    planners = [psutil.Process(int(number)) for number in rank.stdout.readline().split()]
    assert len(planners) == 3
    time.sleep(0.2)
    rank.kill()
    rank.wait()
    deadline = time.monotonic() + SOON
    while any(map(runs, planners)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, planners))
    rank.stdout.close()


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
