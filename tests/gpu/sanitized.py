"""The Triton kernels under NVIDIA's compute-sanitizer: nothing outside of tensors, no races, nothing uninitialized.

    python -m tests.gpu.sanitized                                  # the kernels alone
    python -m tests.gpu.sanitized --tools --output FILE.json       # the kernels alone, then under all tools at once
    TRITON_INTERPRET=1 python -m tests.gpu.sanitized --device cpu  # without a GPU

All six kernels run on few sizes with edges: no token, one token, odd widths, wrong numbers of rows. Results must equal
plain computations on the host. Values are small whole numbers, so that sums are exact in each precision.

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

import numpy as np
import torch

KERNELS = ("fit_kernel", "count_kernel", "order_kernel", "block_index_kernel", "copy_kernel", "sum_kernel")

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


def routing_of(tokens: int, experts: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(tokens, experts, generator=generator) < 0.4


def check_rows(device: str) -> None:
    """Compare the five kernels of kernels/rows.py with plain computations."""
    from megatron_balance.kernels import rows

    generator = torch.Generator().manual_seed(0)
    for tokens, experts, hidden, dtype in (
        (0, 3, 5, torch.float32),
        (1, 1, 1, torch.float32),
        (33, 3, 1030, torch.bfloat16),
        (35, 70, 5, torch.float64),
        (64, 8, 64, torch.bfloat16),
    ):
        routing_TE = routing_of(tokens, experts, generator)
        expert_R, token_R = routing_TE.T.nonzero(as_tuple=True)
        number = len(token_R)
        by_token_R = token_R.argsort(stable=True)
        chosen_T = routing_TE.sum(1)
        expected = token_R, token_R * experts + expert_R, by_token_R, chosen_T.cumsum(0) - chosen_T
        there_TE = routing_TE.to(device)
        order = rows.row_order(there_TE, number)
        for name, found, wanted in zip(order._fields, order, expected, strict=True):
            assert torch.equal(found.cpu().long(), wanted), f"{name} of {tokens} tokens, {experts} experts"
        # Another number of rows than there are is found out later, and must stay inside until then
        for wrong in {number // 2, number + 5}:
            assert all(int(part.cpu().min()) >= 0 for part in rows.row_order(there_TE, wrong) if part.numel())
        tokens_TH = torch.randint(-8, 9, (tokens, hidden), generator=generator).to(dtype)
        rows_RH = torch.randint(-8, 9, (number, hidden), generator=generator).to(dtype)
        index = order.by_token_R, order.first_T
        copies_RH = rows.gather_rows(tokens_TH.to(device), *index, number)
        sums_TH = rows.combine(rows_RH.to(device), *index)
        wanted_TH = torch.zeros(tokens, hidden, dtype=torch.float64).index_add_(0, token_R, rows_RH.double())
        assert torch.equal(copies_RH.cpu(), tokens_TH[token_R]), f"copies of {tokens} tokens, width {hidden}"
        assert torch.equal(sums_TH.cpu(), wanted_TH.to(dtype)), f"sums of {tokens} tokens, width {hidden}"
    for sizes in ([], [1], [700, 1, 2, 1024, 3]):
        ends_N = torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32)
        shift_N = torch.randint(-99, 99, (len(sizes),), generator=generator, dtype=torch.int32)
        expected_R = shift_N.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)) + torch.arange(sum(sizes))
        found_R = rows.block_index(ends_N.to(device), shift_N.to(device), sum(sizes))
        assert torch.equal(found_R.cpu().long(), expected_R), f"blocks of {sizes}"


def check_fit(device: str) -> None:
    """Compare the kernel of kernels/fit.py with the function that defines it."""
    from megatron_balance.kernels import fit as kernel
    from megatron_balance.planning.fit import ORDERS, PARTS, Overload, fit

    generator = np.random.default_rng(0)
    layers = 2
    slots = 2
    for order, (ranks, homes) in zip(ORDERS, ((1, 1), (7, 3), (8, 4), (7, 3)), strict=True):
        experts = ranks * homes
        tokens_LDS = generator.zipf(1.5, (layers, ranks, homes)).clip(max=20000)
        experts_LDS = np.broadcast_to(np.arange(experts).reshape(ranks, homes), tokens_LDS.shape).copy()
        loads_LD = tokens_LDS.sum(2)
        capacities_LD = np.broadcast_to(-(-loads_LD.sum(1, keepdims=True) // ranks), loads_LD.shape).copy()
        arrays = tokens_LDS, experts_LDS, loads_LD, capacities_LD, np.full_like(loads_LD, slots)
        there = [torch.from_numpy(array.astype(np.int64)).to(device) for array in arrays]
        found = kernel.fit(*there, num_experts=experts, node_size=4, order=order)
        for layer, (tokens_DS, experts_DS, loads_D, capacities_D, slots_D) in enumerate(zip(*arrays, strict=True)):
            wanted = fit(Overload(tokens_DS, experts_DS, loads_D - capacities_D, slots_D, 4, PARTS), order)
            number = int(found.number_L.cpu()[layer])
            assert found.moves_LMF.cpu()[layer, :number].tolist() == np.stack(wanted.moves, 1).tolist(), (
                f"moves, order {order}"
            )
            assert found.excess_LN.cpu()[layer, : number + 1].tolist() == wanted.excess.tolist(), f"order {order}"
        assert torch.equal(found.quotas_LED.cpu().sum(2).sum(1), torch.from_numpy(loads_LD.sum(1)))


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
        check_fit(args.device)
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
