"""The table of the campaign: what happens to a job, when, in which layout, and how the job must end."""

import random
from dataclasses import dataclass
from enum import Enum

from tests.distributed.runs import BASE

ITERATIONS = 6
COMMON = (
    f"{BASE} --num-layers 1 --train-iters {ITERATIONS} --save-interval 2 --keep-last 2 --log-interval 1 "
    "--eval-interval 3 --eval-iters 1 --hidden-dropout 0.1 --distributed-timeout-minutes 10"
)
BALANCED = "--balance-policy pro_prophet --balance-profile builtin --moe-router-force-workload rotating_hotspot"

LAYOUTS: dict[str, tuple[int, str]] = {
    "alone": (1, f"{COMMON} --num-experts 4"),
    "EP2": (2, f"{COMMON} --expert-model-parallel-size 2 {BALANCED} --balance-overlap blockwise"),
    "EP2 async": (2, f"{COMMON} --expert-model-parallel-size 2 {BALANCED} --async-save"),
    "EP2 measured": (2, f"{COMMON} --expert-model-parallel-size 2 {BALANCED} --balance-profile auto"),
    "EP2 transfer": (2, f"{COMMON} {{wandering}}"),
    "DP2 x EP2": (
        4,
        f"{COMMON} --expert-model-parallel-size 2 {BALANCED} --balance-policy top2 --balance-overlap blockwise "
        "--use-distributed-optimizer --overlap-grad-reduce --global-batch-size 8",
    ),
    "PP2 x EP2": (
        4,
        f"{COMMON} --num-layers 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {BALANCED} "
        "--global-batch-size 8 --async-save",
    ),
    "TP2 x EP2": (
        4,
        f"{COMMON} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
        f"--expert-model-parallel-size 2 {BALANCED} --global-batch-size 8",
    ),
    "EP4": (4, f"{COMMON} --expert-model-parallel-size 4 {BALANCED} --balance-load exact"),
}
"""Number of ranks, and flags without directories. `{wandering}` is a policy whose experts keep changing owners."""


class End(Enum):
    """How a job with a fault ends."""

    RESUMES = "it ends with an error; started again, it trains on from its last checkpoint and learns the same"
    GOES_ON = "it ends with status 0 and has learned the same"
    REFUSED = "every rank ends with status 1 before the first iteration and has changed nothing"


@dataclass(frozen=True)
class Cell:
    """One job with a fault."""

    layout: str
    fault: str
    """A name in `faults.FAULTS`."""
    moment: str
    """A name in `faults.MOMENTS`."""
    end: End = End.RESUMES
    rank: int | None = 1
    """The rank with the fault; None: all ranks."""
    call: int = 1
    """The call of the moment's function at which the fault happens."""
    delay: float = 0.0
    """Seconds from that call to the fault, while the rank continues."""
    flags: str = ""
    """Extra flags of the job with the fault, not of the restarted job."""
    said: str = ""
    """A regular expression that must match the ranks' output; by default, if the job ends, the output must name the
    rank."""

    @property
    def timeout(self) -> str:
        """The flag that ends the ranks which wait in vain for one that never joins."""
        missing = self.moment in ("parsing", "joining") and self.end is End.RESUMES
        return "--distributed-timeout-minutes 0.2" if missing else ""

    def __str__(self) -> str:
        where = "all ranks" if self.rank is None else f"rank {self.rank}"
        later = f" + {self.delay:g} s" if self.delay else ""
        return f"{self.layout}: {where} {self.fault} at {self.moment} {self.call}{later} {self.flags}".strip()


def at_random(count: int, layout: str, moment: str, calls: int, longest: float, fault: str = "is killed") -> list[Cell]:
    """Draw the rank, the call (up to `calls`) and the delay (up to `longest` seconds) with a fixed seed."""
    chance = random.Random(f"{layout} {moment}")
    ranks = LAYOUTS[layout][0]
    return [
        Cell(
            layout,
            fault,
            moment,
            rank=chance.randrange(ranks),
            call=chance.randint(1, calls),
            delay=round(chance.uniform(0.001, longest), 3),
            # The other ranks may notice while they start, before they know the rank
            said=".",
        )
        for _ in range(count)
    ]


