"""The stand-ins accept and refuse what Transformer Engine and apex do, and compute what torch computes."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_balance.cli.checks import Machine
from megatron_balance.flow.grouped_gemm import EngineGemm, RowSplit, TorchGemm, WeightTerm
from tests.fused_adam import FusedAdam
from tests.hostcuda.packages import HERE, MACHINES, kernels, roots
from tests.hostcuda.packages.kernels import SIGNATURES
from tests.hostcuda.packages.te.transformer_engine.pytorch.optimizers import multi_tensor_apply

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex")), reason="the real ones are here"
)

TE = "transformer_engine.pytorch."
APEX = "apex."

ONE = torch.ones(4, 4)
TWO = torch.ones(1, 4, 32, 32, dtype=torch.bfloat16)
FLAG = torch.zeros(1, dtype=torch.int32)
MASK = torch.ones(4, 4, dtype=torch.bool)
ADAM = (1e-3, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)

CALLS: dict[str, tuple] = {
    f"{TE}permutation:moe_permute": (ONE, MASK, 16),
    f"{TE}permutation:moe_permute_with_probs": (ONE, ONE, MASK, 16),
    f"{TE}permutation:moe_unpermute": (ONE, torch.zeros(4, 9, dtype=torch.int32), None, (4, 4)),
    f"{TE}permutation:moe_sort_chunks_by_index": (ONE, torch.tensor([2, 2]), torch.tensor([1, 0])),
    f"{TE}permutation:moe_sort_chunks_by_index_with_probs": (ONE, ONE[0], torch.tensor([2, 2]), torch.tensor([1, 0])),
    f"{TE}cpp_extensions:general_gemm": (ONE, ONE),
    f"{TE}cpp_extensions:general_grouped_gemm": ([ONE], [ONE], [ONE], [None], ONE.dtype, "TN", [4]),
    f"{TE}attention.rope:apply_rotary_pos_emb": (TWO, TWO[:, :1].mT.float(), "sbhd", None, False, True),
    f"{TE}optimizers:multi_tensor_l2norm": (65536, FLAG, [[ONE]], False),
    f"{TE}optimizers:multi_tensor_scale": (65536, FLAG, [[ONE], [ONE]], 0.5),
    f"{TE}optimizers:multi_tensor_adam": (65536, FLAG, [[ONE]] * 4, *ADAM),
    "amp_C:multi_tensor_l2norm": (65536, FLAG, [[ONE]], False),
    "amp_C:multi_tensor_scale": (65536, FLAG, [[ONE], [ONE]], 0.5),
    "amp_C:multi_tensor_adam": (65536, FLAG, [[ONE]] * 4, *ADAM),
    "fused_weight_gradient_mlp_cuda:wgrad_gemm_accum_fp32": (ONE, ONE, ONE),
    "fused_weight_gradient_mlp_cuda:wgrad_gemm_accum_fp16": (TWO[0, 0], TWO[0, 0], TWO[0, 0]),
    "scaled_softmax_cuda:forward": (TWO, 1.0),
    "scaled_masked_softmax_cuda:forward": (TWO, TWO[:, :1].bool(), 1.0),
    "scaled_upper_triang_masked_softmax_cuda:forward": (TWO[0], 1.0),
}
"""Calls that would be valid if their tensors were on the device."""


@contextlib.contextmanager
def importable(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Make all packages importable inside the context; afterwards only `modules` holds their modules."""
    paths = [*roots("te and apex"), *roots("deep_ep")]
    sys.path[:0] = paths
    sys.modules.update(modules)
    try:
        yield
    finally:
        for path in paths:
            sys.path.remove(path)
        for name, module in [*sys.modules.items()]:
            if (getattr(module, "__file__", None) or "").startswith(str(HERE)) and not name.startswith("tests."):
                modules[name] = sys.modules.pop(name)


@pytest.fixture(scope="module")
def packages() -> Callable[[str], Callable]:
    """`packages("module:name")`: that object, on a machine with all packages."""
    modules: dict[str, ModuleType] = {}

    def found(name: str) -> Callable:
        module, _, path = name.partition(":")
        with importable(modules):
            value = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
        return value

    return found


def parameters(function: Callable) -> list[str]:
    """Return a function's parameters, with `=` for a default; `**others` stands for those that it only checks."""
    found = inspect.signature(function).parameters.values()
    return [f"{one.name}{'' if one.default is one.empty else '='}" for one in found if one.name not in NOT_GIVEN]


NOT_GIVEN = ("self", "ctx", "args", "kwargs")


@pytest.mark.parametrize("machine", MACHINES)
def test_a_machine_is_taken_for_what_it_is(monkeypatch, machine: str):
    for root in roots(machine):
        monkeypatch.syspath_prepend(root)
    here = Machine.here(1)
    assert (here.transformer_engine, here.apex) == ("te" in machine, "apex" in machine)


def test_only_what_asks_for_them_finds_them():
    for name in ("transformer_engine", "apex", "amp_C", "deep_ep"):
        assert importlib.util.find_spec(name) is None


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_have_the_names_of_the_sources(packages, name: str):
    found = parameters(packages(name))
    known = re.findall(r"\w+=?", SIGNATURES[name])
    if {"others", "options"} & {*found}:
        assert {*found[:-1]} <= {*known}
    else:
        assert found == [one for one in known if one not in NOT_GIVEN]


