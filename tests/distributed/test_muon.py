"""Muon (`--optimizer muon`): its updates, and runs of several layouts. Its package is our stand-in
(tests/packages/emerging)."""

import re
from pathlib import Path

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

from megatron_balance.cli.optimizer_checks import NEWER
from megatron_balance.training.loop import train_step
from tests.distributed import runs
from tests.distributed.checkpoints import losses_of, straight_against_resumed
from tests.harness import RankFailure

MUON = "--optimizer muon --muon-fp32-matmul-prec high --global-batch-size 8 --train-iters 40 --lr 1e-2"
PLAIN = f"{MUON} --disable-bias-linear --swiglu --make-vocab-size-divisible-by 64"

NESTEROV = "--muon-nesterov" if NEWER else "--muon-use-nesterov"

COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Apply the Newton-Schulz polynomials to the singular values of a matrix, in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for a, b, c in COEFFICIENTS:
        values = a * values + b * values**3 + c * values**5
    return left @ (values[:, None] * right) * max(matrix.shape) ** 0.5


def matrices(name: str, tensor: torch.Tensor, group: int) -> list[torch.Tensor]:
    """Return the matrices of a parameter that are orthogonalized apart. `group`: rows of a query group's queries, keys
    or values."""
    if "linear_qkv" in name:
        parts = tensor.unflatten(0, (-1, 3, group)).unbind(1)
        return [part.flatten(0, 1) for part in parts]
    return [*tensor] if tensor.dim() == 3 else [tensor]


def updates(flags: str) -> list[tuple[str, float]]:
    """Return each matrix's parameter, and the error of its update relative to Muon's definition; -1 if Adam made it."""
    run = runs.build(flags)
    train_step(run)
    inner = [part.optimizer for part in run.optimizer.chained_optimizers]
    states = {id(key): value for one in inner for key, value in one.state.items()}
    groups = {id(one): group for each in inner for group in each.param_groups for one in group["params"]}
    mains = {name: getattr(one, "main_param", one) for name, one in run.model[0].named_parameters()}
    before = {name: main.detach().clone() for name, main in mains.items()}
    rates = {name: (groups[id(main)]["lr"], groups[id(main)]["weight_decay"]) for name, main in mains.items()}
    train_step(run)
    found = []
    for name, main in mains.items():
        average = states[id(main)].get("momentum_buffer")
        if average is None:
            found.append((name, -1.0))
            continue
        rate, decay = rates[name]
        for old, mean, new in zip(
            *(matrices(name, one, 8) for one in (before[name], average, main.detach())), strict=True
        ):
            expected = old * (1 - rate * decay) - rate * orthogonal(mean).float()
            found.append((name, float((new - expected).norm() / (new - old).norm())))
    return found


