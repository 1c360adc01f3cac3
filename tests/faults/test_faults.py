"""A rank that dies, hangs or fails, a full disk, a wrong clock: how a job ends, what it leaves, and how it goes on."""

import contextlib
import ctypes
import functools
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.job.hang_guard import HangGuard
from tests.disks import fill, small_disk
from tests.distributed.jobs import Ended, Job, found
from tests.distributed.runs import BASE
from tests.distributed.wandering import wandering
from tests.variants import variants

LIMIT = 240.0
"""Seconds after which a job counts as hanging; 12 s after the fault, its ranks no longer wait for each other."""

TOLERANCE = 1e-5
"""Relative, for logged losses and gradient norms: placements may differ."""

ITERATIONS = 6
COMMON = (
    f"{BASE} --num-layers 2 --train-iters {ITERATIONS} --save-interval 2 --keep-last 2 --log-interval 1 "
    "--eval-interval 3 --eval-iters 1 --hidden-dropout 0.1 --distributed-timeout-minutes 10 "
    "--expert-model-parallel-size 2"
)
BALANCED = f"{COMMON} --balance-policy top2 --balance-profile builtin --moe-router-force-workload rotating_hotspot"
LOGS = "--balance-log-dir {disk}/loads --tensorboard-dir {disk}/board --balance-timeline {disk}/timeline"

LAYOUTS = {
    "EP2": (2, f"{BALANCED} --balance-overlap blockwise"),
    "EP2 async": (2, f"{BALANCED} --async-save"),
    "EP2 measured": (2, f"{BALANCED} --balance-profile auto"),
    "EP2 transfer": (2, f"{COMMON} {{wandering}}"),
    "PP2 x EP2": (4, f"{BALANCED} --pipeline-model-parallel-size 2 --global-batch-size 8 --async-save"),
}
"""Number of ranks, and flags without directories. `{wandering}` is a policy whose experts keep changing owners."""

PLACES = {
    "building": "megatron_balance.app.launch:build_run",
    "measuring": "megatron_balance.measure.stopwatch:Stopwatch._seconds",
    "forward": "megatron_balance.training.loop:forward_step",
    "Trans": "megatron_balance.comm.trans_agg:TransAgg.trans",
    "Transfer": "megatron_balance.comm.ownership_transfer:ExpertMover._exchange",
    "logging": "megatron_balance.training.logging:RunLog.step",
    "evaluation": "megatron_balance.training.loop:evaluate",
    "saving": "megatron_balance.checkpoint.checkpoints:Checkpoints._start",
    "writing": "megatron_balance.checkpoint.writer:_write",
    "committing": "megatron_balance.checkpoint.directory:CheckpointDirectory.commit",
    "the end": "megatron_balance.app.launch:_finish_together",
}
"""Where a fault happens -> the function at whose call it happens, as module:name."""


def _signal(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(1)


def _fail() -> None:
    raise RuntimeError("a fault")


def _loop() -> None:
    while True:
        pass


def _lose_a_day() -> None:
    now = time.time
    now_ns = time.time_ns
    time.time = lambda: now() - 86_400
    time.time_ns = lambda: now_ns() - 86_400 * 10**9


def _use_all_descriptors() -> None:
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))


FAULTS: dict[str, Callable[[Path], object]] = {
    "is killed": lambda disk: _signal(signal.SIGKILL),
    "is interrupted": lambda disk: _signal(signal.SIGINT),
    "stops": lambda disk: _signal(signal.SIGSTOP),
    "crashes": lambda disk: ctypes.string_at(0),
    "loops": lambda disk: _loop(),
    "raises": lambda disk: _fail(),
    "leaves at once with status 0": lambda disk: os._exit(0),
    "finds its clock a day back": lambda disk: _lose_a_day(),
    "has no file descriptors left": lambda disk: _use_all_descriptors(),
    "finds its disk full": fill,
    "finds its disk read-only": lambda disk: subprocess.run(["mount", "-o", "remount,ro", disk], check=True),
    "loses its directory": lambda disk: shutil.rmtree(disk / "save"),
}
"""Faults by name; their argument is the disk to which the job writes."""


