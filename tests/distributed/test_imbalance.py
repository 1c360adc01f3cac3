"""tools/bench/imbalance.py on two ranks: every mode, ragged sources, integers that return, and a trace."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import imbalance
import imbalance_ranks
import ranks as bench_ranks
import routing_file
from megatron_balance.cli.checks import Machine
from megatron_balance.workloads import imbalance as workloads

TINY = "--hidden-size 32 --moe-ffn-hidden-size 16 --num-layers 2"


def task(workload: str, *, mode: str = "moe_fwd_bwd", **options: str) -> dict[str, Any]:
    few = f"--workloads {workload} --modes {mode} --policies top2 --tokens 12 --iterations 1 --warmup 2"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    args, extra = imbalance.parse([*few.split(), *TINY.split(), *flags])
    (only,) = imbalance.tasks_of(args, extra)
    return only


def measure(of: dict[str, Any]) -> dict[str, Any]:
    return imbalance_ranks.measure(of, Machine.here(dist.get_world_size()))


@pytest.mark.parametrize("mode", imbalance.MODES)
def test_every_mode(ranks, mode: str) -> None:
    found = ranks(2).run(measure, task("W1", mode=mode))
    assert found[0] == found[1] and 1.5 < found[0]["load"] < 2
    assert list(found[0]["variants"]) == ["megatron", "none", "top2"]
    for name, variant in found[0]["variants"].items():
        ((one, other),) = variant["seconds"]
        assert one > 0 and other > 0 and variant["exact"]
        assert (variant["copies"] > 0) == (name == "top2")


def build(of: dict[str, Any]) -> Any:
    (run,) = bench_ranks.build({"none": of["common"]}, Machine.here(dist.get_world_size())).values()
    routing = functools.partial(imbalance_ranks.routing_of, of, run.config)
    imbalance_ranks._give_routing(run, routing, alone=True)
    return run


def rows_and_changes(of: dict[str, Any]) -> tuple[list[list[int]], list[bool]]:
    """Return the experts of this rank's rows, and whether integers return before and after rank 1 shifts its rows."""
    run = build(of)
    layers = imbalance_ranks.moe_layers(run)
    intact = imbalance_ranks.returns_integers(run)
    share = layers[1].parallel.share

    def wrong(tokens_TH: torch.Tensor, chosen: Any) -> Any:
        return share(tokens_TH.roll(dist.get_rank(), 0), chosen)

    layers[1].parallel.share = wrong
    return layers[0].router.router_replay.experts_TK.tolist(), [intact, imbalance_ranks.returns_integers(run)]


def test_ragged_sources_and_changed_rows_are_noticed(ranks) -> None:
    (first, unharmed), (second, changed) = ranks(2).run(rows_and_changes, task("W4"))
    whole_TK, _ = workloads.draw("W4", num_experts=8, topk=2, tokens=24, seed=1234, step=0)
    assert (len(first), len(second)) == (8, 16) and [*first, *second] == whole_TK.tolist()
    assert unharmed == [True, True] and changed == [True, False]


def test_a_trace_is_written_and_replayed(ranks, tmp_path: Path) -> None:
    ranks(2).run(measure, task("W4", write_trace=str(tmp_path)))
    routing = routing_file.load(tmp_path / "W4")
    assert np.bincount(routing.source_T).tolist() == [8, 16] and routing.workload == "W4_source_ragged"
    (found, _) = ranks(2).run(measure, task("W1", mode="dispatch_only", trace=str(tmp_path / "W4")))
    assert all(variant["exact"] for variant in found["variants"].values())
    counts_E = np.bincount(routing.experts_TK.ravel(), minlength=8)
    assert found["load"] == pytest.approx(counts_E.reshape(2, 4).sum(1).max() / 24)
