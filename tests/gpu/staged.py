"""A process group for several ranks on one GPU: copies to pinned memory, gloo between the processes, copies back.

`install` lets `nccl` mean this group. As with NCCL, each group works on streams of its own, events order these and the
current stream, and messages match by order. Unlike with NCCL, `wait` also makes the host wait until gloo is done.
Without CUDA, the same threads work on host memory, which tests everything but the streams.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

core = dist.distributed_c10d

Tensors = list[torch.Tensor]
Exchange = Callable[[Tensors, Tensors], None]
"""What gloo does with inputs and outputs in host memory; in-place operations have outputs only."""


class StagedWork(dist.Work):
    """An operation in progress."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = threading.Event()
        self.error = None
        self.event: torch.cuda.Event | None = None
        """Recorded behind the copy back."""
        self.hosts: Tensors = []
        """Pinned memory that the copies need until they are done."""

    def wait(self, timeout: Any = None) -> bool:
        self.ready.wait()
        if self.error is not None:
            raise self.error
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self.ready.is_set() and (self.event is None or self.event.query())

    def is_success(self) -> bool:
        return self.error is None

    def exception(self) -> Any:
        return self.error


class Lane:
    """A stream, and a thread that runs gloo's part in order."""

    def __init__(self, cuda: bool) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.stream = torch.cuda.Stream() if cuda else None
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.tasks.get()()

    def start(self, reads: Tensors, writes: Tensors, exchange: Exchange) -> StagedWork:
        work = StagedWork()
        if self.stream is None:
            work.hosts = [tensor.detach().clone() for tensor in (*reads, *writes)]
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream), torch.no_grad():
                # Operations in place read their outputs
                for tensor in (*reads, *writes):
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    work.hosts.append(host.copy_(tensor, non_blocking=True))
                    tensor.record_stream(self.stream)
                staged = self.stream.record_event()
        sent = work.hosts[: len(reads)]
        received = work.hosts[len(reads) :]

        def back() -> None:
            for tensor, host in zip(writes, received, strict=True):
                tensor.detach().copy_(host, non_blocking=True)

        def task() -> None:
            try:
                if self.stream is None:
                    exchange(sent, received)
                    back()
                else:
                    staged.synchronize()
                    exchange(sent, received)
                    with torch.cuda.stream(self.stream), torch.no_grad():
                        back()
                        work.event = self.stream.record_event()
            except BaseException as error:
                work.error = error
            work.ready.set()

        self.tasks.put(task)
        return work


