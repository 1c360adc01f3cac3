"""Tests in parallel: with `pytest --workers 4`, one process collects the tests and forks four that run them.

All tests then share one collection, what it has imported, and one server that forks ranks.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
from collections import deque
from collections.abc import Iterable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.harness import PRELOAD

FORK = multiprocessing.get_context("fork")


class Queues:
    """Which test each worker runs next: those of one group after the other, and finally half of another's rest."""

    def __init__(self, groups: Iterable[list[int]], workers: int) -> None:
        self.groups = deque(groups)
        self.rests: list[list[int]] = [[] for _ in range(workers)]

    def next(self, worker: int) -> int | None:
        """Return the number of the worker's next test."""
        rest = self.rests[worker]
        if not rest and self.groups:
            rest += self.groups.popleft()
        elif not rest:
            longest = max(self.rests, key=len)
            kept = len(longest) // 2
            rest += longest[kept:]
            del longest[kept:]
        return rest.pop(0) if rest else None


def in_groups(items: list[pytest.Item]) -> list[list[int]]:
    """Return the numbers of tests that share fixtures, so that few workers repeat what tests share.

    All tests on the simulated device are one group, because each of its machines has a server that takes seconds to
    start. Groups that end with the run are short: the files of unit tests.
    """
    groups: dict[Path, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(item.path.parent if item.path.parent.name == "hostcuda" else item.path, []).append(number)
    return [groups[key] for key in sorted(groups, key=lambda key: (key.name != "hostcuda", key.parent.name == "unit"))]


class Workers:
    """A plugin that lets forked processes run the session's tests."""

    def __init__(self, count: int, config: pytest.Config) -> None:
        self.count = count
        self.capture = config.pluginmanager.getplugin("capturemanager")
        # The server imports what ranks need while this process collects the tests
        forkserver.set_forkserver_preload(PRELOAD)
        self.capture.resume_global_capture()
        forkserver.ensure_running()
        self.capture.suspend_global_capture()

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Show what ranks have printed if a test has failed."""
        if not session.testsfailed:
            self.capture.read_global_capture()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None
        queues = Queues(in_groups(session.items), self.count)
        directory = session.config._tmp_path_factory.getbasetemp()
        workers: dict[Connection, BaseProcess] = {}
        for number in range(self.count):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(target=work, args=(session, theirs, directory / f"worker{number}"))
            process.start()
            theirs.close()
            workers[ours] = process
        try:
            self._serve(session, queues, workers)
        finally:
            for process in workers.values():
                process.kill()
        return True

    def _serve(self, session: pytest.Session, queues: Queues, workers: dict[Connection, BaseProcess]) -> None:
        """Answer the workers' questions and pass on their reports, until all have ended."""
        numbers = {pipe: number for number, pipe in enumerate(workers)}
        last: dict[Connection, str] = {}
        died = ""
        while numbers:
            for pipe in multiprocessing.connection.wait(list(numbers)):
                try:
                    report = pipe.recv()
                except EOFError:
                    del numbers[pipe]
                    workers[pipe].join()
                    if workers[pipe].exitcode:
                        died += f"exit code {workers[pipe].exitcode} in or after {last.get(pipe)} "
                    continue
                if report is None:
                    pipe.send(queues.next(numbers[pipe]))
                else:
                    last[pipe] = self._pass_on(session.config, report)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
        if died:
            session.shouldfail = died
            raise session.Failed(died)

    def _pass_on(self, config: pytest.Config, report: dict) -> str:
        """Pass a worker's report to the other plugins, and return the test's name."""
        found = config.hook.pytest_report_from_serializable(config=config, data=report)
        config.hook.pytest_runtest_logreport(report=found)
        if found.when == "teardown":
            config.hook.pytest_runtest_logfinish(nodeid=found.nodeid, location=found.location)
        return found.nodeid


class Reporter:
    """A plugin that sends the reports of a worker's tests to the process that prints them."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config = config
        self.pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.pipe.send(self.config.hook.pytest_report_to_serializable(config=self.config, report=report))


def work(session: pytest.Session, pipe: Connection, directory: Path) -> None:
    """Run the tests whose numbers come through `pipe`."""
    config = session.config
    # Forked processes would share the files with captured output
    capture = config.pluginmanager.getplugin("capturemanager")
    capture._global_capturing = None
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(Reporter(config, pipe))
    directory.mkdir()
    config._tmp_path_factory._basetemp = directory
    # Only the process that started the server can wait for it
    forkserver._forkserver.ensure_running = lambda: None

    def following() -> pytest.Item | None:
        pipe.send(None)
        number = pipe.recv()
        return None if number is None else session.items[number]

    with contextlib.suppress(BrokenPipeError):
        item = following()
        while item is not None:
            after = following()
            config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            item = after
