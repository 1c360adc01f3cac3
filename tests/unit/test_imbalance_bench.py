"""tools/bench/imbalance.py: its jobs and its table; routing_file.py: incomplete and inconsistent traces are refused."""

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import imbalance
import routing_file
from imbalance_ranks import Given
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.planning.policies import registered
from megatron_balance.workloads import imbalance as workloads


def tasks(line: str) -> list[dict[str, Any]]:
    return imbalance.tasks_of(*imbalance.parse(line.split()))


def test_one_run_compares_megatrons_layer_ours_and_every_policy() -> None:
    found = tasks("--ranks 4 --balance=--balance-guest-slots=3 --hidden-size 64")
    assert [(task["mode"], task["workload"]) for task in found] == [
        (mode, name) for mode in imbalance.MODES for name in workloads.WORKLOADS
    ]
    (first, *_) = found
    assert "--expert-model-parallel-size 4" in first["common"] and "--hidden-size 64" in first["common"]
    assert set(first["variants"]) == {"megatron"} | set(registered())
    for name, line in first["variants"].items():
        assert ("--moe-layer-impl megatron" in line) == (name == "megatron")
        policy = name not in ("megatron", "none")
        assert (f"--balance-guest-slots=3 --balance-policy {name}" in line) == policy


def test_every_variant_is_valid_by_default() -> None:
    machine = Machine(world_size=2, cuda=False, transformer_engine=False, apex=False)
    first = tasks("")[0]
    for name, own in first["variants"].items():
        config = parse_args(f"{first['common']} {own}".split(), machine).config
        assert config.balance.balance_policy == ("none" if name == "megatron" else name)


def test_the_testbed_emulates_only_our_layer() -> None:
    (task,) = tasks("--testbed --nodes 2 --ranks-per-node 3 --workloads W1 --modes dispatch_only --policies top2")
    assert "--expert-model-parallel-size 6 --moe-comm-node-size 3" in task["common"]
    assert [*task["variants"]] == ["none", "top2"]


def test_whole_periods_are_measured_and_traces_are_written_once() -> None:
    found = tasks("--workloads W6 W7 hot_rank --iterations 5 --write-trace there")
    assert [task["iterations"] for task in found[:3]] == [6, 8, 5]
    assert [task["write_trace"] for task in found] == ["there/W6", "there/W7", "there/hot_rank", *[None] * 6]


def test_the_headline_is_the_slowest_rank() -> None:
    task = tasks("--workloads W1 --modes training_step --policies")[0]
    seconds = {"megatron": [[0.1, 0.2], [0.4, 0.1], [0.1, 0.3]], "none": [[0.1, 0.1], [0.15, 0.1], [0.2, 0.2]]}
    variants = {name: {"seconds": times, "exact": True, "copies": 0} for name, times in seconds.items()}
    found = imbalance.records(task, {"load": 1.5, "variants": variants})
    assert [record["ms"] for record in found] == pytest.approx([300, 150])
    assert imbalance.row(found) == "| W1 | 1.50 | 300.0 (220.0-380.0), 1.000 | 150.0 (110.0-190.0), 0.500 |"


def routing(**changes: Any) -> routing_file.Routing:
    experts_TK, gates_TK = workloads.draw("W1", num_experts=8, topk=2, tokens=12, seed=7, step=3)
    tensors = {"experts_TK": experts_TK, "gates_TK": gates_TK, "source_T": np.repeat([0, 1], 6)}
    sizes = {"num_experts": 8, "num_ranks": 2, "hidden_size": 16}
    return routing_file.Routing(workload="W1_hot_expert_set", seed=7, step=3, **{**sizes, **tensors, **changes})


def test_a_trace_returns_as_it_was(tmp_path: Path) -> None:
    written = routing()
    routing_file.save(written, tmp_path / "trace")
    read = routing_file.load(tmp_path / "trace")
    for field in dataclasses.fields(written):
        assert np.array_equal(getattr(read, field.name), getattr(written, field.name)), field.name
    manifest = json.loads((tmp_path / "trace" / "manifest.json").read_text())
    assert manifest["schema_version"] == 1 and manifest["tensors"]["gates"]["dtype"] == "float32"
    with pytest.raises(ValueError, match="choose a new directory"):
        routing_file.save(written, tmp_path / "trace")


