"""W0 to W7: bit for bit the experts of Megatron-LM's benchmark, whatever the layout, drawn once in a step."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.workloads import forced_routing, imbalance
from megatron_balance.workloads.forced_routing import BatchPart, ForcedChoices, by_workload
from megatron_balance.workloads.synthetic import load_matrix, workload_choices

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "imbalance_workloads.json").read_text())
"""Experts of 32 tokens, and the gates of the first one (7 digits), by "name/step"; recorded from the benchmark."""

names = st.sampled_from(sorted(imbalance.WORKLOADS))
numbers = st.integers(0, 2**31)


def reference(name: str, num_experts: int, topk: int, tokens: int, seed: int, step: int) -> list[list[int]]:
    """Draw a step as the benchmark does: one torch generator, one permutation for each row."""
    seed_of_step = int(hashlib.sha256(f"{imbalance.WORKLOADS[name]}|{seed}|{step}".encode()).hexdigest()[:8], 16)
    generator = torch.Generator().manual_seed(seed_of_step)
    everyone = list(range(num_experts))
    wide = max(topk, num_experts // 4)
    first = (step // 3) * wide if name == "W6" else 0
    hot = [(first + place) % num_experts for place in range(wide)]
    rows = []
    for row in range(tokens):
        pool = {"W3": everyone[::2], "W5": everyone[num_experts // 2 :], "W4": everyone}.get(name, hot)
        calm = row % 2 or step % 4 != 3 if name == "W7" else name != "W5" and row % 4 == 0
        if name == "W0":
            rows.append([(row * topk + place) % num_experts for place in range(topk)])
            continue
        pool = everyone if calm else pool
        rows.append(sorted(pool[place] for place in torch.randperm(len(pool), generator=generator)[:topk].tolist()))
    return rows


def choices(name: str, *, num_experts: int, topk: int, tokens: int, seed: int, step: int) -> np.ndarray:
    size = {"num_experts": num_experts, "topk": topk, "total_tokens": tokens}
    return imbalance.choices(name, **size, index_T=np.arange(tokens), seed=seed, step=step)


def test_the_recorded_experts() -> None:
    size = {"num_experts": REFERENCE["experts"], "topk": REFERENCE["topk"], "tokens": REFERENCE["tokens"]}
    seen = set()
    for name, full in imbalance.WORKLOADS.items():
        for step in range(5):
            experts_TK = choices(name, **size, seed=REFERENCE["seed"], step=step)
            assert experts_TK.tolist() == REFERENCE["rows"][f"{full}/{step}"]["experts"], (name, step)
            seen.add(f"{full}/{step}")
    assert seen == REFERENCE["rows"].keys()


@settings(max_examples=60)
@given(names, st.integers(1, 5), st.sampled_from([2, 8, 10, 64]), st.integers(1, 40), numbers, st.integers(0, 100))
def test_rows_are_torchs_permutations(
    name: str, topk: int, num_experts: int, tokens: int, seed: int, step: int
) -> None:
    topk = min(topk, num_experts // 2)
    experts_TK = choices(name, num_experts=num_experts, topk=topk, tokens=tokens, seed=seed, step=step)
    assert experts_TK.tolist() == reference(name, num_experts, topk, tokens, seed, step)


@pytest.mark.parametrize("name", sorted(imbalance.WORKLOADS))
def test_any_rows_in_any_order_and_blocks_of_any_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_TK = choices(name, num_experts=8, topk=2, tokens=100, seed=3, step=7)
    monkeypatch.setattr(imbalance, "BLOCK_NUMBERS", 8 * 7)
    index_T = np.array([93, 2, 50, 51, 2, 0])
    some_TK = imbalance.choices(name, num_experts=8, topk=2, index_T=index_T, total_tokens=100, seed=3, step=7)
    assert np.array_equal(some_TK, whole_TK[index_T])


def shares(name: str, step: int = 0) -> np.ndarray:
    """Return the share of tokens of each of 32 experts, [E]."""
    counts_DE = load_matrix(name, 4, 32, 2, 1024, seed=1, step=step)
    return counts_DE.sum(0) / counts_DE.sum()


def test_what_the_workloads_are() -> None:
    assert (shares("W0") == 1 / 32).all()
    # 3/4 of the choices, and 1/4 of the rest
    for name, hot in (("W1", slice(0, 8)), ("W2", slice(0, 8)), ("W3", slice(0, 32, 2)), ("W6", slice(0, 8))):
        quarter = 0.75 + 0.25 * len(range(32)[hot]) / 32
        assert shares(name)[hot].sum() == pytest.approx(quarter, abs=0.02)
    assert shares("W6", step=3)[8:16].sum() > 0.8 and shares("W6", step=12)[:8].sum() > 0.8
    assert (shares("W5")[:16] == 0).all() and shares("W5")[16:].min() > 0
    assert shares("W4").max() < 0.05 and shares("W7", step=2).max() < 0.05
    assert shares("W7", step=3)[:8].sum() == pytest.approx(0.5 + 0.5 / 4, abs=0.02)
    assert not np.array_equal(shares("W1"), shares("W2"))


def forced(name: str, part: BatchPart, microbatches: int = 2) -> ForcedChoices:
    router = cast(Any, SimpleNamespace(layer_number=1, training=True))
    choose = by_workload(name, 5)
    return ForcedChoices(router, choose, part, step=lambda: 3, microbatches=lambda: microbatches)


@pytest.mark.parametrize("name", ["W0", "W1", "W7", "hot_experts"])
def test_two_ranks_see_the_rows_of_one(name: str) -> None:
    seen = []
    for rank in range(2):
        own = forced(name, BatchPart(seq_length=4, data_rank=rank, data_ranks=2))
        # A microbatch has two samples; consecutive microbatches go to consecutive ranks
        seen.append([own.get_replay_topk(torch.zeros(8, 16), 2)[1] for _ in range(2)])
    alone = forced(name, BatchPart(seq_length=4, data_rank=0, data_ranks=1), microbatches=4)
    expected = [alone.get_replay_topk(torch.zeros(8, 16), 2)[1] for _ in range(4)]
    for index, wanted_TK in enumerate(expected):
        assert torch.equal(seen[index % 2][index // 2], wanted_TK)
    rows_TK = workload_choices(name, num_experts=16, topk=2, tokens=range(32), total_tokens=32, seed=6, step=3)
    # The router's order is [sequence, samples], the workload's [samples, sequence]
    by_sample = [choices_TK.reshape(4, 2, 2).transpose(0, 1).reshape(8, 2) for choices_TK in expected]
    assert np.array_equal(torch.cat(by_sample), rows_TK)


def test_a_router_draws_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [3]
    drawn = []
    choose = workload_choices

    def count(*args: Any, **kwargs: Any) -> np.ndarray:
        drawn.append(kwargs["step"])
        return choose(*args, **kwargs)

    monkeypatch.setattr(forced_routing, "workload_choices", count)
    own = forced("W1", BatchPart(seq_length=4, data_rank=0, data_ranks=1))
    own.step = lambda: steps[-1]
    before = [own.get_replay_topk(torch.zeros(8, 16), 2)[1] for _ in range(4)]
    assert drawn == [3]
    assert torch.equal(before[0], before[2]) and not torch.equal(before[0], before[1])
    # An iteration begins with microbatch 0, whatever came before
    own.get_replay_topk(torch.zeros(8, 16), 2)
    steps.append(4)
    after = [own.get_replay_topk(torch.zeros(8, 16), 2)[1] for _ in range(3)]
    assert not torch.equal(after[0], before[0]) and torch.equal(after[0], after[2])
    assert drawn == [3, 4]
    fresh = forced("W1", BatchPart(seq_length=4, data_rank=0, data_ranks=1))
    fresh.step = own.step
    assert torch.equal(after[0], fresh.get_replay_topk(torch.zeros(8, 16), 2)[1])
