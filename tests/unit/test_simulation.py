"""Simulations of whole configurations: the command, its limits, and what must hold between runs."""

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simulate
from megatron_balance.app.simulation import simulated_job
from megatron_balance.planning.policies import registered
from megatron_balance.profile.cluster import Ranks, profile_of, read
from megatron_balance.profile.kernel_times import uneven_passes
from megatron_balance.simulate.job import LoadSource, Simulation
from megatron_balance.simulate.layers import variations

ROOT = Path(__file__).resolve().parents[2]

FLAGS = (
    "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 "
    "--num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 8192 --moe-token-dispatcher-type alltoall "
    "--global-batch-size 64 --expert-model-parallel-size 8 --pipeline-model-parallel-size 2 --bf16 "
    "--use-distributed-optimizer --balance-overlap blockwise"
)


CLUSTER = ("--cluster", "configs/clusters/h100.yaml")


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """`run(*arguments, flags=FLAGS)` simulates from the root, and returns what the command writes about each run."""
    monkeypatch.chdir(ROOT)

    def of(*arguments: str, flags: str = FLAGS) -> list[dict[str, Any]]:
        found = tmp_path / "found.json"
        assert simulate.main([*CLUSTER, *arguments, "--json", str(found), *flags.split()]) == 0
        return json.loads(found.read_text())

    return of


