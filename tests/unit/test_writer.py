"""The processes that write a checkpoint."""

import gc
from pathlib import Path

import pytest

from megatron_balance.checkpoint import writer


@pytest.mark.parametrize("collecting", [True, False])
def test_a_writer_collects_no_garbage_of_its_rank(monkeypatch: pytest.MonkeyPatch, collecting: bool) -> None:
    monkeypatch.setattr(writer, "_write", lambda *_: gc.isenabled())
    (gc.enable if collecting else gc.disable)()
    try:
        part = writer._start(("file", "key"), [])
        assert part.path == Path("file") and gc.isenabled() == collecting
    finally:
        gc.enable()
    assert part.pipe.poll(60) and part.pipe.recv() == (None, False)
    part.process.join(60)
    assert part.process.exitcode == 0
    part.pipe.close()
