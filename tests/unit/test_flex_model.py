"""The flex dispatcher's copies of tokens: one for each rank and node with some of a token's experts."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.cost.core import carry
from megatron_balance.cost.exchange import ExchangeModel
from megatron_balance.cost.flex import FlexModel, Routing
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.network import Network
from megatron_balance.device.compiled import packed
from megatron_balance.profile.cluster_profile import ClusterProfile, Fit, Throughput, from_links

NEAR = Fit(1e-6, 1 / 100e9, 0.0, 0.0)
FAR = Fit(5e-6, 1 / 20e9, 0.0, 0.0)


def profile(ranks: int, node_size: int) -> ClusterProfile:
    line = Throughput(1e-7, 0.0, 0.0, 0.0)
    return from_links(ranks, node_size, NEAR, FAR, shared=FAR, forward=line, backward=line)


def enumerated(routing: Routing, parts: int) -> float:
    """Return the mean number of parts over all choices of groups, and of experts in them."""
    of_group = routing.experts // routing.groups
    size = routing.experts // parts
    found = []
    for groups in itertools.combinations(range(routing.groups), routing.chosen):
        candidates = [group * of_group + index for group in groups for index in range(of_group)]
        for experts in itertools.combinations(candidates, routing.topk):
            found.append(len({expert // size for expert in experts}))
    return float(np.mean(found))


@given(
    st.sampled_from([(8, 1), (8, 2), (8, 4), (12, 3), (12, 4)]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4]),
)
def test_distinct_parts_are_those_of_all_choices(shape: tuple[int, int], topk: int, chosen: int, parts: int) -> None:
    experts, groups = shape
    chosen = min(chosen, groups)
    if topk > chosen * experts // groups or experts % parts or (groups % parts and parts % groups):
        return
    routing = Routing(experts, topk, groups, chosen)
    assert routing.distinct(parts) == pytest.approx(enumerated(routing, parts))
    assert routing.copies(parts) <= 1 + 1e-12


@given(st.sampled_from([(2, 2), (4, 4), (4, 2), (8, 4), (8, 2), (4, 1)]), st.integers(1, 8))
def test_planners_and_simulator_agree_on_even_rows(shape: tuple[int, int], topk: int) -> None:
    ranks, size = shape
    model = FlexModel.of(profile(ranks, size), Routing(16, topk))
    rows_DD = np.full((ranks, ranks), 64.0 * topk)
    crossing = Network.of(profile(ranks, size)).crossing(rows_DD)
    amounts_XFD = np.ascontiguousarray(np.concatenate([crossing.near_2XD, crossing.far_2XD])[None])
    planned = carry(amounts_XFD, packed(model.links(1.0)))[3][0]
    assert model.network.byte_seconds(model.crossing(rows_DD)).sum() == pytest.approx(planned)


def test_a_token_with_all_its_experts_on_one_rank_travels_once() -> None:
    ranks = 4
    model = FlexModel.of(profile(ranks, 2), Routing(16, 4))
    tokens = 100
    rows_DD = np.zeros((ranks, ranks))
    rows_DD[0, 3] = 4 * tokens
    crossing = model.crossing(rows_DD)
    # To rank 2, which has the sender's local rank, and from there to rank 3
    assert crossing.far_2XD[:, 0].tolist() == [[tokens, 0, 0, 0], [0, 0, tokens, 0]]
    assert crossing.near_2XD[:, 0].tolist() == [[0, 0, tokens, 0], [0, 0, 0, tokens]]
    rows_DD[0, 3] = 0
    rows_DD[1, 1] = 4 * tokens
    assert model.seconds(rows_DD) == 0.0


@given(st.integers(0, 10**6))
def test_it_sends_no_more_than_an_all_to_all_between_nodes(seed: int) -> None:
    generator = np.random.default_rng(seed)
    whole = profile(8, 4)
    rows_DD = generator.integers(0, 1000, (8, 8)).astype(float)
    routing = Routing(32, 4)
    far = FlexModel.of(whole, routing).crossing(rows_DD).far_2XD
    assert far[0, 0].sum() == pytest.approx(far[1, 0].sum())
    # 1 - (1 - s)^k is at most k s, and k is slightly more than 4, because a token never chooses an expert twice
    rows = ExchangeModel.of(whole).crossing(rows_DD).far_2XD[0, 0].sum()
    assert far[0, 0].sum() <= rows * routing.draws(2) / 4
    assert 1 <= routing.draws(2) / 4 < 1.1


def test_the_cost_model_charges_copies() -> None:
    sizes = {"token_bytes": 8192.0, "param_bytes": 1e6, "grad_bytes": 1e6}
    plain = CostModel(profile(16, 4), **sizes)
    flex = CostModel(profile(16, 4), **sizes, routing=Routing(32, 8))
    loads_FBD = np.zeros((5, 1, 16))
    loads_FBD[3:] = 1000.0
    exchanging, computed = flex.work_of(loads_FBD)
    assert computed == plain.work_of(loads_FBD)[1]
    # A token's 8 experts, of 32 on 4 nodes, are on 3.72 nodes
    assert exchanging / plain.work_of(loads_FBD)[0] == pytest.approx(3.72 / 8, rel=0.01)


def test_rates_of_the_dispatcher_replace_those_of_links() -> None:
    lines = {"intra": Fit(1e-5, 2 / 100e9, 0.0, 0.0), "inter": Fit(3e-5, 1 / 20e9, 0.0, 0.0)}
    found = profile(4, 4)
    slower = ClusterProfile(**{**vars(found), "flex": lines})
    rows_DD = np.full((4, 4), 1e6)
    model = FlexModel.of(slower, Routing(16, 2))
    assert model.latency == 1e-5
    plain = FlexModel.of(found, Routing(16, 2))
    assert model.seconds(rows_DD) - 1e-5 == pytest.approx(2 * (plain.seconds(rows_DD) - plain.latency))


def test_dedup_uses_the_links_and_one_level_after_the_other() -> None:
    lines = {"intra": Fit(1e-5, 2 / 100e9, 0.0, 0.0), "inter": Fit(3e-5, 1 / 20e9, 0.0, 0.0)}
    measured = ClusterProfile(**{**vars(profile(4, 2)), "flex": lines})
    model = FlexModel.of(measured, Routing(16, 2), "dedup")
    assert model.latency == NEAR.alpha + FAR.alpha
    rows_DD = np.full((4, 4), 1e6)
    plain = FlexModel.of(profile(4, 2), Routing(16, 2))
    assert model.seconds(rows_DD) - model.latency == pytest.approx(plain.seconds(rows_DD) - plain.latency)
    assert model.returning(rows_DD) == model.seconds(rows_DD)