@pytest.mark.parametrize("flags", ["", pytest.param("--bf16", marks=pytest.mark.slow)])
def test_every_matrix_is_orthogonalized_by_itself(ranks, flags: str) -> None:
    (found,) = ranks(1).run(updates, f"{MUON} --moe-router-topk 8 {flags}")
    errors = {}
    for name, error in found:
        errors.setdefault(name.replace("module.", ""), []).append(error)
    kinds = {name.partition("layers.0.")[2]: values for name, values in errors.items() if "layers.0." in name}
    assert {name: len(values) for name, values in kinds.items() if min(values) >= 0} == {
        "self_attention.linear_proj.weight": 1,
        "self_attention.linear_qkv.weight": 3,
        "mlp.router.weight": 1,
        "mlp.experts.linear_fc1.weight": 8,
        "mlp.experts.linear_fc2.weight": 8,
    }
    by_adam = {name for name, values in errors.items() if max(values) < 0}
    assert {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"} <= by_adam
    assert {"decoder.layers.0.mlp.experts.linear_fc1.bias", "decoder.layers.1.mlp.experts.linear_fc2.bias"} <= by_adam
    assert max(error for _, error in found) < (2e-2 if flags else 1e-3)


def test_torchs_own_muon_agrees() -> None:
    """One iteration with the first coefficients; torch's iterations are in bfloat16."""
    matrix = torch.randn(24, 16)
    parameter = torch.nn.Parameter(torch.zeros_like(matrix))
    parameter.grad = matrix
    optimizer = torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, ns_coefficients=COEFFICIENTS[0], ns_steps=1)
    optimizer.step()
    ours = newton_schulz(matrix, 1) * (24 / 16) ** 0.5
    torch.testing.assert_close(-parameter.data, ours, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(not NEWER, reason="coefficients have no flag")
def test_unknown_coefficients(ranks) -> None:
    with pytest.raises(RankFailure, match="--muon-coefficient-type best: choose from quintic, simple"):
        ranks(1).run(runs.train_curve, f"{PLAIN} --muon-coefficient-type best", 1)


TP2 = "--tensor-model-parallel-size 2"
SP = "--sequence-parallel"
POLICY = "--balance-profile builtin --moe-router-force-workload rotating_hotspot --balance-policy"
LAYOUTS = {
    "EP2, policy": (2, f"--expert-model-parallel-size 2 {POLICY} top2"),
    "TP2, duplicated": (2, f"{TP2} {SP} --expert-tensor-parallel-size 2 --muon-tp-mode duplicated"),
    "TP2, distributed": (2, f"{TP2} {SP} --expert-tensor-parallel-size 2 --muon-tp-mode distributed"),
    "TP2 EP2, s1": (
        4,
        f"{TP2} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --muon-tp-mode duplicated "
        "--moe-parallel-schedule s1",
    ),
    "PP2 EP2": (4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --overlap-grad-reduce"),
    "EP2, megatron's layer": (2, "--expert-model-parallel-size 2 --moe-layer-impl megatron"),
    "DP2, nesterov, fused queries": (2, f"{NESTEROV} --muon-no-split-qkv --muon-scale-mode unit_rms_norm"),
}
QUICK = ("EP2, policy",)
HOW = re.compile(r"--muon-(?!tp)\S+( [a-z_]+)?|--moe-router-force-workload \S+")
"""Flags that also the run of one process has."""


@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in LAYOUTS]
)
def test_layouts_train_alike(ranks, tmp_path: Path, name: str) -> None:
    """Start on one process, so that all layouts have the same weights and momenta; go on there and in the layout."""
    world_size, flags = LAYOUTS[name]
    shared = " ".join([PLAIN, *(match[0] for match in HOW.finditer(flags))])
    start, one, many = (str(tmp_path / part) for part in ("start", "one", "many"))
    ranks(1).run(losses_of, shared, None, start, 2)
    alone = ranks(1).run(losses_of, shared, start, one, 3)[0]
    together = ranks(world_size).run(losses_of, f"{PLAIN} {flags}", start, many, 3)[0]
    assert together == pytest.approx(alone, rel=1e-5)


RESUMED = {
    "EP2 policy": (2, f"--expert-model-parallel-size 2 {POLICY} top2"),
    "TP2 EP2 bf16": (4, f"{TP2} {SP} --expert-model-parallel-size 2 --bf16 --muon-tp-mode distributed"),
    "PP2 EP2 policy": (4, f"--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 {POLICY} top2"),
}


@pytest.mark.parametrize(
    "name", [one if one == "EP2 policy" else pytest.param(one, marks=pytest.mark.slow) for one in RESUMED]
)
def test_a_resumed_run_is_the_straight_run(ranks, tmp_path: Path, name: str) -> None:
    world_size, flags = RESUMED[name]
    found = ranks(world_size).run(straight_against_resumed, f"{PLAIN} {flags}", str(tmp_path), 4)
    assert found == [[]] * world_size


@pytest.mark.parametrize("overlap", ["none", pytest.param("blockwise", marks=pytest.mark.slow)])
def test_a_policy_that_acts_changes_nothing(ranks, overlap: str) -> None:
    flags = f"{PLAIN} --expert-model-parallel-size 2 --moe-router-force-workload rotating_hotspot"
    plain = ranks(2).run(runs.train_curve, flags, 3)[0]
    balanced = f"{flags} --balance-policy top2 --balance-overlap {overlap} --balance-profile builtin"
    curve, hosts = ranks(2).run(runs.train_hosts, balanced, 3)[0]
    assert sum(map(bool, hosts)) >= 2
    for one, other in zip(curve, plain, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
