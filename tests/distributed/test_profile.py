"""Measuring on real ranks: all ranks get one profile, of their own groups and experts."""

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_balance.build import profiles
from megatron_balance.build.profiles import measure_cluster
from megatron_balance.cli.arguments import parse_args
from megatron_balance.cli.checks import Machine
from megatron_balance.comm.alltoall import AllToAll
from megatron_balance.comm.hierarchical import OneDimensionalAllToAll, TwoDimensionalAllToAll
from megatron_balance.comm.pipelined import PipelinedAllToAll
from megatron_balance.job.layout import build_groups
from megatron_balance.measure import stopwatch
from megatron_balance.measure.measure import kinds_of, measure, measured_once
from megatron_balance.measure.operations import OPERATIONS, BothPasses, Load
from megatron_balance.measure.stopwatch import Members, node_groups
from megatron_balance.profile.cluster_profile import COLLECTIVES, GROUPS, LEVELS, ROUNDS, ClusterProfile, builtin, load
from tests.distributed.runs import BASE

SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16)
TOKENS = (4, 8, 16, 32)
FORWARD, BACKWARD = 2e-4, 6e-4
"""Seconds per token of the sleeping experts."""


def sleeping_experts(tokens: int) -> BothPasses:
    return lambda: time.sleep(FORWARD * tokens), lambda: time.sleep(BACKWARD * tokens)


