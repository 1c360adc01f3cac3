"""Kernels compile for devices that the machine lacks, keep their state in registers, and use no atomics.

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

from megatron_balance.kernels import rows


def resources(kernel: CompiledKernel, directory: Path) -> dict[str, int]:
    """Return what cuobjdump reports: a thread's registers (REG), its bytes of STACK and LOCAL memory, and more."""
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    cuobjdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    report = subprocess.run([cuobjdump, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", report.stdout)}


def rows_kernels(experts: int, hidden: int, dtype: str) -> dict[str, tuple[triton.JITFunction, dict, dict]]:
    """Return the kernels of `kernels.rows` with the types of their arguments and their constants."""
    numbers = dict.fromkeys(("tokens", "blocks", "rows", "number", "hidden", "steps"), "i32")
    values = dict.fromkeys(("tokens_TH", "rows_RH"), f"*{dtype}")
    order = rows.order_constants(experts)
    copied = {"HIDDEN_BLOCK": rows.hidden_block(hidden)}
    chosen = {
        "count_kernel": order,
        "order_kernel": order,
        "block_index_kernel": {"BLOCK": rows.INDEX_BLOCK},
        "copy_kernel": copied,
        "sum_kernel": copied | {"WIDE": triton.language.float32},
    }
    found = {}
    for name, fixed in chosen.items():
        kernel = getattr(rows, name)
        others = [argument for argument in kernel.arg_names if argument not in fixed]
        types = {"chosen_TE": "*u8"} | values | numbers
        found[name] = kernel, {argument: types.get(argument, "*i32") for argument in others}, fixed
    return found


@pytest.mark.parametrize(
    ("architecture", "experts", "hidden", "dtype"),
    [(80, 8, 2048, "fp32"), (100, 384, 7168, "bf16")],
)
def test_rows_compile_without_atomics(architecture: int, experts: int, hidden: int, dtype: str, tmp_path: Path) -> None:
    for name, (kernel, signature, fixed) in rows_kernels(experts, hidden, dtype).items():
        source = ASTSource(kernel, signature | dict.fromkeys(fixed, "constexpr"), fixed)
        compiled = triton.compile(source, GPUTarget("cuda", architecture, 32))
        used = resources(compiled, tmp_path)
        print(f"sm_{architecture}, {name}: {used}")
        assert f".target sm_{architecture}" in compiled.asm["ptx"]
        assert not re.search(r"\b(atom|red)\.", compiled.asm["ptx"])
        # A tile of the routing and its running sums stay in registers
        assert used["REG"] > 0 and used["STACK"] == used["LOCAL"] == 0
