"""Measuring a simulated cluster recovers its parameters under the right names."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import profile_cluster as tool
from megatron_balance.measure.measure import (
    LOAD_SHAPES,
    SIZES,
    experts_speed,
    fit_batches,
    fit_profile,
    loads,
)
from megatron_balance.measure.operations import Load, plan
from megatron_balance.measure.stopwatch import Members, middle
from megatron_balance.profile.cluster_profile import COLLECTIVES, GROUPS, LEVELS, ROUNDS, builtin, load

TOKENS = (16, 32, 64, 128)
layouts = st.integers(2, 24).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(1, ranks)))


class FakeCluster:
    """Seconds by formula: every collective among every set of members has its own alpha and beta."""

    def line(self, collective: str, members: Members) -> tuple[float, float]:
        number = 1 + COLLECTIVES.index(collective) + 10 * len(members) + sum(members)
        return 1e-6 * number, 1e-10 * number

    def __init__(self, num_ranks: int = 4, all_to_alls: Sequence[str] = (), codecs: Sequence[str] = ()) -> None:
        self.num_ranks = num_ranks
        self.all_to_alls = all_to_alls
        self.codecs = codecs

    shares = (0.5, 0.25, 0.25)
    """Three tensors of an expert."""

    def seconds(self, operation: str, members: Members, amounts: Sequence) -> list[float]:
        if operation == "messages":
            return [1e-5 * len(members) + 1e-6 * (1 + sum(members)) * count for count in amounts]
        if operation in self.all_to_alls:
            assert members == tuple(range(self.num_ranks))
            return [1e-5 * len(operation) + 1e-10 * ord(operation[0]) * size for size in amounts]
        alpha, beta = self.line(operation, members)
        if operation not in ROUNDS:
            return [alpha + beta * size for size in amounts]
        # A message takes three launches, and a start takes two
        launch = alpha / 4
        return [
            launch * (2 + batches + 3 * experts * (len(self.shares) + batches - 1)) + beta * experts * num_bytes
            for batches, experts, num_bytes in amounts
        ]

    def compute(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        forward = [1e-4 + 2e-6 * count for count in tokens]
        backward = [3e-4 + 5e-6 * count for count in tokens]
        ones_1D = np.ones((1, self.num_ranks))
        return np.array(forward)[:, None] * ones_1D, np.array(backward)[:, None] * ones_1D

    def code(self, name: str, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        return [1e-5 + 3e-7 * count for count in tokens], [2e-5 + len(name) * 1e-7 * count for count in tokens]


def test_codecs_and_all_to_alls_are_measured_by_their_names(tmp_path: Path) -> None:
    names = ["pipe", "2dh"]
    cluster = FakeCluster(codecs=["int8"], all_to_alls=names)
    profile = fit_profile(cluster, 4, 2, sizes_bytes=SIZES, tokens=TOKENS)
    profile.save(tmp_path / "profile.json")
    assert load(tmp_path / "profile.json", 4, 2) == profile
    encode, decode = profile.codec("int8")
    assert (encode.seconds_per_token, encode.overhead) == pytest.approx((3e-7, 1e-5))
    assert (decode.seconds_per_token, decode.overhead) == pytest.approx((4e-7, 2e-5))
    assert profile.codec("fp8") == builtin(4, 2, 64, 64).codec("fp8") != profile.codec("int8")
    for name in names:
        assert profile.all_to_alls[name][:2] == pytest.approx((1e-5 * len(name), 1e-10 * ord(name[0])), rel=1e-6)
    assert sum(line.split()[0] in names for line in tool.table(profile)) == 2


@given(layouts)
def test_a_known_cluster_is_recovered(layout: tuple[int, int]) -> None:
    num_ranks, node_size = layout
    cluster = FakeCluster(num_ranks)
    everyone = tuple(range(num_ranks))
    profile = fit_profile(cluster, num_ranks, node_size, sizes_bytes=SIZES, tokens=TOKENS)
    node = tuple(rank for rank in everyone if rank < node_size)
    heads = tuple(rank for rank in everyone if rank % node_size == 0)
    expected = {"intra": node, "inter": heads, "ep": everyone}
    for collective in COLLECTIVES:
        for kind, members in expected.items():
            line = profile.link(collective, kind)
            known = cluster.line(collective, members if len(members) > 1 else everyone)
            assert (line.alpha, line.beta) == pytest.approx(known, rel=1e-6)
            assert line.residual < 1e-6 and line.held_out < 1e-6
    assert profile.forward == pytest.approx((2e-6, 1e-4, 0, 0), rel=1e-6, abs=1e-9)
    assert profile.backward == pytest.approx((5e-6, 3e-4, 0, 0), rel=1e-6, abs=1e-9)
    assert profile.rates == () and profile.all_to_alls == {}
    assert profile.tensors == len(cluster.shares)
    for kind in ROUNDS:
        assert profile.starts[kind] == pytest.approx(cluster.line(kind, everyone)[0] / 2, rel=1e-6)
        for level in LEVELS:
            alpha, _ = cluster.line(kind, expected[level] if len(expected[level]) > 1 else everyone)
            # A message is sent by one rank and received by another
            assert profile.launches[kind][level][:2] == pytest.approx((alpha / 4, 3 * alpha / 8), rel=1e-6)
    for level in LEVELS:
        members = expected[level] if len(expected[level]) > 1 else everyone
        assert profile.messages[level][:2] == pytest.approx((1e-5 * len(members), 1e-6 * (1 + sum(members))), rel=1e-6)


SECONDS_T1 = 1e-4 * np.array(TOKENS)[:, None]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        pytest.param([1.0, 1.0, 1.0], (), id="equal"),
        pytest.param([1.0, 1.05, 0.96], (), id="noise"),
        pytest.param([0.5, 1.25, 1.25], (0.5, 1.25, 1.25), id="one-slow"),
        pytest.param([0.5, 1.05, 1.45], (0.5, 1.0, 1.45), id="one-near-the-mean"),
    ],
)
def test_rates_of_ranks(rates: list[float], expected: tuple[float, ...]) -> None:
    found, forward, backward = experts_speed(TOKENS, SECONDS_T1 / rates, 3 * SECONDS_T1 / rates)
    assert found == pytest.approx(expected)
    # Without rates, the slowest rank counts; with them, a rank's own time is its share of the mean's
    slowest = 1 if expected else min(rates)
    assert forward.seconds_per_token == pytest.approx(1e-4 / slowest, rel=0.02)
    assert backward.seconds_per_token == pytest.approx(3e-4 / slowest, rel=0.02)


def test_one_slow_measurement_is_no_slow_rank() -> None:
    seconds_TD = np.repeat(SECONDS_T1, 3, axis=1)
    seconds_TD[0, 1] *= 5
    assert experts_speed(TOKENS, seconds_TD, seconds_TD)[0] == ()


@given(st.integers(2, 8), st.integers(1, 4), st.sampled_from(LOAD_SHAPES))
def test_every_rank_sends_and_receives_the_same(num_ranks: int, step: int, shape: tuple[int, int]) -> None:
    num_ranks *= step
    batches, experts = shape
    found, placement = plan(num_ranks, step, Load(batches, experts, 1000))
    assert len(found.rounds) == batches
    for chunk, messages in enumerate(found.rounds):
        assert {message[3:] for message in messages} == {(chunk, batches)}
        for ends in ([one.source for one in messages], [one.target for one in messages]):
            assert sorted(ends) == sorted([*range(num_ranks)] * experts)
        assert all(placement.owner(one.expert) == one.source for one in messages)
        assert all(one.expert in placement.guests[one.target] for one in messages)
        assert len({(one.expert, one.target) for one in messages}) == placement.added_hosts == num_ranks * experts
        distances = {(one.target - one.source) % num_ranks for one in messages}
        # Different ranks, as far as there are others
        assert distances == {step * (1 + index) for index in range(min(experts, num_ranks // step - 1))}


def test_lines_of_batches_are_not_negative() -> None:
    given_loads = loads(SIZES)
    # Seconds that fall with the number of batches, as noise may make them
    seconds = [1e-3 / load.batches + 1e-9 * load.experts * load.num_bytes for load in given_loads]
    line, launch, start = fit_batches(given_loads, seconds, 2)
    assert min(line.alpha, line.beta, launch.alpha, launch.beta) >= 0
    assert start > 0 and line.residual > 0.05 and line.held_out > 0.05


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [([5], 5), ([1, 2], 1.5), ([1, 2, 90], 2), ([90, 3, 1, 2], 2.5), ([4, 3, 90, 2, 0, 1, 5, 6], 3.5)],
)
def test_the_middle_half_counts(seconds: list[float], expected: float) -> None:
    assert middle(np.array(seconds)) == expected
    assert (middle(np.stack([seconds, np.negative(seconds)], 1)) == (expected, -expected)).all()


def test_the_table_shows_every_line_and_what_stands_in() -> None:
    profile = fit_profile(FakeCluster(), 4, 4, sizes_bytes=SIZES, tokens=TOKENS)
    rows = [line.split() for line in tool.table(profile)]
    for collective in COLLECTIVES:
        found = {row[1]: row[2:] for row in rows if row[0] == collective}
        assert set(found) == set(GROUPS)
        assert found["inter"] == ["as", "ep"] and found["intra"] == ["as", "ep"]
        line = profile.link(collective)
        assert float(found["ep"][0]) == pytest.approx(line.alpha * 1e6, abs=0.1)
        assert float(found["ep"][1]) == pytest.approx(1e-9 / line.beta, rel=1e-2)
    near = next(row for row in rows if row[:2] == ["messages", "intra"])
    expected = [1e6 * number for number in profile.messages["intra"][:2]]
    assert [float(number) for number in near[2:4]] == pytest.approx(expected, abs=0.05)
    for kind in ROUNDS:
        batch = next(row for row in rows if row[:2] == [f"{kind}-batch", "inter"])
        expected = [1e6 * number for number in profile.launches[kind]["inter"][:2]]
        assert [float(number) for number in batch[2:4]] == pytest.approx(expected, abs=0.06)
        assert [f"{kind}-start", f"{1e6 * profile.starts[kind]:.1f}"] in rows
    experts = {row[0]: row[1:] for row in rows if row[0] in ("forward", "backward")}
    assert experts["forward"][:2] == ["100.0", "2"] and experts["backward"][:2] == ["300.0", "5"]


@pytest.mark.parametrize(
    ("given_flags", "added"),
    [
        ("", "--lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"),
        ("--train-samples 5 --data-path x --lr 1", "--tokenizer-type NullTokenizer --vocab-size 100"),
        ("--train-iters 5 --train-data-path x --lr 1 --tokenizer-type TikTokenizer", ""),
    ],
)
def test_only_missing_flags_get_stand_ins(given_flags: str, added: str) -> None:
    assert tool.with_stand_ins(given_flags.split()) == [*given_flags.split(), *added.split()]


SHAPE = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 --num-experts 2"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (SHAPE, "--expert-model-parallel-size 1"),
        (SHAPE.replace("--seq-length 8", ""), "--seq-length is required"),
        (f"{SHAPE} --expert-model-parallel-size 2", "must divide the number of processes"),
    ],
)
def test_mistakes_end_the_tool_before_it_joins_a_job(flags: str, message: str, tmp_path, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit, match=message):
        tool.main(["--output", str(tmp_path / "profile.json"), *flags.split()])
