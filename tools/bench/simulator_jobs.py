"""The runs that simulator_error.py measures and simulates."""

from collections.abc import Mapping
from dataclasses import dataclass

from slow_runs import MODEL, Cluster

MODEL_FLAGS = f"{MODEL} --seq-length 256 --num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 256"
GFLOPS = 2.5
LINK_MBIT = 200.0
GUESTS = "--balance-guest-slots 3"
BLOCKWISE = f"{GUESTS} --balance-overlap blockwise"


@dataclass(frozen=True)
class Job:
    """Runs that take turns in the same processes."""

    name: str
    nodes: int
    ranks_per_node: int
    flags: str
    workload: str
    variants: Mapping[str, str]
    """Flags of each run."""
    fitted: tuple[str, ...] = ()
    """Names of the runs that the CPU times are fitted to."""

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.nodes, self.ranks_per_node, LINK_MBIT, GFLOPS)

    @property
    def common(self) -> str:
        node = f"--moe-comm-node-size {self.ranks_per_node}"
        return f"{MODEL_FLAGS} --moe-router-force-workload {self.workload} {self.flags} {node}"


EVEN = "--moe-router-force-workload balanced"

JOBS = (
    Job(
        "EP4, hot_rank",
        2,
        2,
        "--num-layers 2 --expert-model-parallel-size 4 --global-batch-size 4",
        "hot_rank",
        {
            "even": EVEN,
            "none": "",
            "pro_prophet": f"--balance-policy pro_prophet {GUESTS}",
            "pro_prophet, blockwise": f"--balance-policy pro_prophet {BLOCKWISE}",
            "quota, blockwise": f"--balance-policy quota {BLOCKWISE}",
            "flexmoe": f"--balance-policy flexmoe {GUESTS}",
        },
        fitted=("even",),
    ),
    Job(
        "EP4, 4 layers, 2 microbatches, zero_load",
        2,
        2,
        "--num-layers 4 --expert-model-parallel-size 4 --global-batch-size 8",
        "zero_load",
        {
            "even": EVEN,
            "none": "",
            "quota, blockwise": f"--balance-policy quota {BLOCKWISE}",
            "flexmoe, blockwise": f"--balance-policy flexmoe {BLOCKWISE}",
        },
        fitted=("even",),
    ),
    Job(
        "EP4, chunks and all-to-alls, hot_experts",
        2,
        2,
        "--num-layers 2 --expert-model-parallel-size 4 --global-batch-size 4",
        "hot_experts",
        {
            "none": "",
            "4 chunks": "--moe-comm-chunks 4 --moe-comm-order optsche",
            "2dh": "--moe-comm-alltoall 2dh",
            "flat": "--moe-comm-alltoall flat",
            "quota, 2 chunks": f"--balance-policy quota {BLOCKWISE} --moe-comm-chunks 2",
        },
    ),
    Job(
        "two stages of EP2, 4 microbatches, hot_experts",
        2,
        2,
        "--num-layers 4 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --global-batch-size 8",
        "hot_experts",
        {
            "none": "",
            "quota, blockwise": f"--balance-policy quota {BLOCKWISE}",
            "pro_prophet": f"--balance-policy pro_prophet {GUESTS}",
        },
    ),
    Job(
        "two replicas of EP2 within nodes, spread_hot_experts",
        2,
        2,
        "--num-layers 2 --expert-model-parallel-size 2 --global-batch-size 4",
        "spread_hot_experts",
        {"none": "", "quota, blockwise": f"--balance-policy quota {BLOCKWISE}"},
    ),
    Job(
        "EP4, one rank a node, rotating_hotspot",
        4,
        1,
        "--num-layers 2 --expert-model-parallel-size 4 --global-batch-size 4",
        "rotating_hotspot",
        {
            "none": "",
            "pro_prophet, blockwise": f"--balance-policy pro_prophet {BLOCKWISE}",
            "quota": f"--balance-policy quota {GUESTS}",
        },
    ),
)


def numbers_of(job: Job) -> dict[str, int]:
    """Return the values of a job's own flags."""
    words = job.flags.split()
    return dict(zip(words[::2], map(int, words[1::2]), strict=True))


def stages_of(job: Job) -> int:
    """Return the number of pipeline stages."""
    return numbers_of(job).get("--pipeline-model-parallel-size", 1)


def passes_of(job: Job) -> int:
    """Return the passes of layers in an iteration of one rank, if no two ranks share a core at the same time."""
    numbers = numbers_of(job)
    stages = stages_of(job)
    data = job.nodes * job.ranks_per_node // stages
    return numbers["--num-layers"] // stages * (numbers["--global-batch-size"] // data)