class Staged(dist.ProcessGroup):
    """Every method of ProcessGroup that torch.distributed, megatron-core and this package call."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.lanes: dict[str, Lane] = {}

    def getBackendName(self) -> str:
        return "staged"

    # A group without C++ backends keeps no name
    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    group_name = property(lambda self: self._name)
    group_desc = property(lambda self: self._description)

    def _start(self, reads: Any, writes: Any, exchange: Exchange, key: str = "collectives") -> StagedWork:
        reads = _flat(reads)
        writes = _flat(writes)
        cuda = any(tensor.is_cuda for tensor in (*reads, *writes))
        # Tensors in host memory, of a job with a GPU, have a lane of their own
        name = key if cuda else f"{key} in host memory"
        if name not in self.lanes:
            self.lanes[name] = Lane(cuda)
        return self.lanes[name].start(reads, writes, exchange)

    def allreduce(self, tensors: Any, opts: Any = None) -> StagedWork:
        reduction = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        return self._start([], tensors, lambda _, hosts: self._reduce(hosts, reduction))

    allreduce_coalesced = allreduce

    def _reduce(self, hosts: Tensors, reduction: Any) -> None:
        average = reduction == dist.ReduceOp.AVG
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if average else reduction
        for host in hosts:
            self.gloo.allreduce([host], options).wait()
            if average:
                host.div_(self.size())

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> StagedWork:
        reduction = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def exchange(hosts: Tensors, results: Tensors) -> None:
            self._reduce(hosts, reduction)
            for host, result in zip(hosts, results, strict=True):
                result.copy_(host.view(self.size(), -1)[self.rank()].view(result.shape))

        return self._start(inputs, outputs, exchange)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> StagedWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> StagedWork:
        reduction = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def exchange(hosts: Tensors, results: Tensors) -> None:
            self._reduce(hosts, reduction)
            results[0].copy_(hosts[self.rank()])

        return self._start(inputs, outputs, exchange)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> StagedWork:
        def exchange(hosts: Tensors, results: Tensors) -> None:
            for host, result in zip(hosts, results, strict=True):
                self.gloo.allgather([list(result.view(-1).chunk(self.size()))], [host.reshape(-1)]).wait()

        return self._start(inputs, outputs, exchange)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> StagedWork:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> StagedWork:
        return self._start(inputs, outputs, lambda hosts, results: self.gloo.allgather([results], hosts).wait())

    def broadcast(self, tensors: Tensors, opts: Any = None) -> StagedWork:
        return self._start([], tensors, lambda _, hosts: self.gloo.broadcast(hosts, opts).wait())

    def gather(self, outputs: Any, inputs: Tensors, opts: Any = None) -> StagedWork:
        def exchange(hosts: Tensors, results: Tensors) -> None:
            self.gloo.gather([results] if results else [], hosts, opts).wait()

        return self._start(inputs, outputs, exchange)

    def scatter(self, outputs: Tensors, inputs: Any, opts: Any = None) -> StagedWork:
        def exchange(hosts: Tensors, results: Tensors) -> None:
            self.gloo.scatter(results, [hosts] if hosts else [], opts).wait()

        return self._start(inputs, outputs, exchange)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> StagedWork:
        def exchange(hosts: Tensors, results: Tensors) -> None:
            getattr(self.gloo, ALL_TO_ALL)(results[0], hosts[0], list(output_splits), list(input_splits)).wait()

        return self._start([input], [output], exchange)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> StagedWork:
        def exchange(hosts: Tensors, results: Tensors) -> None:
            others = [peer for peer in range(self.size()) if peer != self.rank()]
            works = [self.gloo.recv([results[peer]], peer, 9) for peer in others]
            works += [self.gloo.send([hosts[peer]], peer, 9) for peer in others]
            results[self.rank()].copy_(hosts[self.rank()])
            for work in works:
                work.wait()

        return self._start(inputs, outputs, exchange)

    # A lane per peer and direction: NCCL's messages match by order alone, and a receive must not hold up a send
    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> StagedWork:
        return self._start(tensors, [], lambda hosts, _: self.gloo.send(hosts, peer, 7).wait(), f"to {peer}")

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> StagedWork:
        return self._start([], tensors, lambda _, hosts: self.gloo.recv(hosts, peer, 7).wait(), f"from {peer}")

    def barrier(self, opts: Any = None) -> StagedWork:
        torch.cuda.synchronize()
        self.gloo.barrier().wait()
        work = StagedWork()
        work.ready.set()
        return work

    def monitored_barrier(self, *_: Any) -> None:
        self.barrier()

    def shutdown(self) -> None:
        pass

    abort = shutdown

    # torch 2.13 has other names
    all_to_all_single = alltoall_base
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


ALL_TO_ALL = "all_to_all_single" if hasattr(dist.ProcessGroupGloo, "all_to_all_single") else "alltoall_base"


def _flat(value: Any) -> Tensors:
    return [value] if isinstance(value, torch.Tensor) else [tensor for part in value for tensor in _flat(part)]


def install() -> None:
    """Let every new group of this process be a staged one that calls itself `nccl`."""
    dist.Backend.register_backend("staged", Staged, devices=["cpu", "cuda"])
    init = dist.init_process_group
    backend_of = dist.get_backend

    def start(backend: str | None = None, **options: Any) -> None:
        init("staged", **options)

    def get_backend(group: dist.ProcessGroup | None = None) -> str:
        found = backend_of(group)
        return "nccl" if found == "staged" else found

    dist.init_process_group = start
    dist.get_backend = core.get_backend = get_backend
    if torch.cuda.is_available():
        core._get_object_coll_device = lambda group=None: "cuda:0"
