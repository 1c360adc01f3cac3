"""Machines with and without NVIDIA's packages: the kernels that a run uses there, and refusals."""

import dataclasses
import tomllib
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import utils
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from packaging.requirements import Requirement

from megatron_balance.app.dry_run import imagined_run
from megatron_balance.build.run import build_block_spec
from megatron_balance.cli.arguments import parse_args
from megatron_balance.device import cpu, machine
from megatron_balance.device.attention import TorchNorm
from megatron_balance.device.machine import EXPECTED_MODULES, KERNELS, Machine, unfit_engine
from tests.unit.commands import CPU, GPU, argv, checked_on

NEITHER = Machine(8, cuda=True, transformer_engine=False, apex=False)
APEX = dataclasses.replace(NEITHER, apex=True)
ENGINE = dataclasses.replace(NEITHER, transformer_engine=True)
SOFTMAX = KERNELS["masked_softmax_fusion"]
GRADIENT = KERNELS["gradient_accumulation_fusion"]
BALANCED = "--expert-model-parallel-size 2 --balance-policy quota"
ROPE = "--position-embedding-type rope"
PAIRED = "--overlap-moe-expert-parallel-comm"
TENSOR = "--tensor-model-parallel-size 2 --disable-bias-linear"
NO_GRADIENT = "--no-gradient-accumulation-fusion"
NO_SOFTMAX = "--no-masked-softmax-fusion"


def without(computer: Machine, *modules: str) -> Machine:
    return dataclasses.replace(computer, unbuilt=frozenset(modules))


FUSIONS = {
    "neither": (NEITHER, "", "local", "", f"{NO_GRADIENT} {NO_SOFTMAX}"),
    "neither, none wanted": (NEITHER, f"{NO_GRADIENT} {NO_SOFTMAX}", "local", "", ""),
    "apex": (APEX, "", "local", "gradient softmax persist", ""),
    "engine": (ENGINE, "", "transformer_engine", "rope persist", NO_GRADIENT),
    "engine, local layers": (ENGINE, "--transformer-impl local", "local", "rope", f"{NO_GRADIENT} {NO_SOFTMAX}"),
    "both": (GPU, "", "transformer_engine", "gradient softmax rope persist", ""),
    "apex without the gradient's kernel": (without(APEX, *GRADIENT), "", "local", "softmax persist", NO_GRADIENT),
    "apex without a softmax": (without(APEX, SOFTMAX[1]), "", "local", "gradient persist", NO_SOFTMAX),
    "both, but apex without kernels": (
        without(GPU, *GRADIENT, *SOFTMAX),
        "",
        "transformer_engine",
        "rope persist",
        NO_GRADIENT,
    ),
    # Without CUDA, the packages are not used
    "no CUDA": (dataclasses.replace(GPU, cuda=False), "--distributed-backend gloo", "local", "", ""),
}


@pytest.mark.parametrize(("computer", "flags", "impl", "fused", "noticed"), FUSIONS.values(), ids=FUSIONS)
def test_fusions_are_those_that_the_machine_has(
    computer: Machine, flags: str, impl: str, fused: str, noticed: str
) -> None:
    line = checked_on(computer, f"{ROPE} {flags}", tuple(flags.split()))
    assert line.transformer_impl == impl
    names = {
        **{"gradient": "gradient_accumulation_fusion", "softmax": "masked_softmax_fusion"},
        **{"rope": "apply_rope_fusion", "persist": "persist_layer_norm"},
    }
    assert " ".join(word for word, name in names.items() if getattr(line, name)) == fused
    said = [notice for notice in line.notices if "apex" in notice]
    assert said == ([f"no kernels of apex here: {noticed}"] if noticed else [])


@pytest.mark.parametrize("computer", [NEITHER, ENGINE, without(APEX, *GRADIENT)], ids=["neither", "engine", "apex"])
def test_models_are_built_without_the_kernel_of_weight_gradients(computer: Machine) -> None:
    """megatron-core's layers look for the kernel, and the output layer is always one of these."""
    flags = argv("--bf16 --no-rope-fusion")
    config = parse_args(flags, dataclasses.replace(computer, world_size=1)).config
    with imagined_run(config, 0, 1) as run:
        assert run.model


