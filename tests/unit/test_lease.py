"""The lease of a directory has one holder at a time, whichever process asks, dies, stops or resumes."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.checkpoint import lease
from megatron_balance.checkpoint.lease import RESTART_SECONDS, STALE_SECONDS, Lease, LeaseLost, Owner
from megatron_balance.job.launcher import STARTED, process_field
from tests.disks import fill, small_disk


class Clock:
    """A clock that tests advance explicitly."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def elsewhere(name: str, job: str | None = None, attempt: int = 0) -> Owner:
    """Return an owner that runs on its own host."""
    return Owner(
        f"run-{name}",
        host=f"host-{name}",
        process=77,
        since="some time ago",
        job=job,
        attempt=attempt,
        machine=f"machine {name}",
        started=1,
    )


def wanted(root: Path, owner: Owner, clock: Clock | None = None) -> Lease:
    return Lease(root, owner, f"--save {root}", clock or Clock())


def held(root: Path, name: str = "a") -> Lease:
    holder = wanted(root, elsewhere(name))
    assert holder.attempt()
    return holder


def left(root: Path) -> list[str]:
    return sorted(os.listdir(root))


def test_a_released_lease_is_free_at_once(tmp_path: Path) -> None:
    first = held(tmp_path)
    first.release()
    second = held(tmp_path, "b")
    assert second.generation == 2 and left(tmp_path) == ["lease.000002"]
    # The first holder can no longer change anything
    first.release()
    assert not first.renew()
    second.check()


@pytest.mark.parametrize("change", [Lease.renew, Lease.check])
def test_whoever_renews_is_told_about(tmp_path: Path, change: Callable[[Lease], object]) -> None:
    holder = held(tmp_path)
    other = wanted(tmp_path, elsewhere("b"))
    assert not other.attempt()
    change(holder)
    with pytest.raises(
        ValueError, match=r"--save .*run-a, process 77 on host host-a, since .*another directory, or wait"
    ):
        other.attempt()


@pytest.mark.parametrize(
    ("owner", "seconds"),
    [
        (elsewhere("b"), STALE_SECONDS),
        (elsewhere("b", "job 7", 1), RESTART_SECONDS),
        (elsewhere("b", "job 8", 1), STALE_SECONDS),
        (elsewhere("b", "job 7", 0), STALE_SECONDS),
    ],
    ids=["another job", "the job again", "another job again", "the job twice"],
)
def test_a_lease_that_nobody_renews_is_stale(tmp_path: Path, owner: Owner, seconds: float) -> None:
    assert wanted(tmp_path, elsewhere("a", "job 7", 0)).attempt()
    clock = Clock()
    other = wanted(tmp_path, owner, clock)
    for now in (0.0, seconds / 2, seconds - 1):
        clock.now = now
        assert not other.attempt()
    clock.now = seconds
    assert other.attempt()


def test_times_of_files_and_clocks_of_hosts_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held(tmp_path)
    os.utime(tmp_path / "lease.000001", (0, 0))
    monkeypatch.setattr(lease.time, "time", lambda: 1e12)
    assert not wanted(tmp_path, elsewhere("b")).attempt()


def test_a_taken_lease_is_lost_and_nothing_is_touched(tmp_path: Path) -> None:
    first = held(tmp_path)
    clock = Clock()
    second = wanted(tmp_path, elsewhere("b"), clock)
    second.attempt()
    clock.now = STALE_SECONDS
    assert second.attempt()
    content = (tmp_path / "lease.000002").read_bytes()
    with pytest.raises(LeaseLost, match=r"another run saves there .run run-b, process 77 on host host-b"):
        first.check()
    assert not first.renew()
    first.release()
    assert left(tmp_path) == ["lease.000002"] and (tmp_path / "lease.000002").read_bytes() == content
    second.check()


def test_a_removed_directory_is_a_lost_lease(tmp_path: Path) -> None:
    root = tmp_path / "save"
    root.mkdir()
    holder = held(root)
    (root / "lease.000001").unlink()
    with pytest.raises(LeaseLost, match="is gone from there"):
        holder.check()
    root.rmdir()
    with pytest.raises(LeaseLost, match="is gone from there"):
        holder.check()
    # A lease of another run with the same number does not count either
    root.mkdir()
    other = held(root, "b")
    with pytest.raises(LeaseLost, match="run-b"):
        holder.check()
    assert not holder.renew()
    other.check()


@pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 9000, b'{"owner": {"process": 1}}', b"null"])
def test_what_says_nothing_becomes_stale(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lease.000009").write_bytes(content)
    other = wanted(tmp_path, elsewhere("b"), clock := Clock())
    assert not other.attempt()
    clock.now = STALE_SECONDS
    assert other.attempt() and other.generation == 10


def test_names_from_a_file_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = dataclasses.asdict(elsewhere("x\n\x1b[31mred" + "y" * 500))
    (tmp_path / "lease.000001").write_text(
        json.dumps({"owner": owner, "token": "t", "renewals": 0, "released": False}), encoding="utf-8"
    )
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.1)
    said: list[str] = []
    Lease(tmp_path, Owner.here("b"), f"--save {tmp_path}").acquire(said.append)
    assert len(said) == 1 and said[0].isprintable() and len(said[0]) < 700 and "to see whether run run-x" in said[0]