def measured(
    ep_group: dist.ProcessGroup,
    node_size: int,
    passes: Callable[[int], BothPasses] = sleeping_experts,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> ClusterProfile:
    """Measure quickly."""
    settings |= {"passes": passes, "tokens": TOKENS, "device": torch.device("cpu"), "dtype": dtype}
    return measure(ep_group, node_size, **settings, sizes_bytes=SIZES, repeats=3)


@contextlib.contextmanager
def once() -> Iterator[None]:
    """Measure in one pass, with warm caches: the times are real, but need not be accurate."""
    with (
        mock.patch("megatron_balance.measure.measure.PASSES", 1),
        mock.patch.object(stopwatch, "EVICTING_BYTES", 1),
    ):
        yield


def measure_once() -> ClusterProfile:
    with once():
        return measured(dist.group.WORLD, 2)


def test_all_ranks_get_one_profile(ranks, tmp_path: Path) -> None:
    profile, *others = ranks(4).run(measure_once)
    assert others == [profile] * 3
    assert (profile.num_ranks, profile.node_size) == (4, 2)
    assert all(sum(profile.link(collective, kind)[:2]) > 0 for collective in COLLECTIVES for kind in GROUPS)
    assert all(sum(profile.messages[level][:2]) > 0 for level in LEVELS)
    assert set(profile.all_to_alls) == {"pipe", "2dh", "1dh"}
    assert all(line.alpha > 0 or line.beta > 0 for line in profile.all_to_alls.values())
    profile.save(tmp_path / "profile.json")
    assert load(tmp_path / "profile.json", 4, 2) == profile
    # On a busy machine, a line through a few times may be any; below, the clock is made up
    assert all(line.overhead + line.seconds_per_token > 0 for line in (profile.forward, profile.backward))


def two_groups(node_size: int) -> ClusterProfile:
    """Measure with two expert-parallel groups of two ranks, as with expert data parallelism."""
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    with once():
        return measured(pairs[dist.get_rank() // 2], node_size)


@pytest.mark.parametrize("node_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_of_all_groups_get_one_profile(ranks, node_size: int) -> None:
    profile, *others = ranks(4).run(two_groups, node_size)
    assert others == [profile] * 3
    assert (profile.num_ranks, profile.node_size) == (2, node_size)
    # There is only one kind of group
    assert all(profile.link(name, kind) == profile.link(name) for name in COLLECTIVES for kind in GROUPS)
    assert set(profile.all_to_alls) == ({"pipe"} if node_size == 1 else set())


class FakeClock:
    """A clock that advances only by the computed durations of operations."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def operation(self, seconds: float) -> Callable[[], None]:
        """Return an operation of `seconds` on the last rank and half of it on others; every third call is slow."""
        share = 1.0 if dist.get_rank() == 3 else 0.5
        calls = itertools.count()

        def run() -> None:
            self.now += seconds * share * (100 if next(calls) % 3 == 2 else 1)

        return run


def known_line(collective: str, members: Members) -> tuple[float, float]:
    number = (1 + COLLECTIVES.index(collective)) * 10 + len(members) + sum(members)
    return 1e-3 * number, 1e-6 * number


def measure_a_known_cluster() -> ClusterProfile:
    clock = FakeClock()

    def operation(collective: str, group: dist.ProcessGroup, buffer: torch.Tensor, step: int) -> Callable[[], None]:
        alpha, beta = known_line(collective, tuple(dist.get_process_group_ranks(group)))
        # All ranks together send to the other node
        assert step == (2 if group.size() == 4 else 1)
        return clock.operation(alpha + beta * buffer.nbytes)

    def transfer(
        kind: str, group: dist.ProcessGroup, step: int, load: Load, slots: Sequence[Sequence[torch.Tensor]]
    ) -> Callable[[], None]:
        assert len(slots) == 2 * load.experts
        assert {tensor.dtype for slot in slots for tensor in slot} == {
            torch.float32 if kind == "agg" else torch.bfloat16
        }
        for small, large in slots:
            assert len(large) == 3 * len(small)
            assert small.nbytes + large.nbytes == load.num_bytes
        alpha, beta = known_line(kind, tuple(dist.get_process_group_ranks(group)))
        assert step == (2 if group.size() == 4 else 1)
        # Each of two tensors is a message, and so is the second part of one that is cut
        messages = load.experts * (2 + load.batches - 1)
        return clock.operation(alpha / 2 * (load.batches + messages) + alpha + beta * load.experts * load.num_bytes)

    def exchange(member: AllToAll, buffer: torch.Tensor) -> Callable[[], None]:
        return clock.operation(len(type(member).__name__) + 1e-6 * buffer.nbytes)

    def passes(tokens: int) -> BothPasses:
        return clock.operation(1 + FORWARD * tokens), clock.operation(2 + BACKWARD * tokens)

    fakes = {collective: functools.partial(operation, collective) for collective in OPERATIONS}
    assert {*fakes, *ROUNDS} == set(COLLECTIVES)
    with (
        mock.patch.dict(stopwatch.OPERATIONS, fakes),
        mock.patch.object(stopwatch, "transfer", transfer),
        mock.patch.object(
            stopwatch, "messages", lambda group, _, steps: clock.operation(group.size() + 0.1 * len(steps))
        ),
        mock.patch.object(stopwatch, "even_exchange", exchange),
        mock.patch.object(stopwatch, "time", clock),
        mock.patch("megatron_balance.measure.measure.PASSES", 1),
    ):
        return measured(dist.group.WORLD, 2, passes, dtype=torch.bfloat16, shares=(0.25, 0.75))


def test_every_line_is_of_its_own_collective_and_group_and_of_the_slowest_rank(ranks) -> None:
    profile = ranks(4).run(measure_a_known_cluster)[0]
    for collective in COLLECTIVES:
        # Of these groups, only the whole group contains the slow rank
        for kind, members, share in (("intra", (0, 1), 0.5), ("inter", (0, 2), 0.5), ("ep", (0, 1, 2, 3), 1.0)):
            alpha, beta = known_line(collective, members)
            found = profile.link(collective, kind)
            assert found[:2] == pytest.approx((share * alpha, share * beta), rel=1e-6), (collective, kind)
    assert profile.tensors == 2
    for kind in ROUNDS:
        alpha, _ = known_line(kind, (0, 1))
        assert profile.launches[kind]["intra"][:2] == pytest.approx((0.5 * alpha / 2, 0.5 * alpha / 4), rel=1e-6)
        assert profile.starts[kind] == pytest.approx(known_line(kind, (0, 1, 2, 3))[0], rel=1e-6)
    assert {level: line[:2] for level, line in profile.messages.items()} == {
        level: pytest.approx((0.5 * 2, 0.5 * 0.1), rel=1e-6) for level in LEVELS
    }
    kinds = {"pipe": PipelinedAllToAll, "2dh": TwoDimensionalAllToAll, "1dh": OneDimensionalAllToAll}
    assert {name: line[:2] for name, line in profile.all_to_alls.items()} == {
        name: pytest.approx((len(kind.__name__), 1e-6), rel=1e-6) for name, kind in kinds.items()
    }
    # Three ranks take half of the time of the last one, so that their rates are 8/7, and that of the last one 4/7
    assert profile.rates == pytest.approx([8 / 7] * 3 + [4 / 7])
    for line, per_token, overhead in ((profile.forward, FORWARD, 1), (profile.backward, BACKWARD, 2)):
        assert line[:2] == pytest.approx((4 / 7 * per_token, 4 / 7 * overhead), rel=1e-6)


def membership() -> dict[Members, list[int]]:
    """Return this rank's groups by members, for expert-parallel groups (0, 2, 4, 6) and (1, 3, 5, 7)."""
    halves = [dist.new_group(range(start, 8, 2)) for start in (0, 1)]
    with node_groups(halves[dist.get_rank() % 2], 2) as nodes:
        found = {members: dist.get_process_group_ranks(group) for members, group in kinds_of(nodes).items()}
        for group in kinds_of(nodes).values():
            dist.all_reduce(torch.ones(1), group=group)
        return found


def test_groups_have_the_members_of_their_kinds(ranks) -> None:
    for rank, found in enumerate(ranks(8).run(membership)):
        expected = [members for members in ((0, 1), (0, 2), (0, 1, 2, 3)) if rank // 2 in members]
        assert found == {members: [2 * member + rank % 2 for member in members] for members in expected}


@contextlib.contextmanager
def measuring_quickly() -> Iterator[None]:
    """Measure with few sizes and repeats, in one pass."""
    few = mock.patch.multiple(profiles, SIZES=SIZES, REPEATS=3, measure=functools.partial(measure, repeats=3))
    with few, once():
        yield


def measure_the_runs_experts(flags: str) -> tuple[ClusterProfile, bool]:
    """Return a profile with the project's own experts, and whether the random state is unchanged."""
    config = parse_args(f"{BASE} {flags}".split(), Machine.here(4)).config
    groups = build_groups(config.transformer, seed=7)
    before = torch.get_rng_state()
    with measuring_quickly():
        profile = measure_cluster(config, groups, 2)
    return profile, torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("more", "shape", "lines"),
    [
        ("", (2, 2), [True] * 5),
        pytest.param("--sequence-parallel", (1, 2), [True] * 2 + [False] * 3, marks=pytest.mark.slow),
    ],
)
def test_shards_and_tensor_parallel_ranks_are_measured(
    ranks, tmp_path: Path, more: str, shape: tuple[int, int], lines: list[bool]
) -> None:
    flags = "--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 2"
    results = ranks(4).run(measure_the_runs_experts, f"{flags} --disable-bias-linear --bf16 --swiglu {more}")
    profile, _ = results[0]
    assert results == [(profile, True)] * 4 and profile.parallel is not None
    assert profile.parallel[:2] == shape
    assert [line is not None and line.alpha + line.beta > 0 for line in profile.parallel[2:]] == lines
    profile.save(tmp_path / "profile.json")
    assert load(tmp_path / "profile.json", 2, 2) == profile


def measured_and_read(path: Path) -> tuple[int, list[ClusterProfile]]:
    """Return how often this rank measures for two calls, and their profiles."""
    calls: list[int] = []

    def measuring() -> ClusterProfile:
        calls.append(1)
        return builtin(4, 2, 64, 128)

    profiles = [measured_once([path], 4, 2, measuring) for _ in range(2)]
    return len(calls), profiles


def test_measured_once_measures_once(ranks, tmp_path: Path) -> None:
    path = tmp_path / "not there yet" / "profile.json"
    assert ranks(4).run(measured_and_read, path) == [(1, [builtin(4, 2, 64, 128)] * 2)] * 4
    assert [entry.name for entry in path.parent.iterdir()] == ["profile.json"]


def error_of_measured_once(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        measured_once([path], 2, 2, lambda: builtin(2, 2, 64, 128))
    # The ranks are still together
    dist.all_reduce(torch.ones(1))
    return str(error.value)


def test_errors_of_profiles_are_everyones(ranks, tmp_path: Path) -> None:
    builtin(8, 2, 64, 128).save(tmp_path / "other.json")
    (tmp_path / "broken.json").write_text("{")
    for name, told in (
        ("other.json", "is for 8 expert-parallel ranks"),
        ("broken.json", "is not JSON"),
        ("broken.json/below", "--balance-profile auto: "),
    ):
        message, other = ranks(2).run(error_of_measured_once, tmp_path / name)
        assert told in message and other == message
