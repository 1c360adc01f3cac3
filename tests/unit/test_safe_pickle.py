"""checkpoint/safe_pickle.py: megatron-core's files pass; files that would run code are refused and do not run."""

import argparse
import contextlib
import enum
import io
import json
import os
import pickle
import queue
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, strategies
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from megatron_balance.checkpoint import safe_pickle
from megatron_balance.checkpoint.loading import sharing
from megatron_balance.checkpoint.manifest import Damaged
from megatron_balance.checkpoint.safe_pickle import Foreign, check_pickles, check_places, read_common, read_metadata
from tests.unit import hostile
from tests.unit.hostile import METADATA, PROTOCOL, find, saved, text, touch

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64),
)
WITHOUT_COMMON = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
WITH_COMMON = WITHOUT_COMMON | {"common_backend": "torch", "common_backend_version": 1}
"""Contents of metadata.json."""


def save(path: Path, as_path: bool) -> None:
    """Save a checkpoint with everything that megatron-core may put into one; a task for ranks."""
    # Otherwise, the queue would be a server process
    filesystem_async._results_queue = queue.SimpleQueue()
    rank = torch.distributed.get_rank()
    ranks = torch.distributed.get_world_size()
    weights = {
        str(dtype): ShardedTensor.from_rank_offsets(f"weight.{dtype}", torch.ones(4, 3).to(dtype), (0, rank, ranks))
        for dtype in DTYPES
    }
    whole = {"scalar": torch.tensor(1.0), "image": torch.ones(1, 2, 3, 4)}
    state = {
        "weights": weights,
        "whole": [ShardedTensor.from_rank_offsets(name, value, replica_id=rank) for name, value in whole.items()],
        "stacked": ShardedTensor.from_rank_offsets("stacked", torch.ones(2), (0, rank, ranks), prepend_axis_num=1),
        "rng": ShardedObject("rng", [torch.get_rng_state(), 7, (1, "a")], (ranks,), (rank,)),
        "extra": ShardedObject("extra", io.BytesIO(b"extra state"), (ranks,), (rank,)),
        "plain": ShardedObject("plain", {"a": [1.5, None, True, b"bytes", 2**70], 3: {4}}, (1,), (0,), replica_id=rank),
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "step": torch.tensor(3)}]},
        "iteration": 20,
    }
    if hasattr(strategies, "base"):
        # As megatron-core does since 0.19
        state["common"] = ShardedObject("common_state", {"iteration": 20}, (1,), (0,), replica_id=rank)
    dist_checkpointing.save(state, path if as_path else str(path), ("torch_dist", 1))


