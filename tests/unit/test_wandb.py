"""Numbers in Weights & Biases, which is offline: what its own file holds."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_balance.observe.wandb_run import WandbRun

pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="needs the package wandb")

BLOCK = 32768
FILE_HEADER = 7
HEADER = 7
FULL = 1
LAST = 4


def records(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file, which is a log in LevelDB's format after a header of its own."""
    from wandb.proto import wandb_internal_pb2

    content = path.read_bytes()
    at = FILE_HEADER
    whole = b""
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def history(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the settings of a run, and its numbers by step, without those of wandb itself."""
    settings = {}
    rows = []
    for record in records(path):
        if record.HasField("run"):
            settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.HasField("history"):
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
    return settings, rows


@pytest.mark.parametrize("failed", [False, True])
def test_a_run(failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = WandbRun("moe", name="small", entity=None, directory=tmp_path / "new", settings={"num_layers": 2})
    run.add_scalars({"lm loss": 2.5}, 1, 8)
    run.add_scalars({"moe/z_loss_layer_1": 0.5}, 1)
    run.add_scalars({"lm loss validation": 3.5}, 1)
    run.add_scalars({"lm loss": 1.5}, 2)
    run.close(failed)
    (path,) = tmp_path.glob("new/wandb/offline-run-*/run-*.wandb")
    settings, rows = history(path)
    assert settings["num_layers"] == 2
    first = {"lm loss": 2.5, "samples vs steps": 8, "moe/z_loss_layer_1": 0.5, "lm loss validation": 3.5}
    assert rows == [first, {"lm loss": 1.5}]
    assert [record.exit.exit_code for record in records(path) if record.HasField("exit")] == [int(failed)]


def test_an_invalid_variable_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "somewhere")
    with pytest.raises(ValueError, match=r"^--wandb-project moe: .*'somewhere'.*; correct that, .*WANDB_MODE=offline$"):
        WandbRun("moe", name=None, entity=None, directory=tmp_path, settings={})
