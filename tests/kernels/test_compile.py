"""Kernels compile for devices that the machine lacks, keep their state in registers, and use no atomics and no floats.

Triton's interpreter replaces functions that its compiler needs, so nothing is interpreted here.
"""

import re
import subprocess
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia
from triton.compiler import ASTSource, CompiledKernel

from megatron_balance.kernels.fit import constants, fit_kernel, warps

TENSORS = fit_kernel.arg_names[: fit_kernel.arg_names.index("far")]


def compiled(architecture: int, ranks: int, homes: int, **others: int) -> CompiledKernel:
    """Compile the kernel of `fit` for a CUDA architecture."""
    chosen = constants(ranks, homes, ranks * homes, reaches_far=True, **others)
    signature = dict.fromkeys(TENSORS, "*i64") | {"far": "i32"} | dict.fromkeys(chosen, "constexpr")
    source = ASTSource(fit_kernel, signature, chosen)
    return triton.compile(source, GPUTarget("cuda", architecture, 32), {"num_warps": warps(ranks * homes)})


def resources(kernel: CompiledKernel, directory: Path) -> dict[str, int]:
    """Return what cuobjdump reports: a thread's registers (REG), its bytes of STACK and LOCAL memory, and more."""
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    cuobjdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    report = subprocess.run([cuobjdump, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", report.stdout)}


@pytest.mark.parametrize(
    ("architecture", "ranks", "homes", "node_size", "fills"),
    [
        (80, 64, 4, 8, False),
        (90, 64, 4, 8, False),
        (90, 36, 7, 6, True),
        (90, 256, 16, 8, False),
        (100, 64, 4, 8, True),
    ],
)
def test_fit_stays_in_registers(
    architecture: int, ranks: int, homes: int, node_size: int, fills: bool, tmp_path: Path
) -> None:
    kernel = compiled(architecture, ranks, homes, node_size=node_size, fills=fills)
    used = resources(kernel, tmp_path)
    print(f"sm_{architecture}, {ranks} ranks of {homes} experts, {kernel.metadata.num_warps} warps: {used}")
    assert f".target sm_{architecture}" in kernel.asm["ptx"]
    assert not re.search(r"\b(atom|red)\.|\.f(16|32|64)\b", kernel.asm["ptx"])
    assert used["REG"] > 0 and used["STACK"] == used["LOCAL"] == 0
