"""Find out how several ranks can share this machine's GPU, and write the name of the way.

python -m tests.gpu.way FILE [--cpu]
"""

import sys
from pathlib import Path

from tests.gpu.ranks import GpuRanks, probe
from tests.harness import RankFailure

SECONDS = 25.0
"""Time limit for a probe's collectives."""


def main() -> int:
    """Try real NCCL first."""
    for way in ("gloo",) if "--cpu" in sys.argv else ("nccl", "staged"):
        ranks = GpuRanks(4, way)
        try:
            milliseconds = ranks.run(probe, timeout=SECONDS)
        except RankFailure as failure:
            print(f"{way}: {failure}", flush=True)
            continue
        finally:
            ranks.stop()
        print(f"{way}: four ranks work on one device, {max(milliseconds):.1f} ms an all-reduce", flush=True)
        Path(sys.argv[1]).write_text(way)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
