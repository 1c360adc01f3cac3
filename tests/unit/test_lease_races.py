"""Concurrent attempts to take the lease of a directory: at most one succeeds."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.checkpoint.lease import STALE_SECONDS, Lease, LeaseLost
from tests.unit.leases import Clock, elsewhere, held, wanted


class Turns:
    """Runs functions in threads; only one thread runs at a time, from one file operation to the next."""

    def __init__(self, functions: list[Callable[[], object]]) -> None:
        self.results: list[object] = [None] * len(functions)
        self._go = [threading.Semaphore(0) for _ in functions]
        self._paused = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=item) for item in enumerate(functions)]
        self._number = threading.local()

    def pause(self) -> None:
        """Wait for the next turn; called before every file operation."""
        number = getattr(self._number, "value", None)
        if number is not None:
            self._paused.release()
            self._go[number].acquire()

    def _run(self, number: int, function: Callable[[], object]) -> None:
        self._number.value = number
        self._go[number].acquire()
        try:
            self.results[number] = function()
        except (ValueError, LeaseLost) as error:
            self.results[number] = error
        self._paused.release()

    def play(self, order: list[int]) -> list[object]:
        """Let threads run in this order, and then each to its end."""
        for thread in self._threads:
            thread.start()
        for number in [*order, *sorted(range(len(self._threads))) * 200]:
            if self._threads[number].is_alive() and self.results[number] is None:
                self._go[number].release()
                self._paused.acquire()
        for thread in self._threads:
            thread.join()
        return self.results


OPERATIONS = ("_generations", "_read", "_create", "_remove", "_write")


@settings(max_examples=300)
@given(order=st.lists(st.integers(0, 3), max_size=60), wakes=st.booleans(), freed=st.booleans())
def test_of_all_that_take_a_stale_lease_one_wins(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], wakes: bool, freed: bool
) -> None:
    """Three takers compete with the old holder, which may release the lease or save once more at any moment."""
    root = tmp_path_factory.mktemp("takers")
    old = held(root, "old")
    clocks = [Clock() for _ in range(3)]
    takers = [wanted(root, elsewhere(f"taker{number}"), clock) for number, clock in enumerate(clocks)]
    for taker, clock in zip(takers, clocks, strict=True):
        assert not taker.attempt()
        clock.now = STALE_SECONDS

    def old_holder() -> str:
        if wakes:
            old.check()
        if freed:
            old.release()
        return "went on"

    def save(taker: Lease) -> bool:
        if taker.attempt():
            taker.check()
            return True
        return False

    turns = Turns([*(lambda taker=taker: save(taker) for taker in takers), old_holder])
    originals = {name: getattr(Lease, name) for name in OPERATIONS}

    def pausing(name: str) -> Callable:
        def operation(self: Lease, *args: object, **kwargs: object) -> object:
            turns.pause()
            return originals[name](self, *args, **kwargs)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(Lease, name, pausing(name))
        results = turns.play(order)
    winners = [taker for taker, result in zip(takers, results, strict=False) if result is True]
    assert len(winners) <= 1, results
    if winners:
        winners[0].check()
    elif wakes and not freed:
        assert results[3] == "went on"
        old.check()
    for other in [taker for taker in takers if taker not in winners and taker.generation is not None]:
        with pytest.raises(LeaseLost):
            other.check()
    if winners and not freed:
        with pytest.raises(LeaseLost):
            old.check()


def test_two_processes_race_for_a_directory(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from megatron_balance.checkpoint.lease import Lease\n"
        "from megatron_balance.checkpoint.lease import Owner\n"
        "root = pathlib.Path(sys.argv[1]); sys.stdin.readline()\n"
        "try: print(Lease(root, Owner.here('x'), '--save').attempt(), flush=True)\n"
        "except ValueError: print('refused', flush=True)\n"
        "sys.stdin.readline()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    try:
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        said = sorted(process.stdout.readline().strip() for process in processes)
    finally:
        for process in processes:
            process.communicate("end\n")
    assert said.count("True") == 1 and set(said) <= {"True", "False", "refused"}
