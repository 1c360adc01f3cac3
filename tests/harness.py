"""N gloo ranks for tests, started once for many tasks. If one rank fails, the task fails with that rank's traceback.

A task is a module-level function called on every rank inside a fresh process group. Importing torch and megatron-core
costs seconds, so the ranks are forked from one server process that has imported them, and they stay for the next task.

The harness records every task's collectives. A task fails if members of a group enter different collectives, or enter
them in an order that may deadlock NCCL. If a task times out, the harness reports where its ranks differ.
"""

import contextlib
import datetime
import gc
import itertools
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import torch
import torch.distributed as dist

from megatron_balance.job.collective_order import Recording, differences, report
from tests.issue_order import Event, OrderedCollectives, find_cycle

PRELOAD = ["tests.preload"]
DEFAULT_TIMEOUT = 900.0
"""Seconds for one task."""


ANSWER_SECONDS = 60.0
"""Time limit for a rank to report what it has entered."""

MAX_THREADS = 60
"""Ranks with more threads are replaced. Groups that a task's model refers to in some other cycle stay, and poll."""


class RankFailure(AssertionError):
    """A rank raised, died or did not finish in time; the message holds its traceback."""


class Ranks:
    """`world_size` processes that run tasks together: `Ranks(4).run(task, argument)` -> the ranks' results in order."""

    max_threads = MAX_THREADS

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._questions: list[Connection] = []
        """Pipes that ask a rank what it has entered, even while its task runs."""
        self._serial = itertools.count()

    def run(
        self, task: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT, in_one_order: bool = True
    ) -> list[Any]:
        """Call `task(*args)` on every rank and return each rank's result.

        Args:
            in_one_order: require one order of operations on all ranks; False for tasks that break it on purpose.

        Raises:
            RankFailure: the first rank that failed, with its traceback, or the first difference between the ranks'
                collectives. All ranks are then stopped; the next `run` starts new ones.
        """
        if not all(process.is_alive() for process in self._processes) or not self._processes:
            self.stop()
            self._start()
        with tempfile.TemporaryDirectory() as directory:
            rendezvous = os.path.join(directory, f"store{next(self._serial)}")
            for pipe in self._pipes:
                pipe.send((task, args, rendezvous, timeout))
            try:
                results = self._collect(task, timeout)
                for pipe in self._pipes:
                    pipe.send("end")
                recorded = self._collect(task, timeout)
                if in_one_order:
                    check_order(task.__name__, recorded)
            except BaseException:
                self.stop()
                raise
        if any(psutil.Process(process.pid).num_threads() > self.max_threads for process in self._processes):
            self.stop()
        return results

    def stop(self) -> None:
        """End all ranks at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes = []
        self._pipes = []
        self._questions = []

    def _start(self) -> None:
        for rank in range(self.world_size):
            (ours, theirs), (question, answer) = multiprocessing.Pipe(), multiprocessing.Pipe()
            # Not daemons: saving a checkpoint starts child processes
            process = self._process(rank, self.world_size, theirs, answer)
            self._start_process(process)
            theirs.close()
            answer.close()
            self._processes.append(process)
            self._pipes.append(ours)
            self._questions.append(question)

    def _process(self, *args: Any) -> BaseProcess:
        """Return a process that calls `serve(*args)` once it is started."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        return context.Process(target=serve, args=args)

    def _start_process(self, process: BaseProcess) -> None:
        process.start()

    def _collect(self, task: Callable, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(self.world_size)) - results.keys())
                raise RankFailure(
                    f"{task.__name__}: ranks {missing} did not finish in {timeout} s\n{self._first_difference()}"
                )
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    error, results[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    raise RankFailure(f"{task.__name__}: rank {rank} died") from None
                if error is not None:
                    where = f"{task.__name__}: rank {rank} of {self.world_size} failed"
                    raise RankFailure(f"{where}\n{error}\n{self._first_difference()}")
        return [results[rank] for rank in range(self.world_size)]

    def _first_difference(self) -> str | None:
        """Return where the ranks' collectives first differ while a task still runs."""
        records = {}
        for rank, question in enumerate(self._questions):
            question.send("record")
            if question.poll(ANSWER_SECONDS):
                records[rank] = question.recv()
        return report(records)


def check_order(task: str, recorded: Sequence[tuple[Recording, list[Event]]]) -> None:
    """Check that each group's members entered the same operations, and all groups' operations have one order.

    Args:
        recorded: what each rank entered, and in which order.
    """
    records = {rank: record for rank, (record, _) in enumerate(recorded)}
    for difference in differences(records):
        raise RankFailure(f"{task}: {difference}")
    messages = {key for record in records.values() for key, channel in record.items() if channel.is_message}
    around = find_cycle({rank: events for rank, (_, events) in enumerate(recorded)}, messages)
    if around:
        known = {key: channel for record in records.values() for key, channel in record.items()}
        steps = (f"group {known[key].name}, operation {number}: {known[key].at(number)}" for key, number in around)
        raise RankFailure(
            f"{task}: each of these comes before the next, and the last before the first:\n" + "\n".join(steps)
        )


def serve(rank: int, world_size: int, pipe: Connection, answer: Connection, backend: str = "gloo") -> None:
    """Run the tasks that come through `pipe`, and report through `answer` what the current one has entered."""
    torch.set_num_threads(1)
    collectives = [OrderedCollectives()]
    threading.Thread(target=_answer, args=(answer, collectives), daemon=True).start()
    # Every task ends with a garbage collection, and more would take a tenth of the tests' time
    gc.disable()
    gc.freeze()
    while True:
        try:
            task, args, rendezvous, timeout = pipe.recv()
        except EOFError:
            return
        collectives[0] = OrderedCollectives()
        try:
            with collectives[0].recorded(), _process_group(rank, world_size, rendezvous, timeout, backend):
                pipe.send((None, task(*args)))
                # A rank that ends its groups while another rank is still connecting to them breaks that rank
                pipe.recv()
            outcome = (None, (collectives[0].record(), collectives[0].events))
        except BaseException:
            outcome = (traceback.format_exc(), None)
        pipe.send(outcome)


def _answer(answer: Connection, collectives: list[OrderedCollectives]) -> None:
    """Report what the current task has entered whenever the parent process asks."""
    with contextlib.suppress(EOFError):
        while answer.recv():
            answer.send(collectives[0].record())


@contextlib.contextmanager
def _process_group(rank: int, world_size: int, rendezvous: str, timeout: float, backend: str):
    """Create the default group for one task, and leave no trace of it afterwards."""
    from megatron.core import parallel_state

    dist.init_process_group(
        backend,
        store=dist.FileStore(rendezvous, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    # A task may finish on one rank while another rank is still connecting
    dist.barrier()
    yield
    forget_auxiliary_losses()
    empty_wrappers()
    parallel_state.destroy_model_parallel()
    groups = dist.distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups] if backend == "gloo" else []
    del groups
    dist.destroy_process_group()
    # Models and groups refer to each other; a gloo group's threads end only with its last reference
    gc.collect()
    # Each group waits tens of milliseconds for its threads: end all groups concurrently
    endings = [threading.Thread(target=backends.pop) for _ in backends]
    for ending in endings:
        ending.start()
    for ending in endings:
        ending.join()
    # What is left, such as modules that the task imported, need not be scanned after the next task
    gc.freeze()


def empty_wrappers() -> None:
    """Empty every DDP wrapper, so that its model and its groups can be collected.

    The accumulators of gradients have hooks that refer to the wrapper. The collector cannot see this cycle while a
    tensor of the model (a distributed optimizer's shards, or what a dispatcher keeps) still has a gradient function.
    """
    from megatron.core.distributed import DistributedDataParallel

    for found in gc.get_objects():
        if type(found) is DistributedDataParallel:
            vars(found).clear()


def forget_auxiliary_losses() -> None:
    """Drop what megatron-core keeps of the last run's auxiliary and predictions' losses: records of their size, and a
    scale."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker.clear()

    # The first run that sets it determines its shape
    moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # 0.19; its legacy dictionary is only a copy
        moe_utils.get_moe_metrics_tracker().metrics.clear()
    else:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