def _ends() -> list[Cell]:
    """A rank ends, or stops making progress."""
    cells = [
        Cell("EP2", fault, "forward", call=7)
        for fault in ("is killed", "is terminated", "crashes", "stops", "loops", "raises", "runs out of memory")
    ]
    cells += [
        Cell("EP2", "leaves with status 0", "forward", call=7, said=r"SystemExit"),
        Cell("EP2", "leaves at once with status 0", "forward", call=7),
        Cell("EP2", "is interrupted", "forward", call=7, said="KeyboardInterrupt|interrupted"),
        Cell("alone", "leaves with status 0", "forward", call=3, rank=0, said="SystemExit"),
        Cell("alone", "raises", "forward", call=3, rank=0, said="RuntimeError: a fault"),
        Cell("EP4", "leaves with status 0", "forward", call=3, rank=None, said="SystemExit"),
        Cell("PP2 x EP2", "is killed", "forward", rank=2, call=9),
        Cell("PP2 x EP2", "leaves with status 0", "forward", rank=3, call=9, said="SystemExit"),
        Cell("TP2 x EP2", "is killed", "forward", rank=0, call=4),
        Cell("TP2 x EP2", "loops", "forward", rank=2, call=4),
        Cell("DP2 x EP2", "is killed", "optimizer", rank=3, call=3),
        Cell("DP2 x EP2", "raises", "Agg", rank=2),
        Cell("DP2 x EP2", "stops", "Trans", rank=1, call=3),
        Cell("EP2 transfer", "is killed", "Transfer"),
        Cell("EP2 transfer", "raises", "Transfer", said="a fault"),
    ]
    return cells


def _moments() -> list[Cell]:
    """A rank dies or fails in every part of a run."""
    cells = [Cell("EP2", "is killed", moment, rank=0, said=".") for moment in ("parsing", "joining", "building")]
    cells += [Cell("EP2", "raises", moment, said=".") for moment in ("joining", "building")]
    cells += [Cell("EP2", "leaves with status 0", moment, said=".") for moment in ("parsing", "building")]
    cells += [
        Cell("EP2 measured", "is killed", "measuring", call=5),
        Cell("EP2 measured", "raises", "measuring", call=5),
        Cell("EP2", "is killed", "loading", rank=0),
        Cell("EP2", "raises", "loading", said="a fault"),
        Cell("EP2", "is killed", "evaluation"),
        Cell("PP2 x EP2", "is killed", "evaluation", rank=0, call=2),
        Cell("EP2", "raises", "saving", call=2, said="a fault"),
        Cell("EP2", "has no file descriptors left", "saving", call=2, said="Too many open files"),
        Cell("EP2", "is killed", "writing", call=1, said="its writer died"),
        Cell("EP2 async", "is killed", "writing", call=1, said="its writer died"),
        Cell("PP2 x EP2", "is killed", "writing", rank=3, call=1, said="its writer died"),
        Cell("EP2", "is killed", "committing", rank=0, call=2),
        Cell("EP2 async", "is killed", "committing", rank=0, call=2),
        Cell("EP2", "raises", "committing", rank=0, call=2, said="a fault"),
        Cell("EP2", "is killed", "the end", said="."),
    ]
    return cells


def _clocks() -> list[Cell]:
    """A clock that is a day off changes nothing."""
    return [
        Cell("EP2", f"finds its clock a day {way}", moment, End.GOES_ON, rank, call)
        for way in ("ahead", "back")
        for moment, rank, call in (("joining", 1, 1), ("forward", 0, 5), ("committing", 0, 2))
    ] + [Cell("EP2 async", "finds its clock a day ahead", "writing", End.GOES_ON, 1, 1)]


def _policies() -> list[Cell]:
    """A user's policy misbehaves: the last placement stays."""
    here = "tests.faults.policies"
    cells = [
        Cell(
            "EP2",
            "has a policy that does not answer" if name == "Loops" else "has another policy",
            "parsing",
            End.GOES_ON,
            None,
            flags=f"--balance-policy {here}:{name}",
            said=said,
        )
        for name, said in (
            ("Leaves", "SystemExit"),
            ("LeavesAtOnce", "exit"),
            ("Loops", "--distributed-timeout-minutes"),
            ("Crashes", "SIGSEGV|signal|exit"),
            ("Interrupts", "KeyboardInterrupt"),
            ("Shouts", "ValueError"),
        )
    ]
    return cells