def test_a_full_disk_has_no_room_for_a_first_lease(tmp_path: Path) -> None:
    with small_disk(tmp_path, 64):
        fill(tmp_path)
        with pytest.raises(OSError, match=r"No space left on device: '.*lease.000001'"):
            wanted(tmp_path, elsewhere("a")).attempt()
        assert left(tmp_path) == ["fill"]


def hold(root: Path, pipe, stopping: bool) -> None:
    """Hold a lease in this process, stop, and try to save after being continued."""
    holder = Lease(root, Owner.here("first", "job", 0), f"--save {root}")
    holder.acquire(print)
    holder.keep()
    pipe.send(holder.generation)
    if stopping:
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            holder.check()
        except LeaseLost as error:
            pipe.send(str(error))
        else:
            pipe.send("still mine")
        return
    signal.pause()


@contextlib.contextmanager
def holding(root: Path, stopping: bool = False) -> Iterator[tuple[multiprocessing.Process, object]]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(root, theirs, stopping))
    process.start()
    assert ours.poll(60) and ours.recv() == 1
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()


def test_on_one_host_the_process_tells(tmp_path: Path) -> None:
    with holding(tmp_path) as (process, _):
        with pytest.raises(ValueError, match=f"run first, process {process.pid} on host"):
            wanted(tmp_path, Owner.here("second")).attempt()
        process.kill()
        # Dead, although nobody has collected its exit status
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert wanted(tmp_path, Owner.here("second")).attempt()


def test_a_number_that_another_process_has_now_is_no_holder(tmp_path: Path) -> None:
    started = int(process_field(os.getppid(), STARTED))
    parent = dataclasses.replace(Owner.here("first"), process=os.getppid(), started=started)
    wanted(tmp_path, parent).attempt()
    with pytest.raises(ValueError, match=f"run first, process {os.getppid()}"):
        wanted(tmp_path, Owner.here("second")).attempt()
    (tmp_path / "lease.000001").unlink()
    assert wanted(tmp_path, dataclasses.replace(parent, started=started - 1)).attempt()
    assert wanted(tmp_path, Owner.here("second")).attempt()


def test_a_slow_taker_finds_that_another_was_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number that it takes is free again, but that does not help."""
    held(tmp_path).release()
    fast = wanted(tmp_path, elsewhere("fast"))
    slow = wanted(tmp_path, elsewhere("slow"))
    is_free = slow._is_free

    def slowly(generation: int) -> bool:
        found = is_free(generation)
        assert fast.attempt()
        fast.check()
        return found

    monkeypatch.setattr(slow, "_is_free", slowly)
    assert not slow.attempt() and left(tmp_path) == ["lease.000003"]
    fast.check()


def test_a_process_is_one_writer(tmp_path: Path) -> None:
    first = wanted(tmp_path, Owner.here("first"))
    assert first.attempt() and wanted(tmp_path, Owner.here("second")).attempt()
    with pytest.raises(LeaseLost, match="run second"):
        first.check()


def test_a_stopped_holder_that_wakes_does_not_go_on(tmp_path: Path) -> None:
    with holding(tmp_path, stopping=True) as (process, pipe):
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        clock = Clock()
        taker = wanted(tmp_path, elsewhere("b"), clock)
        assert not taker.attempt()
        clock.now = STALE_SECONDS
        assert taker.attempt()
        before = left(tmp_path), (tmp_path / "lease.000002").read_bytes()
        process_wakes = os.kill(process.pid, signal.SIGCONT)
        assert process_wakes is None and pipe.poll(60) and "another run saves there (run run-b" in pipe.recv()
        process.join(60)
        assert (left(tmp_path), (tmp_path / "lease.000002").read_bytes()) == before


def test_the_thread_renews_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    monkeypatch.setattr(lease, "POLL_SECONDS", 0.05)
    holder = held(tmp_path)
    holder.keep()
    with pytest.raises(ValueError, match="run-a"):
        wanted(tmp_path, elsewhere("b")).acquire(print)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == f"lease of {tmp_path}"]
    assert thread.daemon
    (tmp_path / "lease.000001").unlink()
    thread.join(60)
    assert not thread.is_alive()


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


OPERATIONS = ("_generations", "_read", "_create", "_remove", "renew")


@settings(max_examples=100)
@given(order=st.lists(st.integers(0, 3), max_size=60), wakes=st.booleans(), freed=st.booleans())
def test_of_all_that_take_a_stale_lease_one_wins(tmp_path_factory, order: list[int], wakes: bool, freed: bool) -> None:
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
