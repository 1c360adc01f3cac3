"""Everything beyond plain steps, on the device: exchanges, codecs, balancing, resuming, measuring, failing."""

import functools
import re
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_balance.device.side_stream import SideStream
from tests import layouts
from tests.distributed.checkpoints import straight_against_resumed
from tests.distributed.guarded import LIMIT, Guarded, Impatient
from tests.distributed.jobs import Job
from tests.distributed.runs import BASE, deviation, plan_apart
from tests.hostcuda import ranks as devices
from tests.hostcuda.runs import SAME_KERNELS, Watched, watched, watching, without_fused_adam
from tests.variants import variants

PLAIN = "--disable-bias-linear --swiglu --moe-router-force-workload hot_experts"
EP4 = f"{PLAIN} --expert-model-parallel-size 4 --moe-comm-node-size 2 --bf16"


def complaints(outcomes: list[Watched]) -> list[str]:
    return [complaint for outcome in outcomes for complaint in outcome.complaints]


EXCHANGES = {
    "1dh": "--moe-comm-alltoall 1dh --moe-comm-codec fp8 --moe-comm-chunks 2",
    "2dh": "--moe-comm-alltoall 2dh --moe-comm-codec int8 --moe-comm-codec-directions all --moe-comm-chunks 3",
    "dedup": "--moe-comm-alltoall dedup --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "dedup in chunks": "--moe-comm-alltoall dedup --moe-comm-codec fp8 --moe-comm-chunks 3",
    "pipe": "--moe-comm-alltoall pipe --moe-comm-codec fp8 --recompute-granularity selective --recompute-modules moe",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_and_codecs(device_ranks, curve_of, name: str) -> None:
    flags = f"{EP4} {EXCHANGES[name]} {SAME_KERNELS}"
    outcomes = device_ranks(4).run(watched, flags, 2)
    assert not complaints(outcomes)
    assert outcomes[0].curve == curve_of(flags, 2, 4, without_fused_adam)


GATHERED = layouts.layout_of(*layouts.REPLICAS, *layouts.GATHER, "top2", "blockwise")


def test_layers_compute_with_weights_that_are_there(device_ranks, curve_of, profiles: dict[int, Path]) -> None:
    """Replicas plan independently and all-gather parameters in several buckets while experts' weights are sent."""
    flags = f"{layouts.flags_of(GATHERED)} --balance-profile {profiles[2]} {SAME_KERNELS}"
    outcomes = device_ranks(4).run(watched, flags, 3, plan_apart)
    assert not complaints(outcomes)
    assert all(outcome.acted for outcome in outcomes)
    assert outcomes[0].curve == curve_of(flags, 3, 4, plan_apart)


def wait_for_nothing(flags: str) -> Watched:
    """Watch a run whose side streams do not wait for the current stream."""

    def start(side_stream: SideStream, *args: object) -> object:
        with mock.patch.object(side_stream._stream, "wait_stream", lambda stream: None):
            return begin(side_stream, *args)

    begin = SideStream.start
    with mock.patch.object(SideStream, "start", start):
        return watched(flags, 3)


def leave(kept: bool) -> list[str]:
    """Start an exchange in two stages, drop it with its rows, and return the checker's complaints."""
    from megatron_balance.comm.hierarchical import TwoDimensionalAllToAll
    from megatron_balance.job.groups import new_node_groups

    record = torch.Tensor.record_stream if kept else (lambda tensor, stream: None)
    exchange = TwoDimensionalAllToAll(new_node_groups(dist.group.WORLD, 2))
    with mock.patch.object(torch.Tensor, "record_stream", record), watching() as checker:
        exchange.start(torch.ones(8, 4, device="cuda"), torch.full((4, 4), 2))
        return checker.complaints()


def test_a_lane_that_does_not_wait_is_noticed(device_ranks, profiles: dict[int, Path]) -> None:
    flags = f"{PLAIN} --expert-model-parallel-size 2 --bf16 --balance-policy top2 --balance-overlap blockwise"
    flags += f" --balance-profile {profiles[2]}"
    ranks = device_ranks(2)
    assert not complaints(ranks.run(watched, flags, 3))
    assert any(text.startswith("race") for text in complaints(ranks.run(wait_for_nothing, flags)))


@pytest.mark.parametrize("kept", [True, False])
def test_memory_that_nobody_keeps_is_noticed(device_ranks, kept: bool) -> None:
    """An error may drop an exchange that nothing has waited for."""
    for found in device_ranks(4).run(leave, kept):
        assert kept == (not found) and all(text.startswith("freed in use") for text in found)


MACHINES = {
    "bare": "",
    "apex": "--transformer-impl local --normalization RMSNorm",
    "te": "--moe-permute-fusion --moe-grouped-gemm --recompute-granularity selective --recompute-modules moe "
    "--cross-entropy-loss-fusion --context-parallel-size 2",
    "te and apex": "--moe-permute-fusion --moe-expert-gemm te --moe-comm-chunks 2 --moe-router-dtype fp32 "
    "--reset-attention-mask",
}
"""Machine -> extra flags; all fusions that are on by default stay on."""


@pytest.mark.parametrize("machine", variants([*MACHINES], quick=("te and apex",)))
def test_machines_with_their_defaults(device_ranks, curve_of, machine: str) -> None:
    """A run with all fusions follows the run on a CPU, which has none."""
    flags = f"{PLAIN} --expert-model-parallel-size 2 --bf16 {MACHINES[machine]}"
    outcomes = device_ranks(2, machine).run(watched, flags, 3)
    assert not complaints(outcomes)
    without = re.sub("--moe-permute-fusion|--moe-expert-gemm te", "", flags)
    assert deviation(outcomes[0].curve, curve_of(without, 3, 2)) <= 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--mtp-num-layers 1 --position-embedding-type rope"])
def test_packed_documents_are_those_of_a_mask(device_ranks, curve_of, more: str) -> None:
    """With Transformer Engine, documents that are kept apart are packed; on a CPU, a mask hides the other documents."""
    flags = f"{PLAIN} --seq-length 64 --micro-batch-size 4 --init-method-std 0.2 --reset-position-ids {more}"
    outcomes = device_ranks(2, "te and apex").run(watched, f"{flags} --reset-attention-mask", 3)
    assert not complaints(outcomes)
    assert deviation(outcomes[0].curve, curve_of(f"{flags} --reset-attention-mask", 3, 2)) <= 1e-5
    assert deviation(outcomes[0].curve, curve_of(flags, 3, 2)) > 1e-4


RESUMED = {
    "distributed": "--bf16 --use-distributed-optimizer",
    "float32": "",
    "bf16": "--bf16",
    "precision-aware": "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer",
}


@pytest.mark.parametrize("flags", variants(RESUMED, quick=("distributed",)))
def test_a_resumed_run_is_the_straight_run(device_ranks, tmp_path: Path, flags: str) -> None:
    """The optimizer is Transformer Engine's, which counts steps in its groups."""
    flags = f"{PLAIN} --num-layers 1 --expert-model-parallel-size 2 {flags}"
    assert device_ranks(2, "te and apex").run(straight_against_resumed, flags, str(tmp_path), 4) == [[]] * 2


def measure_quickly(rank: int) -> None:
    """Measure few and small messages in one pass: test_profile.py checks what is measured."""
    from megatron_balance.build import profiles
    from megatron_balance.measure import measure

    profiles.LARGE_SIZES = profiles.SIZES[:4]
    profiles.REPEATS = 3
    measure.PASSES = 1


def test_the_entry_point(device: None, tmp_path: Path) -> None:
    """A measured profile, Transfer, validation, files of all kinds, a save, and a resumed run."""
    flags = (
        f"{BASE} {PLAIN} --expert-model-parallel-size 2 --num-layers 1 --bf16 --train-iters 4 --log-interval 1 "
        f"--eval-interval 2 --eval-iters 1 --split 90,5,5 --distributed-timeout-minutes 1 "
        f"--balance-policy top2 --balance-overlap blockwise --balance-ownership transfer --balance-explain "
        f"--balance-log-dir {tmp_path / 'balance'} --balance-timeline {tmp_path / 'timeline.json'} "
    )
    directory = f"--save {tmp_path / 'saved'} --load {tmp_path / 'saved'}"
    start = functools.partial(devices.start, machine="te and apex")
    for more in ("--balance-profile auto --exit-interval 2", "--balance-profile builtin"):
        ended = Job(2, f"{flags} {directory} {more}", tmp_path / "log", measure_quickly, start).wait()
        assert ended.codes == [0, 0], ended.text
    assert "validation loss at iteration 4" in ended.text and "successfully loaded checkpoint" in ended.text


def oversleep(gradient: torch.Tensor) -> None:
    """Sleep in a hook, on the device's thread."""
    assert threading.current_thread() is not threading.main_thread()
    time.sleep(3600)


def sleep_in_a_backward_pass(rank: int) -> None:
    """Make rank 1 sleep in one backward pass."""
    from megatron_balance.flow.layer import BalancedMoELayer

    forward = BalancedMoELayer.forward
    count = 0

    def sleeping(layer: BalancedMoELayer, hidden_states: torch.Tensor, *args: object, **options: object):
        nonlocal count
        count += 1
        output, bias = forward(layer, hidden_states, *args, **options)
        if count == 20 and rank == 1:
            output.register_hook(oversleep)
        return output, bias

    BalancedMoELayer.forward = sleeping


def test_a_rank_that_hangs_in_a_backward_pass_is_named(device: None, tmp_path: Path) -> None:
    """On the device, backward passes and their waits run on a thread of autograd."""
    flags = (
        f"{BASE} {PLAIN} --expert-model-parallel-size 2 --train-iters 100000 --log-interval 1 "
        "--distributed-timeout-minutes 10"
    )
    job = Guarded(2, flags, tmp_path, Impatient(6.0, sleep_in_a_backward_pass, calls=8), devices.start)
    job.await_iteration(4)
    assert job.join([0, 1], LIMIT) == [1, 1]
    for rank in (0, 1):
        assert re.match(
            r"rank 1 stalled: no progress for .*, not in a collective but in oversleep \(", job.verdict(rank)
        )