@pytest.mark.parametrize("computer", [CPU, APEX, NEITHER], ids=["cpu", "apex", "neither"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--moe-permute-fusion", "--moe-permute-fusion: needs Transformer Engine"),
        ("--moe-router-fusion", "--moe-router-fusion: needs Transformer Engine"),
        ("--moe-expert-gemm te", "--moe-expert-gemm te: needs Transformer Engine on CUDA .*; use default"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "--cross-entropy-fusion-impl te: needs"),
    ],
)
def test_what_was_asked_for_is_refused(computer: Machine, flags: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checked_on(computer, flags)
    line = checked_on(GPU, flags)
    assert line.moe_permute_fusion == ("permute" in flags)


BOUND = (
    "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear --moe-token-dispatcher-type flex "
    "--moe-flex-dispatcher-backend hybridep --moe-flex-rows bound"
)


@pytest.mark.parametrize(
    ("old", "new", "needed"),
    [
        ("flex", "alltoall", "--moe-token-dispatcher-type flex, not alltoall"),
        ("hybridep", "deepep", "--moe-flex-dispatcher-backend hybridep, not deepep"),
        ("--num-experts 4", "--num-experts 4 --moe-expert-gemm te", "--moe-expert-gemm default"),
        ("--num-experts 4", "--num-experts 4 --moe-layer-impl megatron", "--moe-layer-impl balanced"),
        ("size 2", "size 1", "--expert-model-parallel-size above 1"),
        ("--disable-bias-linear", "", "--disable-bias-linear"),
    ],
)
def test_rooms_for_the_most_rows(old: str, new: str, needed: str) -> None:
    checked_on(GPU, BOUND)
    with pytest.raises(ValueError, match=f"--moe-flex-rows bound: needs {needed}; or use counted"):
        checked_on(GPU, BOUND.replace(old, new, 1))


def test_a_dry_run_wants_no_kernels() -> None:
    """On a machine without kernels, a dry run stands for a machine with all kernels."""
    line = checked_on(CPU, "--dry-run --moe-permute-fusion")
    assert not line.moe_permute_fusion and not line.gradient_accumulation_fusion
    assert not any("apex" in notice for notice in line.notices)


@pytest.mark.parametrize("module", EXPECTED_MODULES)
def test_apex_without_what_is_taken_for_granted(module: str) -> None:
    for computer in (without(APEX, module), without(GPU, module)):
        with pytest.raises(ValueError, match=f"apex has no {module}.*APEX_CUDA_EXT=1, or uninstall"):
            checked_on(computer, "--transformer-impl local", ("transformer_impl",))
    # Transformer Engine has its own norms and optimizer
    assert checked_on(without(GPU, module)).transformer_impl == "transformer_engine"


@pytest.mark.parametrize("there", [{"apex"}, {"apex", "amp_C", *SOFTMAX}, {"transformer_engine"}, set()])
def test_the_machine_here(there: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_is_installed", there.__contains__)
    here = Machine.here(3)
    assert (here.world_size, here.transformer_engine, here.apex) == (3, "transformer_engine" in there, "apex" in there)
    every = {*EXPECTED_MODULES, *GRADIENT, *SOFTMAX}
    assert here.unbuilt == (every - there if here.apex else set())


ASKED = [f"transformer-engine[pytorch]{one}; extra == 'dev'" for one in ("<2.12.0,>=2.9.0a0", "", ">=2.9")]


@pytest.mark.parametrize(
    ("installed", "range", "fits"),
    [
        *[("2.8.0", ASKED[0], False), ("2.9.0", ASKED[0], True), ("2.11.1", ASKED[0], True)],
        *[("2.9.0.dev0+5fdd7bb", ASKED[0], False), ("2.10.0.dev0+5fdd7bb", ASKED[0], True)],
        *[("2.12.0", ASKED[0], False), ("2.18.0", ASKED[1], True), (None, ASKED[0], True)],
        *[("2.10.0.dev0+5fdd7bb", ASKED[2], True), ("1.0", "torch>=2", True)],
    ],
)
def test_versions_of_transformer_engine(installed: str | None, range: str, fits: bool) -> None:
    unfit = unfit_engine(installed, ["numpy", range])
    assert (unfit is None) == fits
    computer = dataclasses.replace(GPU, unfit=unfit)
    if fits:
        checked_on(computer)
    else:
        with pytest.raises(
            ValueError, match=f"Transformer Engine {installed}.*asks for .*>=2.9.*pip install".replace("+", "[+]")
        ):
            checked_on(computer)
        checked_on(dataclasses.replace(computer, cuda=False))


def test_what_pip_installs_is_what_the_check_accepts() -> None:
    """The extra `gpu` must allow exactly the versions that megatron-core supports."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (pin,) = map(Requirement, project["optional-dependencies"]["gpu"])
    assert pin.name == "transformer-engine"
    asked = requires("megatron-core") or []
    versions = [f"{major}.{minor}.0" for major in (1, 2, 3) for minor in range(20)]
    admitted = [one for one in versions if pin.specifier.contains(one)]
    accepted = [one for one in versions if unfit_engine(one, asked) is None]
    assert admitted and set(admitted) <= set(accepted)
    # megatron-core 0.19 allows any version
    assert accepted in (admitted, versions)


def test_megatron_core_is_completed_on_cuda_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is that of 0.16.1 without Transformer Engine."""
    monkeypatch.delattr(moe_utils, "te_general_gemm")
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", True)
    monkeypatch.setattr(utils, "_te_version", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "installed", lambda: False)
    monkeypatch.setattr(cpu, "_patch_torch", lambda: pytest.fail("CUDA answers for itself"))
    cpu.install()
    assert moe_utils.te_general_gemm is None and multi_latent_attention.HAVE_TE is False
    assert not utils.is_te_min_version("0.0.1")
    weight = torch.ones(2, 3, requires_grad=True)
    rows = torch.ones(4, 3)
    moe_utils.router_gating_linear(rows, weight, None, torch.float32).sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 3), 4.0))


