"""The device in host memory behaves as CUDA does, and the checker finds errors. All other tests depend on both."""

import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.hostcuda.host_clock import HostClock
from tests.hostcuda.runs import watching


def kernels() -> None:
    """Tensors look like CUDA's, their values equal the CPU's, and views share memory."""
    host = torch.randn(8, 6, dtype=torch.float64)
    tensor = host.cuda()
    assert tensor.is_cuda and tensor.type() == "torch.cuda.DoubleTensor"
    assert torch.equal((tensor @ tensor.T).exp().cpu(), (host @ host.T).exp())
    view = tensor[2:4].view(-1)
    view.zero_()
    assert not tensor[2:4].cpu().any() and tensor[4].cpu().any()
    index = torch.tensor([1, 1, 5], device="cuda")
    assert torch.equal(tensor.index_select(0, index).cpu(), tensor.cpu()[[1, 1, 5]])
    assert torch.empty(3, device="cuda").resize_(100).numel() == 100
    assert torch.ones(2, pin_memory=True).is_pinned() and not torch.ones(2).is_pinned()
    assert torch.ones(2).pin_memory()[1:].is_pinned()
    linear = torch.nn.Linear(6, 3, device="cuda", dtype=torch.float64)
    linear(tensor).sum().backward()
    assert torch.allclose(linear.weight.grad.cpu(), tensor.cpu().sum(0).expand(3, -1))
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        np.asarray(tensor)