def _disks() -> list[Cell]:
    """Disks and directories that fail while the job runs."""
    logs = "--balance-log-dir {disk}/loads --tensorboard-dir {disk}/board --balance-timeline {disk}/timeline"
    return [
        Cell("EP2", "finds its disk full", "saving", rank=0, call=2, said="No space left"),
        Cell("EP2 async", "finds its disk full", "saving", rank=0, call=2, said="No space left"),
        Cell("EP2", "finds its disk read-only", "saving", rank=0, call=2, said="Read-only file system"),
        Cell("EP2 async", "finds its disk read-only", "committing", rank=0, call=2, said="Read-only file system"),
        Cell("EP2", "finds its disk full", "logging", End.GOES_ON, 0, 2, flags=logs, said="--balance-log-dir"),
        # TensorBoard keeps a file open, which prevents remounting the disk
        Cell(
            "EP2",
            "finds its disk read-only",
            "logging",
            End.GOES_ON,
            0,
            2,
            flags=logs.replace("--tensorboard-dir {disk}/board", ""),
            said="--balance-log-dir",
        ),
        Cell("EP2", "loses its directory", "saving", rank=0, call=2, said="No such file|is gone from there"),
        Cell("EP2", "meets another run", "forward", End.GOES_ON, 0, 5, said="status 1: .*another run saves there"),
        Cell("EP2 async", "meets another run", "saving", End.GOES_ON, 0, 2, said="status 1: .*another run saves there"),
    ]


def _settings() -> list[Cell]:
    """A rank that was started differently."""
    compared = (
        ("EP2", 1, "--seed 7"),
        ("EP2", 0, "--lr 2e-3"),
        ("EP2", 1, "--train-iters 8"),
        ("EP2", 1, "--hidden-size 64"),
        ("EP2", 1, "--eval-interval 2"),
        ("EP4", 3, "--balance-policy top2"),
        ("PP2 x EP2", 2, "--micro-batch-size 1"),
        ("TP2 x EP2", 1, "--seed 7"),
    )
    # A rank reports an error in its own settings to the others
    its_own = (
        ("EP4", 0, "--hidden-size 31", "--hidden-size 31"),
        ("PP2 x EP2", 3, "--lr high", "argument --lr"),
    )
    said = r"rank {} on \S+ cannot start: {}"
    return [
        *(
            Cell(layout, f"has {own}", "parsing", End.REFUSED, rank, said=own.split()[0])
            for layout, rank, own in compared
        ),
        *(
            Cell(layout, f"has {own}", "parsing", End.REFUSED, rank, said=said.format(rank, reason))
            for layout, rank, own, reason in its_own
        ),
        Cell(
            "EP2", "runs another program", "parsing", End.REFUSED, said=r"the source of megatron_balance/flow/layer\.py"
        ),
        Cell("EP2 transfer", "reads another profile", "parsing", End.REFUSED, said="the content of --balance-profile"),
        Cell("EP2", "may open 40 files", "parsing", End.REFUSED, None, said="ulimit -n"),
    ]


RANDOM = [
    *at_random(4, "EP2", "parsing", 1, 1.2),
    *at_random(2, "PP2 x EP2", "parsing", 1, 1.5),
    *at_random(3, "EP2 measured", "measuring", 20, 0.1),
    *at_random(2, "EP2", "evaluation", 2, 0.05),
    *at_random(4, "EP2 async", "saving", 3, 0.2),
    *at_random(2, "PP2 x EP2", "saving", 3, 0.2),
    *at_random(2, "DP2 x EP2", "forward", 7, 0.2),
    *at_random(4, "EP2 transfer", "Transfer", 1, 0.02),
]
CELLS = [*_ends(), *_moments(), *_clocks(), *_policies(), *_disks(), *_settings(), *RANDOM]
