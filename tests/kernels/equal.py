"""Comparison of the kernels with the functions that define them, on any device."""

import torch

from megatron_balance.kernels import fit as kernel
from megatron_balance.planning.fit import PARTS, Fitted, Move, fit


def fits_equal(cases: list[dict], device: str) -> None:
    """Assert that one launch makes the moves of `fit`. Cases differ only in tokens, capacities and slots."""
    ranks = len(cases[0]["loads"])
    experts = 1 + max((expert for case in cases for row in case["experts"] for _, expert in row), default=0)
    homes = max(1, *(len(row) for case in cases for row in case["experts"]))
    pairs = torch.zeros(len(cases), ranks, homes, 2, dtype=torch.int64)
    for layer, case in enumerate(cases):
        for rank, row in enumerate(case["experts"]):
            # Any order of a rank's experts, and gaps between them
            for place, pair in enumerate(row, homes - len(row)):
                pairs[layer, rank, place] = torch.tensor(pair)
    per_rank = (torch.tensor([case[name] for case in cases]) for name in ("loads", "capacities", "slots"))
    constants = {name: cases[0][name] for name in ("node_size", "reaches_far", "fills")}
    found = kernel.fit(
        *(tensor.to(device) for tensor in (*pairs.unbind(-1), *per_rank)),
        num_experts=experts,
        far=round(cases[0]["far"] * PARTS),
        **constants,
    )
    for layer, case in enumerate(cases):
        number = int(found.number_L[layer])
        moves = [Move(*move) for move in found.moves_LMF[layer, :number].tolist()]
        expected = fit(**case)
        assert Fitted(moves, found.excess_LN[layer, : number + 1].tolist()) == expected
        assert not found.moves_LMF[layer, number:].any() and not found.excess_LN[layer, number + 1 :].any()
        quotas_ED = torch.zeros(experts, ranks, dtype=torch.int64)
        for rank, row in enumerate(case["experts"]):
            for tokens, expert in row:
                quotas_ED[expert, rank] = tokens
        for move in expected.moves:
            quotas_ED[move.expert, move.target] += move.tokens
            quotas_ED[move.expert, move.source] -= move.tokens
        assert torch.equal(found.quotas_LED[layer].cpu(), quotas_ED)


def zipf(seed: int, *, ranks: int = 64, per_rank: int = 4, layers: int = 2, **constants: object) -> list[dict]:
    """Return arguments of `fit` for loads of Zipf's law, one set per layer."""
    generator = torch.Generator().manual_seed(seed)
    cases = []
    for _ in range(layers):
        popularity = 1 / torch.arange(1, ranks * per_rank + 1, dtype=torch.float64)
        tokens = (popularity * 20000)[torch.randperm(ranks * per_rank, generator=generator)].long().tolist()
        rows = [range(rank * per_rank, (rank + 1) * per_rank) for rank in range(ranks)]
        cases.append({
            "experts": [sorted((tokens[expert], expert) for expert in row) for row in rows],
            "loads": [sum(tokens[expert] for expert in row) for row in rows],
            "capacities": [-(-sum(tokens) // ranks)] * ranks,
            "slots": [2] * ranks,
            "node_size": 8,
            "far": 4.0,
            "reaches_far": True,
            "fills": False,
            **constants,
        })  # fmt: skip
    return cases