def autograd() -> None:
    """Backward passes run on the device's thread, on the streams of their forward passes."""
    seen: list[tuple[int, int]] = []
    tensor = torch.ones(4, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()

    def note(gradient: torch.Tensor) -> None:
        seen.append((threading.get_ident(), torch.cuda.current_stream().id))

    with torch.cuda.stream(side):
        result = tensor.exp()
        result.register_hook(note)
    torch.cuda.current_stream().wait_stream(side)
    result.sum().backward()
    ((thread, stream),) = seen
    assert thread != threading.get_ident() and stream == side.id


def wrong_devices() -> None:
    """Host memory is refused where CUDA's kernels and NCCL refuse it."""
    device = torch.ones(4, device="cuda")
    host = torch.ones(4)
    assert (device * torch.tensor(2.0)).is_cuda
    for wrong in (
        lambda: device + host,
        lambda: device.index_add_(0, torch.arange(4), device),
        lambda: torch.cat([device, host]),
        lambda: torch.where(host > 0, device, device),
        lambda: torch.nn.functional.linear(device, torch.ones(3, 4)),
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            wrong()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(host)
    with pytest.raises(ValueError, match="must be contiguous"):
        dist.all_reduce(torch.ones(4, 4, device="cuda").T)


def races() -> None:
    """Only waits order what two streams do to the same bytes."""
    side = torch.cuda.Stream()
    tensor = torch.ones(100, device="cuda")
    other = torch.ones(100, device="cuda")

    def conflicts(wait: bool, first: torch.Tensor, second: torch.Tensor) -> int:
        with watching() as checker:
            torch.cuda.synchronize()
            first.add_(1)
            if wait:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                second.sum()
            torch.cuda.synchronize()
            return len(checker.races)

    assert conflicts(False, tensor, tensor) == 1
    assert conflicts(True, tensor, tensor) == 0
    assert conflicts(False, tensor, other) == 0
    assert conflicts(False, tensor[:50], tensor[50:]) == 0
    assert conflicts(False, tensor[:51], tensor[50:]) == 1
    with watching() as checker:
        side.wait_stream(torch.cuda.current_stream())
        tensor.sum()
        with torch.cuda.stream(side):
            tensor.sum()
        assert not checker.races, "two readers"
        torch.cuda.current_stream().wait_event(torch.cuda.Event())
        with torch.cuda.stream(side):
            tensor.zero_()
        assert len(checker.races) == 1, "written while it is read"
        (conflict,) = checker.races
        assert "aten::sum reads in the default stream: test_device.races" in str(conflict)


def freed_memory() -> None:
    """Memory returns to its own stream even while other streams use it."""
    side = torch.cuda.Stream()

    def freed(keep: bool, wait: bool) -> int:
        with watching() as checker:
            tensor = torch.ones(100, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                tensor.sum()
            if keep:
                tensor.record_stream(side)
            if wait:
                torch.cuda.current_stream().wait_stream(side)
            del tensor
            return len(checker.freed_in_use)

    assert freed(keep=False, wait=False) == 1
    assert freed(keep=True, wait=False) == 0
    assert freed(keep=False, wait=True) == 0


def synchronizations() -> None:
    """The host waits for values that it reads, for blocking copies of host memory, and for synchronize calls."""
    tensor = torch.ones(4, device="cuda")
    event = torch.cuda.Event()

    def counted(action) -> list[str]:
        with watching() as checker:
            action()
            return [op for op, _ in checker.synchronizations.elements()]

    assert counted(lambda: tensor.sum().item()) == ["aten::_local_scalar_dense"]
    assert counted(lambda: bool((tensor > 0).all())) == ["aten::_local_scalar_dense"]
    assert counted(lambda: tensor.cpu()) == counted(lambda: tensor.tolist()) == ["copy device to host"]
    assert counted(lambda: torch.tensor([1.0], device="cuda")) == ["copy host to device"]
    assert counted(lambda: tensor[torch.tensor([0])]) == ["copy host to device"]
    assert counted(lambda: tensor[tensor > 0]) == ["aten::nonzero"]
    assert counted(lambda: tensor.masked_select(tensor > 0)) == ["aten::masked_select"]
    assert counted(lambda: torch.cuda.synchronize()) == ["torch.cuda.synchronize"]
    assert counted(lambda: (event.record(), event.synchronize())) == ["Event.synchronize"]
    assert counted(lambda: tensor.to("cpu", non_blocking=True)) == []
    assert counted(lambda: torch.ones(2).to("cuda", non_blocking=True)) == []
    assert counted(lambda: tensor.exp().sum()) == counted(event.query) == []


def collectives() -> None:
    """A collective runs on its own stream and uses its tensors until the calling stream waits for it."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    tensor = torch.full((4,), float(rank), device="cuda")
    with watching() as checker:
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor.tolist() == [sum(range(size))] * 4
        gathered = torch.empty(size, device="cuda")
        dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank), device="cuda"))
        assert gathered.tolist() == list(range(size))
        rows = torch.arange(rank + 1.0, device="cuda").repeat(size)
        received = torch.empty(sum(range(1, size + 1)), device="cuda")
        dist.all_to_all_single(received, rows, [*range(1, size + 1)], [rank + 1] * size)
        assert received.tolist() == [float(row) for other in range(size) for row in range(other + 1)]
        parts = [torch.empty(4, device="cuda") for _ in range(size)]
        dist.all_gather(parts, tensor)
        assert all(torch.equal(part.cpu(), tensor.cpu()) for part in parts)
        own = torch.empty(4, device="cuda")
        dist.reduce_scatter(own, [tensor.clone() for _ in range(size)])
        assert own.tolist() == [size * sum(range(size))] * 4
        peers = [(rank + 1) % size, (rank - 1) % size]
        message = torch.empty(4, device="cuda")
        operations = [dist.P2POp(dist.isend, tensor, peers[0]), dist.P2POp(dist.irecv, message, peers[1])]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(message.cpu(), tensor.cpu())
        assert checker.complaints() == []
        work = dist.all_reduce(tensor, async_op=True)
        tensor.add_(1)
        assert len(checker.races) == 1, "the collective reads what is written"
        work.wait()
    assert dist.get_backend() == "nccl"


def work() -> None:
    """The checker counts what the host queues, by kind; views and allocations are no work."""
    tensor = torch.ones(10, 4, device="cuda")
    host = torch.ones(10)

    def queued(call) -> dict[str, int]:
        with watching() as checker:
            call()
            totals = Counter()
            for (kind, _), amount in checker.work.items():
                totals[kind] += amount
        return dict(totals)

    assert queued(lambda: tensor[2:4].T.view(4, 2).split(1)) == {}
    assert queued(lambda: torch.empty(5, device="cuda")) == {}
    assert queued(lambda: tensor.exp().sum()) == {"kernels": 2}
    assert queued(lambda: tensor.clone()) == {"kernels": 1, "copied bytes": 160}
    assert queued(lambda: torch.cat([tensor, tensor])) == {"kernels": 1, "copied bytes": 320}
    assert (
        queued(lambda: host.cuda()) == queued(lambda: tensor.view(-1)[10:20].cpu()) == {"kernels": 1, "host bytes": 40}
    )
    assert queued(lambda: tensor[0, 0].item()) == {"kernels": 1, "host bytes": 4}
    received = torch.empty_like(tensor)
    peer = 1 - dist.get_rank()
    operations = [dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, received, peer)]
    assert queued(lambda: [one.wait() for one in dist.batch_isend_irecv(operations)]) == {"launches": 1, "messages": 2}
    assert queued(lambda: dist.all_reduce(tensor)) == {"launches": 1}


def host_clock() -> None:
    """A host clock stands still inside kernels, and marks waits and collectives."""
    from tests.hostcuda import torch_cuda

    clock = HostClock()
    checker = torch_cuda.CHECKER
    matrix = torch.ones(1000, 1000, device="cuda")
    torch_cuda.report_to(clock)
    try:
        thread = time.thread_time_ns()
        start = clock.read()
        product = matrix @ matrix
        since = clock.read().since(start)
        thread = time.thread_time_ns() - thread
        assert since.queued == 1 and 0 < since.ns < thread / 2, "the product takes much longer than its launch"
        start = clock.read()
        sum(number * number for number in range(100_000))
        product[3:].T.view(1000, 997)
        assert clock.read().since(start).queued == 0
        product[0, 0].item()
        dist.all_reduce(product)
        work = torch.cuda.Event()
        work.record()
        work.synchronize()
        assert [(mark.what, mark.bytes) for mark in clock.marks] == [
            ("wait", 0),
            ("allreduce_", 4_000_000),
            ("wait", 0),
        ]
        assert sorted(clock.marks, key=lambda mark: mark.at.ns) == clock.marks
    finally:
        torch_cuda.report_to(checker)


def fake_group() -> None:
    """In a fake group, an all-gather returns the answer for its size, and an all-to-all zeros."""
    import torch.testing._internal.distributed.fake_pg

    from tests.hostcuda import torch_cuda

    group = dist.new_group(backend="fake")
    if group.rank():
        return
    torch_cuda.answer_gather(np.arange(3).tobytes(), 24)
    gathered = torch.zeros(6, dtype=torch.int64, device="cuda")
    received = torch.full((5,), 7.0, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.tensor([7, 8, 9], device="cuda"), group=group)
    assert gathered.tolist() == [7, 8, 9, 0, 1, 2]
    dist.all_to_all_single(received, torch.ones(3, device="cuda"), [2, 3], [1, 2], group=group)
    assert received.tolist() == [0.0] * 5
    assert dist.get_backend(group) == "nccl"


TASKS = (kernels, autograd, wrong_devices, races, freed_memory, synchronizations)


@pytest.mark.parametrize("task", TASKS, ids=[task.__name__ for task in TASKS])
def test_the_device(device_ranks, task) -> None:
    device_ranks(2).run(task, in_one_order=False)


@pytest.mark.parametrize("task", [collectives, work, host_clock, fake_group], ids=lambda task: task.__name__)
def test_with_collectives(device_ranks, task) -> None:
    device_ranks(2).run(task)
