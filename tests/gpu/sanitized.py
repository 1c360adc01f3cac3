"""The Triton kernels under NVIDIA's compute-sanitizer: nothing outside of tensors, no races, nothing uninitialized.

    python -m tests.gpu.sanitized                                  # the kernels alone
    python -m tests.gpu.sanitized --tools --output FILE.json       # the kernels alone, then under all tools at once
    TRITON_INTERPRET=1 python -m tests.gpu.sanitized --device cpu  # without a GPU

All five kernels run on few sizes with edges: no token, one token, odd widths, wrong numbers of rows. Results must equal
computations on the host.

    memcheck    accesses outside of tensors: each tensor is an allocation of its own, without torch's cache
    racecheck   hazards in shared memory, which reductions and running sums use
    initcheck   reads of memory that nothing has written, also when a result is copied to the host: an element that a
                kernel left out. Reports about torch's own kernels are listed and do not count

Exit status: 0 if every tool ran and found nothing.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

KERNELS = ("count_kernel", "order_kernel", "block_index_kernel", "copy_kernel", "sum_kernel")

TOOLS = {
    # What torch asks the driver for in vain is no fault of a kernel
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": (),
    "initcheck": (),
}
ERROR = 7
"""Exit status of the sanitizer if it has found something."""

SECONDS = 60.0
"""Time limit of a process."""

PLACES = (Path("/usr/local/cuda/bin"), Path("/usr/local/cuda/compute-sanitizer"))


class Verdict(NamedTuple):
    """What a tool's output means."""

    passed: bool
    said: str


def verdict(tool: str, status: int, text: str) -> Verdict:
    """Judge the exit status and the output of a tool."""
    summaries = [line for line in text.splitlines() if "SUMMARY:" in line]
    if status == 0 and summaries and re.search(r"\b0 (errors|hazards)", summaries[-1]):
        return Verdict(True, summaries[-1].strip("= "))
    if status != ERROR:
        return Verdict(False, f"exit status {status}: {' | '.join(text.strip().splitlines()[-3:])}")
    places = re.findall(r"^=+ +at (.+?)(?:\+0x[0-9a-f]+.*)?$", text, re.MULTILINE)
    others = sorted({place for place in places if not any(name in place for name in KERNELS)})
    host = re.search(r"Host API|access by cuda|access by cu[A-Z]", text)
    if tool == "initcheck" and places and len(others) == len({*places}) and not host:
        return Verdict(True, f"only in kernels of torch: {'; '.join(place[:100] for place in others)}")
    found = re.findall(r"^=+ (\S.*(?:error|read|write|hazard|Race|Uninit|Invalid).*)$", text, re.MULTILINE)
    return Verdict(False, f"{found[0] if found else 'something'} at {places[0] if places else 'an unknown place'}")


def check_rows(device: str) -> None:
    """Compare the kernels of kernels/rows.py with the functions that define them."""
    from tests.kernels import equal

    for seed, (tokens, experts, hidden) in enumerate(((0, 3, 5), (1, 1, 1), (33, 3, 1030), (35, 70, 5), (64, 8, 64))):
        routing_TE = equal.routing(tokens, experts, 0.4, seed)
        equal.order_equal(routing_TE, device)
        equal.rows_equal(routing_TE, hidden, seed, device)
    for seed, sizes in enumerate(([], [1], [700, 1, 2, 1024, 3])):
        equal.blocks_equal(sizes, seed, device)


def run(tools: Sequence[str], sanitizer: str, device: str = "cuda", seconds: float = SECONDS) -> dict[str, dict]:
    """Run the kernels as they are, which compiles them, then under all tools at once."""
    program = [sys.executable, "-W", "ignore", "-m", "tests.gpu.sanitized", "--device", device]
    found = {"none": _finished(_started(program), "none", seconds)}
    running = {
        tool: _started([sanitizer, "--tool", tool, "--error-exitcode", str(ERROR), *TOOLS[tool], *program])
        for tool in tools
    }
    return found | {tool: _finished(process, tool, seconds) for tool, process in running.items()}


def _started(command: Sequence[str]) -> tuple[subprocess.Popen, float]:
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    root = Path(__file__).parents[2]
    return subprocess.Popen([*command], env=environment, cwd=root, **streams), time.perf_counter()


def _finished(started: tuple[subprocess.Popen, float], tool: str, seconds: float) -> dict:
    process, start = started
    try:
        text = process.communicate(timeout=max(1.0, start + seconds - time.perf_counter()))[0]
    except subprocess.TimeoutExpired:
        process.kill()
        text = process.communicate()[0] + f"\nstopped after {seconds:g} s"
    took = round(time.perf_counter() - start, 1)
    plain = Verdict(process.returncode == 0, " | ".join(text.strip().splitlines()[-3:]))
    judged = plain if tool == "none" else verdict(tool, process.returncode, text)
    return {"passed": judged.passed, "said": judged.said, "seconds": took, "output": text[-30000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tools", nargs="*", help=f"run under these tools; without a value: {', '.join(TOOLS)}")
    parser.add_argument("--sanitizer", help="path of compute-sanitizer")
    parser.add_argument("--output", type=Path, help="file for the verdicts and the tools' output, as JSON")
    args = parser.parse_args()
    if args.tools is None:
        check_rows(args.device)
        print(f"{len(KERNELS)} kernels are right on {args.device}", flush=True)
        return 0
    tools = args.tools or [*TOOLS]
    if unknown := {*tools} - {*TOOLS}:
        parser.error(f"unknown tools {sorted(unknown)}; choose from {', '.join(TOOLS)}")
    candidates = (str(place / "compute-sanitizer") for place in PLACES)
    paths = itertools.chain([args.sanitizer, shutil.which("compute-sanitizer")], candidates)
    sanitizer = next((path for path in paths if path and os.access(path, os.X_OK)), None)
    if sanitizer is None:
        raise SystemExit("compute-sanitizer is not here: give its path with --sanitizer")
    found = run(tools, sanitizer, args.device)
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    for tool, row in found.items():
        print(f"{tool:10s} {'passed' if row['passed'] else 'FAILED':6s} {row['seconds']:6.1f} s  {row['said'][:500]}")
    return int(not all(row["passed"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