def test_the_command_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tools/simulate.py", *CLUSTER, "--nodes", "2", "--iterations", "1"]
    monkeypatch.setattr(sys, "argv", [*command, *FLAGS.replace("--balance-overlap blockwise", "").split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(command[0], run_name="__main__")
    assert ended.value.code == 0
    assert "iteration, ms" in capsys.readouterr().out


def test_a_policy_helps_where_loads_are_uneven(run, tmp_path: Path) -> None:
    options = ["--nodes", "4", "--load", "hot_rank", "--iterations", "3", "--plan-ms", "1", "--trace-ranks", "0", "31"]
    trace = ["--trace", str(tmp_path / "trace.json")]
    none, quota = run(*options, *trace, "--compare", "balance-policy=none,quota")
    assert quota["seconds"] < 0.7 * none["seconds"]
    # The same tokens are computed, only elsewhere
    assert quota["mean_seconds"]["experts"] == pytest.approx(none["mean_seconds"]["experts"], rel=1e-3)
    assert none["seconds"] >= max(busy for _, busy in none["busy"].values()) * none["seconds"]
    assert sum(none["mean_seconds"].values()) <= none["seconds"] * (1 + 1e-9)
    for name in ("none", "quota"):
        events = json.loads((tmp_path / f"trace_{name}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {0, 31}
        assert {"rank 31", "computation", "exchange"} <= {
            event["args"]["name"] for event in events if event["ph"] == "M"
        }


def test_plans_on_exact_loads_are_waited_for(run) -> None:
    options = ["--nodes", "2", "--load", "hot_rank", "--iterations", "2", "--plan-ms", "3"]
    flags = FLAGS.replace("--balance-overlap blockwise", "--balance-policy quota --balance-load exact")
    (found,) = run(*options, flags=flags)
    # Two layers on each stage wait for a plan and for Trans, in each microbatch
    assert found["mean_seconds"]["Plan"] == pytest.approx(2 * 8 * 3e-3)
    assert found["mean_seconds"]["Trans"] > 0 and found["mean_seconds"]["Agg"] > 0
    # The device computes shared experts meanwhile
    flags += " --moe-shared-expert-intermediate-size 8192 --disable-bias-linear"
    waits = [run(*options[:-1], each, flags=flags)[0]["mean_seconds"]["Plan"] for each in ("0.01", "3", "5")]
    assert waits[0] == 0 and 0 < waits[1] < 2 * 8 * 3e-3
    assert waits[2] - waits[1] == pytest.approx(2 * 8 * 2e-3)


@pytest.mark.parametrize(
    ("common", "hidden"), [("", "--overlap-grad-reduce"), ("--overlap-grad-reduce", "--overlap-param-gather")]
)
def test_reductions_and_gathers_are_hidden(run, common: str, hidden: str) -> None:
    seconds = []
    for more in ("", hidden):
        flags = FLAGS.replace("--balance-overlap blockwise", f"{common} {more}").replace("size 64", "size 128")
        (found,) = run("--nodes", "8", flags=flags)
        seconds.append((found["seconds"], found["mean_seconds"]["reduction"]))
    (late, late_wait), (early, early_wait) = seconds
    assert early < late and early_wait < 0.9 * late_wait


def test_stages_may_have_no_experts(run, tmp_path: Path) -> None:
    pattern = "--moe-layer-freq ([0]*2+[1]*2) --overlap-grad-reduce --overlap-param-gather"
    options = ["--nodes", "4", "--load", "hot_rank", "--iterations", "2", "--plan-ms", "1", "--over-even"]
    compare = ["--html", str(tmp_path / "page.html"), "--compare", "balance-policy=none,quota"]
    even, none, quota = run(*options, *compare, flags=f"{FLAGS} {pattern}")
    assert even["label"] == "even" and even["seconds"] < quota["seconds"] < none["seconds"]
    # Half of the ranks have experts
    assert 0 < none["mean_seconds"]["experts"] < none["mean_seconds"]["others' experts"]
    for one in (even, none, quota):
        assert sum(one["mean_seconds"].values()) <= one["seconds"] * (1 + 1e-9)
        assert all(most <= 1 for _, most in one["busy"].values())
    page = (tmp_path / "page.html").read_text()
    for text in ("4 nodes of h100, load hot_rank", "pro_prophet", "others&#39; experts", "GiB"):
        assert (text in page) == (text != "pro_prophet")


def test_experts_change_owners_once(run) -> None:
    times = []
    seconds = []
    flags = f"{FLAGS} --num-experts 32 --balance-policy flexmoe --balance-ownership transfer"
    for iterations in range(1, 5):
        options = ["--nodes", "4", "--load", "zero_load", "--iterations", str(iterations), "--plan-ms", "1"]
        (found,) = run(*options, flags=flags)
        times.append(found["in_progress_seconds"].get("Transfer", 0.0))
        assert all(most <= 1 for _, most in found["busy"].values())
        seconds.append(found["seconds"])
    # Once, and then owners are where the load wants them
    assert any(times) and not times[-1], times
    assert seconds[-1] < min(seconds[:1])


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        (["--nodes", "2"], "--moe-token-dispatcher-type allgather", "--moe-token-dispatcher-type allgather: cannot be"),
        (["--nodes", "2"], "--balance-policy mine.py:Mine", "--balance-policy mine.py:Mine: only this package's"),
        (
            ["--nodes", "2"],
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            "--cp-comm-type a2a+p2p: cannot be simulated; give p2p or a2a",
        ),
        (["--nodes", "2", "--load", "nothing"], "", "--load nothing: give even"),
        (["--nodes", "2", "--compare", "balance-policy"], "", "--compare balance-policy: write FLAG=VALUE,VALUE"),
    ],
)
def test_a_mistake_is_named(run, arguments: list[str], more: str, message: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        run(*arguments, flags=f"{FLAGS} --balance-policy quota {more}")


def test_plans_of_every_policy_take_time(run) -> None:
    policies = [name for name in registered() if name != "none"]
    options = ["--nodes", "2", "--load", "hot_rank", "--iterations", "2", "--plan-ms", "5"]
    flags = FLAGS.replace("--balance-overlap blockwise", "--balance-guest-slots 3")
    none, *others = run(*options, "--compare", f"balance-policy=none,{','.join(policies)}", flags=flags)
    assert "Plan" not in none["in_progress_seconds"] and [one["label"] for one in others] == policies
    for one in others:
        # Two layers on each of two stages, and one team on each
        assert one["in_progress_seconds"]["Plan"] == pytest.approx(4 * 5e-3), one["label"]
        # Ranks plan different layers at the same time, and all wait for the plans between iterations
        assert one["mean_seconds"]["Plan"] == pytest.approx(5e-3), one["label"]


def test_paired_passes_hide_exchanges(run) -> None:
    """With and without stages, and with plans of the iteration and of each microbatch."""
    flags = FLAGS.replace("--balance-overlap blockwise", "")
    options = ("--nodes", "2", "--iterations", "2", "--load", "hot_rank", "--plan-ms", "0.1")
    for layout in (flags.replace("--pipeline-model-parallel-size 2", ""), flags):
        for policy in ("", "--balance-policy quota --balance-overlap blockwise"):
            alone, paired = (
                run(*options, flags=f"{layout} {policy} {pairs}")[0]
                for pairs in ("", "--overlap-moe-expert-parallel-comm")
            )
            assert paired["seconds"] < alone["seconds"]
            assert paired["mean_seconds"]["exchange"] < 0.7 * alone["mean_seconds"]["exchange"]
            assert paired["in_progress_seconds"].keys() == alone["in_progress_seconds"].keys()


def test_paired_passes_hide_exchanges_with_a_plan_for_each_microbatch(run) -> None:
    """Their backward passes always send weights again."""
    flags = FLAGS.replace("--pipeline-model-parallel-size 2", "").replace("batch-size 64", "batch-size 48")
    flags += " --balance-policy top2 --balance-load exact"
    options = ("--nodes", "2", "--iterations", "1", "--plan-ms", "0.1")
    (alone,) = run(*options, flags=flags)
    (paired,) = run(*options, flags=f"{flags} --overlap-moe-expert-parallel-comm")
    assert paired["mean_seconds"]["exchange"] < 0.7 * alone["mean_seconds"]["exchange"]
    # Alone, each backward pass finds the weights of the last two of four layers in the ring
    more = paired["in_progress_seconds"]["Trans"] / alone["in_progress_seconds"]["Trans"]
    assert more == pytest.approx((4 + 4) / (4 + 2), rel=0.05)


def test_the_variance_counts_slots_with_rows() -> None:
    rows_HS = np.array([[2, 2, 0], [4, 0, 0], [3, 1, 0], [0, 0, 0], [100, 1, 1]])
    assert variations(rows_HS).tolist() == [0.0, 0.0, 0.25, 0.0, 1.2]


def shares(rows_S: tuple[int, int]) -> LoadSource:
    """Return loads in which a rank's two experts have these shares of its rows, from every source rank."""
    return lambda iteration, layer, team, microbatches: np.tile(rows_S, (microbatches, 8, 8))


def test_unequal_experts_of_a_rank_are_slower() -> None:
    path = ROOT / "configs/clusters/h100_measured.yaml"
    flags = FLAGS.replace("--balance-overlap blockwise", "--pipeline-model-parallel-size 1")
    config, target = simulate.configured(flags.split(), path, 8)
    job, _ = simulated_job(config, target)
    equal, unequal = (
        Simulation(job, shares(rows_S)).run(1).recorder.seconds["experts"][0] for rows_S in ((256, 256), (384, 128))
    )
    kernels = profile_of(read(path), Ranks(8, 8, 8), 2048, 8192).kernels
    assert kernels is not None and kernels.uneven
    # Eight microbatches of four layers, 512 rows from each of eight ranks, with a quarter of the squared mean
    assert unequal - equal == pytest.approx(8 * 4 * 8 * 512 * 0.25 * sum(uneven_passes(kernels, 2048, 8192)))