@dataclass(frozen=True)
class Fault:
    """One job with a fault. It ends with an error and trains on when it is started again, or it goes on."""

    layout: str
    kind: str
    place: str
    call: int = 1
    """The call at that place at which it happens."""
    rank: int = 1
    said: str = r"rank {rank} (stalled|died|failed)"
    """A regular expression that must match the ranks' output."""
    goes_on: bool = False
    flags: str = ""
    """Extra flags of the job with the fault, not of the restarted job."""

    def __str__(self) -> str:
        return f"{self.layout}: rank {self.rank} {self.kind} at {self.place} {self.call}"


CASES = [
    Fault("EP2", "is killed", "building", rank=0, said="."),
    Fault("EP2 measured", "is killed", "measuring", 5),
    Fault("EP2", "is killed", "forward", 7),
    Fault("PP2 x EP2", "is killed", "evaluation", 2, rank=0),
    Fault("EP2 transfer", "is killed", "Transfer"),
    Fault("EP2", "is killed", "writing", said="its writer died"),
    Fault("EP2", "is killed", "the end", said="."),
    Fault("EP2", "is interrupted", "forward", 7, said="interrupted"),
    Fault("EP2", "stops", "Trans", 3),
    Fault("EP2", "crashes", "forward", 7),
    Fault("PP2 x EP2", "loops", "forward", 7, rank=2),
    Fault("EP2", "raises", "building", said="a fault"),
    Fault("EP2", "raises", "committing", 2, rank=0, said="a fault"),
    Fault("EP2", "leaves at once with status 0", "forward", 7),
    Fault("EP2", "has no file descriptors left", "saving", 2, said="Too many open files"),
    Fault("EP2", "finds its disk full", "saving", 2, rank=0, said="No space left"),
    Fault("EP2 async", "finds its disk read-only", "committing", 2, rank=0, said="Read-only file system"),
    Fault("EP2", "loses its directory", "saving", 2, rank=0, said="No such file|is gone from there"),
    Fault("EP2", "finds its disk full", "logging", 2, rank=0, said="--balance-log-dir", goes_on=True, flags=LOGS),
    Fault("EP2", "finds its clock a day back", "committing", 2, rank=0, said="", goes_on=True),
]
QUICK = ("EP2: rank 1 raises at building 1",)


@dataclass(frozen=True)
class Inject:
    """Prepares the ranks of a job; one of them has the fault."""

    fault: Fault
    disk: Path
    happened: Path
    """Created when the fault happens."""
    temporary: Path
    """Directory for the ranks' temporary files."""

    def __call__(self, rank: int) -> None:
        tempfile.tempdir = os.environ["TMPDIR"] = str(self.temporary)
        # No rank waits for long once the fault has happened; until then, it may start slowly
        HangGuard._limit = property(  # pyright: ignore
            lambda guard: 12.0 if self.happened.exists() else 600.0, lambda guard, given: None
        )
        if rank != self.fault.rank:
            return
        holder, name = found(PLACES[self.fault.place])
        original = getattr(holder, name)
        calls = 0

        @functools.wraps(original)
        def disturbed(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == self.fault.call:
                self.happened.touch()
                FAULTS[self.fault.kind](self.disk)
            return original(*args, **kwargs)

        setattr(holder, name, disturbed)


def losses(text: str) -> dict[int, tuple[float, float]]:
    """Return the losses and gradient norms that the ranks of a job logged, by iteration."""
    lines = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+) .*?grad norm: (\S+) ", text)
    return {int(iteration): (float(loss), float(norm)) for iteration, loss, norm in lines}


