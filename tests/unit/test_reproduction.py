"""The papers' tables: what they name exists, each one is simulated, and its numbers are those of the simulator."""

import math

import numpy as np
import pytest

import reproduce
from reproduction import demi, flexmoe, parm, pro_prophet, schemoe, simulated
from reproduction.simulated import Job, Seconds, System, padded
from reproduction.tables import ANY, Found, Table, found, summary
from simulated_loads import Popularity, distribution, drawn_loads, even_loads

PAPERS = (pro_prophet, flexmoe, demi, schemoe, parm)

SMALL = "--num-layers 2 --num-experts 8 --expert-model-parallel-size 8 --seq-length 64 --global-batch-size 8"


def small(load: str | Popularity = "zipf:1.1") -> Job:
    """Return a job of two layers on two nodes."""
    return Job(model="moe_gpt_s", flags=f"--bf16 {SMALL}", cluster="pro_prophet_hpwnv.yaml", nodes=2, load=load)


def faked(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[tuple[Job, System]]:
    """Let every simulated job take `seconds` more than the one before, and return the jobs."""
    jobs: list[tuple[Job, System]] = []

    def fake(job: Job, system: System, iterations: int) -> Seconds:
        jobs.append((job, system))
        each = seconds + len(jobs)
        parts = {part: each + index for index, part in enumerate(simulated.LAYER_PARTS)}
        return Seconds(each, parts, dict.fromkeys(range(1, 13), each))

    for paper in PAPERS:
        monkeypatch.setattr(paper, "simulated", fake)
    return jobs


def test_padded_loads_are_those_of_the_most_popular_expert() -> None:
    plain_BDE = drawn_loads(distribution("zipf:1", 4, 8), topk=2, tokens=100)(1, 1, 0, 3)
    assert (padded(plain_BDE) == plain_BDE.max((1, 2))[:, None, None]).all()


def test_a_capacity_multiplies_rows() -> None:
    even_BDE = even_loads(4, 8, topk=2, tokens=100)(0, 1, 0, 2)
    assert (parm._system("s1", 1.2).loads(even_BDE) == 30).all()


@pytest.mark.parametrize("name", reproduce.TABLES)
def test_numbers_of_tables_are_those_of_the_simulator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other times give other numbers, next to the same ones of the paper; jobs name what exists."""
    rows: list[list[Found]] = []
    for seconds in (1.0, 20.0):
        jobs = faked(monkeypatch, seconds)
        rows.append([*reproduce.TABLES[name].rows(2)])
        for job, _ in jobs:
            assert (simulated.CONFIGS / "clusters" / job.cluster).is_file()
            assert (simulated.CONFIGS / "models" / f"{job.model}.args").is_file()
    quick, slow = rows
    assert quick and [one.paper for one in quick] == [one.paper for one in slow]
    assert all(math.isfinite(one.ours) for one in quick)
    assert any(one.ours != other.ours for one, other in zip(quick, slow, strict=True))


def test_times_are_those_of_the_simulator() -> None:
    plain, larger = (simulated.simulated(small(), System(loads=loads), 2) for loads in (System().loads, padded))
    even = simulated.simulated(small("even"), System(), 2)
    assert larger.iteration > plain.iteration > even.iteration
    assert set(plain.layers) == {1, 2}
    # The first rank's time in MoE layers is that of all ranks, because they wait for each other
    assert sum(even.layers.values()) == pytest.approx(even.moe, rel=1e-6)
    assert plain.moe < plain.iteration


def test_the_first_iteration_does_not_count() -> None:
    """Loads are even in the first iteration alone, and the mean of the others is that of uneven ones."""
    uneven = distribution("zipf:1.1", 8, 8)

    def even_at_first(iteration: int, layer: int) -> np.ndarray:
        return uneven(iteration, layer) if iteration else np.full((8, 8), 1 / 8)

    plain, changed = (simulated.simulated(small(load), System(), 3) for load in (uneven, even_at_first))
    assert changed.iteration == plain.iteration


def test_a_worker_of_demi_has_the_share_that_gives_the_papers_imbalance() -> None:
    setting = demi.SETTINGS[1]
    share_D = setting.popularity(0, demi.PENULTIMATE)[0].reshape(4, -1).sum(1)
    assert np.sqrt((share_D**2).sum()) == pytest.approx(1.3 * 0.5)
    assert setting.popularity(0, 1) == pytest.approx(1 / 16)


def test_deepspeed_keeps_what_fits_its_capacity() -> None:
    assert flexmoe.kept(1) == 1.0
    # Three quarters of the tokens go to ten of 64 experts, and those keep 10/64 at most
    assert 0.25 < flexmoe.kept(64) < 0.25 + 10 / 64 + 0.05


def test_ratios_are_over_the_nearest_number_of_the_paper() -> None:
    assert [found("r", "s", (1.0, 2.0), ours).ratio for ours in (0.5, 1.5, 3.0)] == [0.5, 1.0, 1.5]
    assert [found("r", "s", (1.0, ANY), ours).ratio for ours in (0.5, 7.0)] == [0.5, 1.0]
    assert found("r", "s", 2.0, 1.0).ratio == 0.5


def test_the_summary_counts_distances_from_the_paper() -> None:
    table = Table("P, t", lambda iterations: iter(()))
    rows = [found("r", "s", 2.0, ours) for ours in (2.0, 2.19, 2.3, 3.0)] + [found("r", "s", (1.0, ANY), 0.9)]
    *_, one, paper, everything = summary({"t": table}, {"t": rows})
    assert one == "| `t` | 4 | 2 | 3 | 1 | 1 | 0 |"
    assert [paper, everything] == [one.replace("`t`", name) for name in ("**P**", "**all**")]
