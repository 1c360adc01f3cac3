"""ClusterProfile: lines fitted to measurements, what follows from links, loading of files and its errors."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.profile.cluster_profile import (
    COLLECTIVES,
    GROUPS,
    LEVELS,
    VERSION,
    Fit,
    ParallelLines,
    Throughput,
    builtin,
    fit,
    from_links,
    load,
)
from megatron_balance.profile.kernel_times import Beside, Kernels, Passes

SIZES = [1e3, 1e4, 1e5, 1e6, 1e7]
PARALLEL = {"mp": 2, "esp": 2} | dict.fromkeys(ParallelLines._fields[2:])
LINE = {"alpha": 1, "beta": 1, "residual": 0, "held_out": 0}
THROUGHPUT = {"seconds_per_token": 1, "overhead": 0, "residual": 0, "held_out": 0}


@given(st.floats(0, 1e-3), st.floats(1e-12, 1e-8))
def test_a_line_is_found_again(alpha: float, beta: float) -> None:
    line = fit(SIZES, [alpha + beta * size for size in SIZES])
    assert line.alpha == pytest.approx(alpha, rel=1e-6, abs=1e-12)
    assert line.beta == pytest.approx(beta, rel=1e-6)
    assert line.residual < 1e-6 and line.held_out < 1e-6


@given(st.lists(st.floats(1e-6, 1), min_size=5, max_size=5))
def test_no_fit_is_negative(seconds: list[float]) -> None:
    line = fit(SIZES, seconds)
    assert line.alpha >= 0 and line.beta >= 0


def test_held_out_error_shows_what_the_line_misses() -> None:
    line = fit(SIZES, [1e-5 + 1e-9 * size * (2 if index % 2 else 1) for index, size in enumerate(SIZES)])
    assert line.held_out > 0.2


def test_a_line_needs_four_sizes() -> None:
    with pytest.raises(ValueError, match="four different sizes"):
        fit([1, 1, 1, 1], [1, 1, 1, 1])


# Without ranks that have the same tokens, three lines are missing
@pytest.mark.parametrize("lines", [2, 5])
def test_save_and_load(tmp_path: Path, lines: int) -> None:
    # On a loaded machine, each message of a batch takes milliseconds: too slow for a byte, but not for a message
    slow = dict.fromkeys(LEVELS, Fit(0.02, 5e-3, 0.1, 0.2))
    assumed = builtin(8, 4, 64, 128)
    profile = dataclasses.replace(
        assumed,
        rates=(0.5, *[1.0] * 6, 1.5),
        all_to_alls={"pipe": Fit(1e-5, 1e-9, 0.1, 0.2)},
        messages=slow,
        launches=dict.fromkeys(assumed.launches, slow),
        starts={"trans": 1e-5, "agg": 2e-5},
        flex={"intra": Fit(1e-6, 1e-10, 0.0, 0.0), "inter": Fit(2e-6, 3e-10, 0.0, 0.0)},
        kernels=Kernels(
            product=Passes(1e-15, 2e-15),
            half_width=150.0,
            start=5e-6,
            attention=Passes(2e-15, 5e-15),
            memory=3e12,
            launch=3e-6,
            host=1e-5,
            occupied=0.2,
            casts=115.0,
            uneven=0.1,
            half_keys=600.0,
            beside=Beside(0.5, 0.7),
        ),
        tensors=4,
        parallel=ParallelLines(2, 4, *(Fit(float(number), 5e-4, 0.0, 0.0) for number in range(lines))),
        forward=Throughput(1e-6, 2e-5, 0.01, 0.02),
        backward=Throughput(3e-6, 4e-5, 0.03, 0.04),
    )
    profile.save(tmp_path / "profile.json")
    assert load(tmp_path / "profile.json", 8, 4) == profile


def test_a_save_that_fails_leaves_the_old_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    old = builtin(8, 4, 64, 128)
    old.save(path)
    with pytest.raises(ValueError, match="JSON"):
        dataclasses.replace(old, num_ranks=float("nan")).save(path)
    assert load(path, 8, 4) == old


def test_builtin_has_every_link_and_knows_where_nodes_end() -> None:
    near = builtin(4, 4, 64, 128)
    far = builtin(8, 4, 64, 128)
    assert all(set(profile.links[kind]) == set(GROUPS) for kind in COLLECTIVES for profile in (near, far))
    assert set(near.messages) == set(far.messages) == set(LEVELS)
    assert near.link("p2p") == near.link("p2p", "intra") and far.link("p2p") == far.link("p2p", "inter")
    assert far.backward.seconds_per_token == 2 * far.forward.seconds_per_token
    assert far.rate_D.tolist() == [1.0] * 8 and far.rates == ()
    # A launch and a message are what a batch of one message takes
    for level in LEVELS:
        assert sum(far.messages[level][:2]) == pytest.approx(far.link("p2p", level).alpha)


@pytest.mark.parametrize(
    ("num_ranks", "node_size", "alpha", "beta"),
    [
        # Three messages within the node; two of three parts of the bytes cross nodes, and share an adapter
        (4, 4, 100 * 1.2, 1),
        (6, 2, 1000 * 1.3, 4 / 5 * 20),
        # Each rank sends 2/3 of its bytes to the other node
        (4, 2, 1000 * 1.1, 2 / 3 * 20),
        (3, 1, 1000 * 1.1, 20),
        # One rank of 16 is alone on its node: the fabric takes longer than the link between nodes
        (17, 16, 100 * 2.4, 15 / 16 * 1),
    ],
)
def test_an_all_to_all_takes_as_long_as_the_slower_level(
    num_ranks: int, node_size: int, alpha: float, beta: float
) -> None:
    near = Fit(100.0, 1.0, 0, 0)
    far = Fit(1000.0, 10.0, 0, 0)
    experts = Throughput(1.0, 0.0, 0, 0)
    if num_ranks == 17:
        far = Fit(50.0, 10.0, 0, 0)
    shared = Fit(1000.0, 14.0 if num_ranks == 17 else 20.0, 0, 0)
    profile = from_links(num_ranks, node_size, near, far, shared=shared, forward=experts, backward=experts)
    assert profile.link("all_to_all")[:2] == pytest.approx((alpha, beta))
    # Both directions of an all-reduce, and the slowest link that the whole group needs
    assert profile.link("all_reduce", "inter").beta == 2 * (10.0 if num_ranks > node_size else 1.0)
    assert profile.link("all_gather").beta == (shared.beta if num_ranks > node_size else 1.0)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("version", VERSION + 1, f"version {VERSION + 1}"),
        ("num_ranks", 16, "for 16 expert-parallel ranks"),
        ("node_size", 2, "nodes of 2"),
        ("links", {}, "damaged profile .links.p2p: is missing"),
        ("forward", THROUGHPUT | {"seconds_per_token": 1e30}, "1e.30 is not a number from 0 to 60 seconds"),
        ("forward", THROUGHPUT | {"speed": 1}, "forward.speed: is unknown"),
        ("forward", 10**400, "is not an object with seconds_per_token"),
        ("backward", THROUGHPUT | {"held_out": -1}, "backward.held_out: -1 is not a number from 0"),
        ("num_ranks", 8.0, "num_ranks: 8.0 is not an integer from 1"),
        ("rates", [1.0] * 7, "rates: has 7 numbers for 8 ranks"),
        ("rates", [1.0] * 7 + [0], r"rates\[7\]: 0 is not a number from 0.001 to 1000 of the mean"),
        ("rates", 3, "rates: 3 is not a list"),
        ("all_to_alls", {"a\nb": {}}, "all_to_alls.a b.alpha: is missing"),
        ("codecs", [], "codecs: a list is not an object"),
        ("parallel", {"mp": 2}, "parallel.esp: is missing"),
        ("messages", dict.fromkeys(LEVELS, LINE | {"beta": 61}), ".beta: 61 is not a number from 0 to 60 seconds"),
        ("parallel", PARALLEL | {"mp": 0}, "parallel.mp: 0 is not an integer from 1"),
        ("parallel", PARALLEL, "parallel.all_to_all: None is not an object with alpha"),
        ("tensors", None, "tensors: None is not an integer"),
        ("more", 1, "more: is unknown"),
    ],
)
def test_a_file_that_does_not_fit_says_why(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = tmp_path / "profile.json"
    builtin(8, 4, 64, 128).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=message):
        load(path, 8, 4)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--balance-profile .*cannot be read"):
        load(tmp_path / "none.json", 8, 4)
    (tmp_path / "bad.json").write_text('{"version": NaN}')
    with pytest.raises(ValueError, match="NaN is not a JSON number"):
        load(tmp_path / "bad.json", 8, 4)