def test_arguments_and_features_that_are_not_there_are_refused():
    linear = f"{TE}module.linear:Linear.__init__"
    with pytest.raises(TypeError, match="no arguments"):
        kernels.check_others(linear, {"hidden_features": 1})
    with pytest.raises(NotImplementedError, match="delay_wgrad_compute"):
        kernels.check_others(linear, {"delay_wgrad_compute": True})
    kernels.check_others(linear, {"delay_wgrad_compute": False, "ub_name": "qkv"}, harmless=["ub_name"])


@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_the_host_are_refused(packages, name: str):
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA"):
        packages(name)(*CALLS[name])


@pytest.fixture
def on_the_host(monkeypatch) -> None:
    """Let kernels accept tensors on any device."""
    monkeypatch.setattr(kernels, "on_device", lambda **tensors: None)


def engine_gemm(function: Callable) -> EngineGemm:
    """Return products by a function that takes the place of Transformer Engine's."""
    gemm = EngineGemm()
    gemm.__dict__["_gemm"] = function, frozenset(inspect.signature(function).parameters)
    return gemm


def test_grouped_gemms_are_torchs(packages, on_the_host):
    """Products for home and guest slots are torch's, with uneven and empty slots."""
    gemms = TorchGemm(), engine_gemm(packages(f"{TE}cpp_extensions:general_grouped_gemm"))
    weights = [torch.randn(3, 6, 4), torch.randn(2, 6, 4)]
    for sizes in ([3, 0, 1, 0, 7], [0] * 5, [0, 0, 0, 1, 0]):
        split = RowSplit(sizes, ONE.device)
        rows = torch.randn(sum(sizes), 4)
        gradient = torch.randn(sum(sizes), 6)
        found = []
        for gemm in gemms:
            totals = torch.ones(5, 6, 4)
            parts = zip(totals, gradient.split(sizes), rows.split(sizes), strict=True)
            gemm.add_weight_gradients(WeightTerm(*part) for part in parts if len(part[1]))
            outputs = gemm.outputs(rows, weights, split), gemm.input_gradients(gradient, weights, split), totals
            found.append(outputs)
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)
        assert not any(sizes) or not torch.equal(found[0][2], torch.ones(5, 6, 4))


def test_half_precision_adds_to_single_precision(packages, on_the_host):
    gemm = engine_gemm(packages(f"{TE}cpp_extensions:general_grouped_gemm"))
    rows = torch.randn(9, 4).bfloat16()
    gradient = torch.randn(9, 6).bfloat16()
    total = torch.ones(6, 4)
    gemm.add_weight_gradients([WeightTerm(total, gradient, rows)])
    torch.testing.assert_close(total, 1 + gradient.float().T @ rows.float())


def test_grouped_gemms_of_other_versions(packages, on_the_host, monkeypatch):
    """Version 2.9 takes workspaces, and neither 2.9 nor 2.10 takes quantizers."""
    newest = packages(f"{TE}cpp_extensions:general_grouped_gemm")

    def oldest(A, B, out, out_dtype, workspaces, layout="TN", **options):
        assert workspaces == ["workspace"]
        return newest(A, B, out, [None] * len(A), out_dtype, layout, **options)

    def between(A, B, out, out_dtype, layout="TN", **options):
        return newest(A, B, out, [None] * len(A), out_dtype, layout, **options)

    base = SimpleNamespace(get_multi_stream_cublas_workspace=lambda: ["workspace"])
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.base", base)
    weights = [torch.randn(2, 6, 4)]
    split = RowSplit([1, 2], ONE.device)
    rows = torch.randn(3, 4)
    for function in (oldest, between):
        gemm = engine_gemm(function)
        torch.testing.assert_close(gemm.outputs(rows, weights, split), TorchGemm().outputs(rows, weights, split))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_fused_adam_steps_as_torchs_does(cpu_for_cuda, decay: float):
    torch.manual_seed(1)
    start = torch.randn(1000)
    gradients = torch.randn(4, 1000)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    fused = FusedAdam([ours], lr=1e-2, weight_decay=decay)
    plain = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=decay, foreach=False)
    for gradient in gradients:
        for parameter, optimizer in ((ours, fused), (theirs, plain)):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(ours, theirs)


def test_remainders_hold_what_the_parameter_lacks(cpu_for_cuda):
    whole = torch.randn(64)
    parameter = torch.empty(64, dtype=torch.bfloat16)
    remainder = torch.empty(64, dtype=torch.int16)
    multi_tensor_apply.part(whole, parameter, remainder)
    assert (parameter.float() - whole).abs().max() <= whole.abs().max() * 2**-8
    assert torch.equal(multi_tensor_apply.joined(parameter, remainder), whole)


@pytest.fixture
def cpu_for_cuda(monkeypatch) -> None:
    """`torch.tensor(..., device="cuda")` on the host."""
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *args, device=None, **kwargs: tensor(*args, **kwargs))