@pytest.fixture(scope="module", autouse=True)
def orphans() -> Iterator[None]:
    """Make this process the parent of all orphans, so that it finds them."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)
    yield
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 0)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def expected(shared: Path) -> Callable[[str], dict[int, tuple[float, float]]]:
    """`expected(layout)`: losses of the layout without a fault; each layout is trained once."""

    @functools.cache
    def of(layout: str) -> dict[int, tuple[float, float]]:
        own = shared / layout.replace(" ", "_")
        world_size, flags = LAYOUTS[layout]
        flags = flags.format(wandering=wandering(world_size, shared))
        ended = Job(world_size, f"{flags} --save {own}/save", own / "logs").wait(LIMIT)
        assert ended.codes == [0] * world_size, ended.text
        return losses(ended.text)

    return of


def leavings(temporary: Path) -> set[str]:
    """Return what jobs may leave outside their directories: processes, shared memory, temporary files."""
    left = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    left |= {str(path) for path in temporary.iterdir() if not path.name.startswith("torchinductor_")}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if "forkserver" not in command and "resource_tracker" not in command:
                left |= {f"{process.pid} {command}"} if process.status() != psutil.STATUS_ZOMBIE else set()
    return left


def wait_until_clean(before: set[str], temporary: Path) -> None:
    """Check that nothing new stays; processes have 60 seconds to end."""
    deadline = time.monotonic() + 60
    left = leavings(temporary) - before
    while left:
        assert time.monotonic() < deadline, f"left behind: {sorted(left)}"
        time.sleep(0.2)
        # Anything that appears later belongs to tests that run at the same time
        left &= leavings(temporary)


def end_of(job: Job, fault: Fault) -> Ended:
    if fault.kind == "stops":
        # The stopped rank stays until it is killed here, after all others have ended
        for rank, process in enumerate(job.ranks):
            if rank != fault.rank:
                process.join(LIMIT)
        job.signal(fault.rank, signal.SIGKILL)
    return job.wait(LIMIT)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", variants({str(one): one for one in CASES}, QUICK))
def test_a_fault_ends_as_it_should(fault: Fault, tmp_path: Path, shared: Path, expected) -> None:
    world_size, flags = LAYOUTS[fault.layout]
    flags = flags.format(wandering=wandering(world_size, shared))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    mounted = small_disk(tmp_path / "disk", 24_000) if "disk" in fault.kind else contextlib.nullcontext(tmp_path)
    with mounted as disk:
        # If the fault affects the disk with the logs, checkpoints go elsewhere
        save = (tmp_path if fault.flags else disk) / "save"
        flags += f" --save {save} --load {save}"
        before = leavings(temporary)
        inject = Inject(fault, disk, tmp_path / "happened", temporary)
        job = Job(world_size, f"{flags} {fault.flags.format(disk=disk)}", tmp_path / "disturbed", inject)
        ended = end_of(job, fault)
        assert inject.happened.exists(), ended.text
        assert re.search(fault.said.format(rank=fault.rank), ended.text), ended.text
        wait_until_clean(before, temporary)
        logged = losses(ended.text)
        if fault.goes_on:
            assert set(ended.codes) == {0}, ended.text
            assert logged.keys() == expected(fault.layout).keys()
        else:
            others = {code for rank, code in enumerate(ended.codes) if rank != fault.rank}
            # Nothing in a process can prevent its immediate exit: the other ranks make the job fail
            assert others == {1} and (ended.codes[fault.rank] or "at once" in fault.kind), ended.text
            if fault.kind == "finds its disk read-only":
                subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
            (disk / "fill").unlink(missing_ok=True)
            left = CheckpointDirectory(save).iterations()
            again = Job(world_size, flags, tmp_path / "again").wait(LIMIT)
            assert again.codes == [0] * world_size, again.text
            came_from = re.findall(r"successfully loaded checkpoint from \S*iter_(\d+)", again.text)
            assert [int(iteration) for iteration in came_from] == left[:1], again.text
            assert losses(again.text).keys() == {*range((left or [0])[0] + 1, ITERATIONS + 1)}, again.text
            logged |= losses(again.text)
        for iteration, values in logged.items():
            for value, other in zip(values, expected(fault.layout)[iteration], strict=True):
                assert math.isclose(value, other, rel_tol=TOLERANCE), (iteration, logged)
        assert not [path for path in save.iterdir() if re.search(r"\.(saving|replaced|deleting)-", path.name)]