def test_a_router_gets_its_ranks_rows_of_each_step() -> None:
    by_step = [routing(experts_TK=np.tile([step, step + 1], (12, 1))) for step in range(2)]
    steps = [0]
    given = Given(1, by_step.__getitem__, lambda: steps[-1])
    scores_TE = torch.arange(6 * 8.0).reshape(6, 8)
    for step in range(2):
        steps.append(step)
        scores_TK, experts_TK = given.get_replay_topk(scores_TE, 2)
        assert experts_TK.tolist() == [[step, step + 1]] * 6 and torch.equal(scores_TK, scores_TE[:, step : step + 2])
        gates_TE, chosen_TE = given.route(8)
        assert torch.equal(gates_TE[:, step : step + 2], torch.from_numpy(by_step[step].gates_TK[6:]))
        assert chosen_TE.sum() == 12 and chosen_TE[:, step : step + 2].all()


def repeated(index: int, value: float) -> np.ndarray:
    gates_TK = routing().gates_TK.copy()
    gates_TK[index] = value
    return gates_TK


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"experts_TK": np.zeros((12, 2), dtype=np.int64)}, "chooses an expert twice"),
        ({"experts_TK": np.tile([0, 8], (12, 1))}, "outside of 0 to 7"),
        ({"experts_TK": np.tile([-1, 2], (12, 1))}, "outside of 0 to 7"),
        ({"source_T": np.full(12, 2)}, "source rank outside of 0 to 1"),
        ({"source_T": np.zeros(11, dtype=np.int32)}, "different numbers of tokens"),
        ({"gates_TK": repeated(3, np.nan)}, "negative or not finite"),
        ({"gates_TK": np.tile([-0.5, 1.5], (12, 1))}, "negative or not finite"),
        ({"gates_TK": repeated(3, 0.6)}, "do not add up to 1"),
        ({name: getattr(routing(), name)[:0] for name in ("experts_TK", "gates_TK", "source_T")}, "no tokens"),
    ],
)
def test_a_trace_without_sense_is_refused(changes: dict[str, np.ndarray], reason: str, tmp_path: Path) -> None:
    routing_file.save(routing(**changes), tmp_path)
    with pytest.raises(ValueError, match=f"{reason}.*; record the trace again"):
        routing_file.load(tmp_path)


def in_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        manifest = json.loads((directory / "manifest.json").read_text())
        change(manifest)
        (directory / "manifest.json").write_text(json.dumps(manifest))

    return edit


def damaged(directory: Path) -> None:
    path = directory / "tensors" / "gates.pt"
    torch.save(torch.load(path) * 0.5, path)


def pickled(directory: Path) -> None:
    path = directory / "tensors" / "gates.pt"
    path.write_bytes(pickle.dumps(Path("an object")))
    in_manifest(lambda manifest: manifest["tensors"]["gates"].update(sha256=routing_file._digest(path)))(directory)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damaged, "sha256 of tensors/gates.pt"),
        (pickled, "gates.pt is not a tensor"),
        (lambda directory: (directory / "tensors" / "gates.pt").unlink(), "gates.pt"),
        (lambda directory: (directory / "manifest.json").unlink(), "manifest.json"),
        (lambda directory: (directory / "manifest.json").write_text("{"), "Expecting"),
        (in_manifest(lambda manifest: manifest.update(schema_version=2)), "schema_version is 2, and 1 is supported"),
        (in_manifest(lambda manifest: manifest.pop("seed")), "lacks 'seed'"),
        (in_manifest(lambda manifest: manifest["tensors"].pop("gates")), "lacks 'gates'"),
        (in_manifest(lambda manifest: manifest["tensors"]["gates"].update(shape=[2, 12])), "has shape and type"),
        (in_manifest(lambda manifest: manifest.update(topk=3)), "another number of tokens or choices"),
    ],
)
def test_an_incomplete_trace_is_refused(damage: Callable[[Path], object], reason: str, tmp_path: Path) -> None:
    routing_file.save(routing(), tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path}: .*{reason}.*; record the trace again"):
        routing_file.load(tmp_path)