@pytest.fixture(scope="module", params=[str, Path])
def checkpoint(ranks, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    ranks(2).run(save, directory, request.param is Path)
    return directory


@pytest.fixture
def own(checkpoint: Path, tmp_path: Path) -> Path:
    """Return a checkpoint to change, with the common.pt that megatron-core wrote before 0.19."""
    directory = Path(shutil.copytree(checkpoint, tmp_path / "own"))
    torch.save({"iteration": 20, "optimizer": {"step": torch.tensor(3)}}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(WITH_COMMON))
    return directory


def metadata_file(directory: Path, content: bytes) -> Path:
    """Write a checkpoint that consists of a .metadata, and return that file."""
    (directory / "metadata.json").write_text(json.dumps(WITHOUT_COMMON))
    path = directory / ".metadata"
    path.write_bytes(content)
    return path


def runs(read: Callable[[], object], canary: Path) -> bool:
    """Return whether `read` touches the canary in another process."""
    if (child := os.fork()) == 0:
        try:
            read()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    ran = canary.exists()
    canary.unlink(missing_ok=True)
    return ran


def test_what_megatron_core_saves_passes(checkpoint: Path) -> None:
    free = pickle.loads((checkpoint / ".metadata").read_bytes())
    check_pickles(checkpoint)
    metadata = read_metadata(checkpoint)
    assert vars(metadata) == vars(free)
    assert {type(entry) for entry in metadata.state_dict_metadata.values()} == {
        TensorStorageMetadata,
        BytesStorageMetadata,
    }
    # torch before 2.13 leaves out the plans that megatron-core adds
    assert len(getattr(metadata, "all_local_plans", [None, None])) == 2


PICKLES = hostile.CALLS | hostile.PLACES | hostile.OPCODES


@pytest.mark.parametrize("payload", PICKLES.values(), ids=PICKLES)
def test_a_hostile_metadata_is_named_and_does_not_run(tmp_path: Path, payload: hostile.Payload) -> None:
    canary = tmp_path / "canary"
    with hostile.registered():
        path = metadata_file(tmp_path, payload(canary))
        with pytest.raises(Damaged, match=r"\.metadata: is not safe to read: ") as error:
            read_metadata(tmp_path)
        assert not canary.exists()
        assert error.value.path == path
        assert runs(lambda: pickle.loads(path.read_bytes()), canary)


def reduced(callee: bytes, *arguments: bytes) -> bytes:
    return callee + b"(" + b"".join(arguments) + b"tR"


MEMBER = find("torch.distributed.checkpoint.planner", "WriteItemType")
PROPERTIES = find("torch.distributed.checkpoint.metadata", "TensorProperties")
INDEX = find("torch.distributed.checkpoint.metadata", "MetadataIndex")
SIZE = find("torch", "Size")
INERT = {
    "nothing": b"",
    "not a pickle": b"PK\x03\x04",
    "another object": saved({"state_dict_metadata": {}}),
    "another class of torch": PROTOCOL + find("torch.nn", "Linear") + b")\x81.",
    "a class instead of an instance": PROTOCOL + METADATA + b".",
    "never filled": PROTOCOL + METADATA + b")\x81.",
    "a field of another type": saved(Metadata([], None, {})),
    "an entry of another type": saved(Metadata({"weight": MetadataIndex("weight")}, None, {})),
    "a place of another type": saved(Metadata({}, None, {MetadataIndex("weight"): 1})),
    "a place of a name": saved(Metadata({}, None, {"weight": 1})),
    "an index without a name": PROTOCOL + b"}" + INDEX + b")\x81Ns.",
    "a place that decodes": saved(Metadata({}, None, {MetadataIndex("weight"): _StorageInfo("a", 0, 1, ["zstd"])})),
    "poisons a class": PROTOCOL + METADATA + b"N}" + text("__setstate__") + SIZE + b"s\x86b.",
    "poisons a member": PROTOCOL + reduced(MEMBER, b"K\x01") + b"}" + text("_value_") + b"K\x02sb.",
    "makes an enum": PROTOCOL + reduced(MEMBER, text("Other"), b"}") + b".",
    "an unknown member": PROTOCOL + reduced(MEMBER, b"K\x63") + b".",
    "calls a dtype": PROTOCOL + reduced(find("torch", "float32")) + b".",
    "properties of another kind": PROTOCOL + PROPERTIES + b")\x81(NNNNNtb.",
}


@pytest.mark.parametrize("content", INERT.values(), ids=INERT)
def test_what_is_no_metadata(tmp_path: Path, content: bytes) -> None:
    path = metadata_file(tmp_path, content)
    with pytest.raises(Damaged) as error:
        read_metadata(tmp_path)
    assert error.value.path == path
    assert len(str(error.value)) < 1000


@settings(max_examples=100)
@given(st.data())
def test_a_changed_metadata_reads_as_metadata_or_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, data: st.DataObject
) -> None:
    content = bytearray((checkpoint / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    directory = tmp_path_factory.getbasetemp()
    metadata_file(directory, content)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(safe_pickle, "check_places", lambda *_: None)
            metadata = read_metadata(directory)
    except Damaged:
        return
    # Accepted metadata equals the result of pickle, which also refuses a last frame that is too long. Metadata that
    # contains itself cannot be compared
    with contextlib.suppress(pickle.UnpicklingError, AttributeError, RecursionError):
        assert vars(metadata) == vars(pickle.loads(content))


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json", "__0_0.distcp"])
def test_a_file_is_absent(own: Path, name: str) -> None:
    (own / name).unlink()
    with pytest.raises(Damaged, match="is absent") as error:
        check_pickles(own)
    assert error.value.path == own / name


def test_a_common_may_be_absent_since_0_19_but_not_hostile(own: Path) -> None:
    (own / "metadata.json").write_text(json.dumps(WITHOUT_COMMON))
    check_pickles(own)
    (own / "common.pt").write_bytes(zipped([touch(own / "canary")]))
    with pytest.raises(Damaged, match=r"common\.pt: is not safe to read"):
        check_pickles(own)
    (own / "common.pt").unlink()
    check_pickles(own)


def zipped(obj: Any) -> bytes:
    torch.save(obj, buffer := io.BytesIO())
    return buffer.getvalue()


def legacy(obj: Any) -> bytes:
    torch.save(obj, buffer := io.BytesIO(), _use_new_zipfile_serialization=False)
    return buffer.getvalue()


OBJECTS: dict[str, hostile.Payload] = {
    "zip, nested": lambda canary: zipped({"rng": [torch.ones(2), {"state": (1, touch(canary))}]}),
    "zip, chained": lambda canary: zipped([hostile.Call(hostile.FREE_LOAD, io.BytesIO(legacy(touch(canary))))]),
    "zip, state of a tensor": lambda canary: zipped(hostile.with_attribute(torch.ones(2), "more", touch(canary))),
    "legacy, nested": lambda canary: legacy({"rng": [torch.ones(2), {"state": (1, touch(canary))}]}),
    "bare pickle": lambda canary: pickle.dumps(touch(canary), protocol=2),
}


def replace_object(directory: Path, name: str, content: bytes) -> Path:
    """Replace the content of an object, and return the file that contains it."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex(name)]
    path = directory / info.relative_path
    info.offset, info.length = path.stat().st_size, len(content)
    with open(path, "ab") as file:
        file.write(content)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


@pytest.mark.parametrize("name", ["rng/shard_1_2", "common.pt"])
@pytest.mark.parametrize("payload", OBJECTS.values(), ids=OBJECTS)
def test_a_hostile_object_is_named_and_does_not_run(
    own: Path, payload: hostile.Payload, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    canary = own / "canary"
    content = payload(canary)
    if name == "common.pt":
        path = own / name
        path.write_bytes(content)
    else:
        path = replace_object(own, name, content)
    # With this variable, megatron-core's own call reads without restrictions
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(Damaged, match=rf"{name}:? is not safe to read: UnpicklingError") as error:
        check_pickles(own)
    assert not canary.exists()
    assert error.value.path == path
    # torch.distributed.checkpoint's load planner and megatron-core read like this
    assert runs(lambda: torch.load(io.BytesIO(content), weights_only=False), canary)
    assert runs(lambda: torch.load(io.BytesIO(content), map_location="cpu"), canary)


def save_new_member(path: Path, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save arguments, one of which is a member of an enumeration that no program here has."""
    kind = enum.Enum("NewBackend", {"FAST": 2}, module=module)
    with monkeypatch.context() as there:
        there.setitem(sys.modules, module, ModuleType(module))
        sys.modules[module].NewBackend = kind
        torch.save({"args": argparse.Namespace(num_layers=3, backend=kind["FAST"])}, path)


def test_a_new_enumeration_of_megatrons_is_read_as_something_foreign(own: Path, monkeypatch) -> None:
    save_new_member(own / "common.pt", "megatron.core.new_enums", monkeypatch)
    args = read_common(own)["args"]
    assert args.num_layers == 3 and isinstance(args.backend, Foreign)
    with pytest.raises(Damaged, match=r"not safe to read: .* megatron\.core\.new_enums\.NewBackend"):
        check_pickles(own)
    # Another new class is refused with a remedy
    save_new_member(own / "common.pt", "new_enums", monkeypatch)
    with pytest.raises(Damaged, match=r"new_enums\.NewBackend .*; save the checkpoint again without it"):
        read_common(own)


def load_scalar(directory: str) -> tuple[dict[str, Any], float]:
    """Return the common state of a checkpoint and a tensor that megatron-core loads; a task for ranks."""
    common = read_common(Path(directory))
    state = {"whole": ShardedTensor.from_rank_offsets("scalar", torch.tensor(0.0))}
    return common, float(dist_checkpointing.load(state, directory, **sharing(common))["whole"])


def test_a_checkpoint_without_common_pt(own: Path, ranks) -> None:
    """megatron-core 0.19 writes such checkpoints."""
    (own / "common.pt").unlink()
    (own / "metadata.json").write_text(json.dumps(WITHOUT_COMMON))
    assert read_common(own)["iteration"] == 20
    ((common, scalar),) = ranks(1).run(load_scalar, str(own))
    assert common["iteration"] == 20 and scalar == 1.0


@pytest.mark.parametrize("name", ["../common.pt", "/etc/passwd", "", ".metadata\0"])
def test_an_object_that_lies_elsewhere(checkpoint: Path, name: str) -> None:
    metadata = read_metadata(checkpoint)
    metadata.storage_data[MetadataIndex("rng/shard_1_2")].relative_path = name
    with pytest.raises(Damaged, match=r"rng/shard_1_2 is in .*, elsewhere") as error:
        check_places(checkpoint, metadata)
    assert error.value.path == checkpoint / ".metadata"


@pytest.mark.parametrize(("offset", "length"), [(-1, 10), (0, -1), (0, 1 << 40), (1 << 62, 1)])
@pytest.mark.parametrize("name", ["rng/shard_1_2", "scalar"])
def test_an_entry_outside_its_file(checkpoint: Path, name: str, offset: int, length: int) -> None:
    metadata = read_metadata(checkpoint)
    (index,) = [index for index in metadata.storage_data if index.fqn == name]
    info = metadata.storage_data[index]
    info.offset = offset
    info.length = length
    with pytest.raises(Damaged, match=f"cannot hold {name}: bytes {offset} to") as error:
        check_places(checkpoint, metadata)
    assert error.value.path == checkpoint / info.relative_path


def test_an_object_without_a_place(own: Path) -> None:
    metadata = read_metadata(own)
    del metadata.storage_data[MetadataIndex("rng/shard_1_2")]
    (own / ".metadata").write_bytes(saved(metadata))
    with pytest.raises(Damaged, match="does not say where rng/shard_1_2 is"):
        check_pickles(own)


@pytest.mark.parametrize(
    "content",
    ["{", "[" * 60_000, "1" * 5000, "{}", json.dumps({"sharded_backend": "zarr"})],
    ids=lambda content: content[:9],
)
def test_another_metadata_json(own: Path, content: str) -> None:
    (own / "metadata.json").write_text(content)
    with pytest.raises(Damaged) as error:
        check_pickles(own)
    assert error.value.path == own / "metadata.json"