@pytest.mark.parametrize(("normalization", "norm"), [("LayerNorm", FusedLayerNorm), ("RMSNorm", TorchNorm)])
def test_apex_has_no_kernel_for_other_norms(normalization: str, norm: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core ends the block in apex's layer norm, which refuses any other normalization."""
    monkeypatch.setattr(gpt_layer_specs, "LNImpl", FusedLayerNorm)
    config = parse_args(argv(f"--normalization {normalization} --moe-layer-impl megatron"), CPU).config
    groups = SimpleNamespace(pp=SimpleNamespace(rank=lambda: 0))
    block = build_block_spec(SimpleNamespace(config=config, groups=groups))
    assert block.layer_norm is norm


@pytest.mark.parametrize(
    ("computer", "connections", "flags", "said"),
    [
        (GPU, "1", f"{BALANCED} --balance-overlap blockwise", "blockwise can hide little"),
        (GPU, "1", "--moe-comm-chunks auto", "--moe-comm-chunks auto can hide little"),
        (GPU, "1", f"--moe-comm-chunks 4 {TENSOR}", "--tensor-model-parallel-size 2 overlaps"),
        (GPU, "1", f"{PAIRED} --expert-model-parallel-size 2", "parallel-comm can hide little"),
        (GPU, "8", "--moe-comm-chunks 4", ""),
        (GPU, "", "--moe-comm-chunks 4", ""),
        (GPU, "1", BALANCED, ""),
        (GPU, "1", "--balance-overlap blockwise", ""),
        (CPU, "1", "--moe-comm-chunks 4", ""),
    ],
)
def test_one_queue_hides_nothing(computer: Machine, connections: str, flags: str, said: str) -> None:
    line = checked_on(dataclasses.replace(computer, connections=connections), flags)
    found = [notice for notice in line.notices if "CUDA_DEVICE_MAX_CONNECTIONS=1" in notice]
    assert len(found) == bool(said) and all(said in notice and "unset it" in notice for notice in found)
