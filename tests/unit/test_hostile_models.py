"""Malicious models and checkpoints: links, and sizes that exceed the files."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_balance.convert.conversion import export_model, import_model
from megatron_balance.convert.safetensors_files import Weights
from megatron_balance.convert.torch_dist import Reader
from tests import hf_models
from tests.hf_models import quiet, read_json


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model's directory, which tests only read."""
    directory = tmp_path_factory.mktemp("hf")
    hf_models.save("mixtral", directory)
    return directory


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return Weights(directory).shapes


def test_a_model_in_hugging_faces_cache(model: Path, tmp_path: Path) -> None:
    """In the cache, every file of a model is a link into `blobs`, a sibling of `snapshots`."""
    root = tmp_path / "models--a--b"
    there = tmp_path / "there"
    snapshot = root / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    shutil.copytree(model, root / "blobs")
    (root / "blobs" / "tokenizer.json").write_text("{}")
    for blob in (root / "blobs").iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    import_model(snapshot, there, quiet)
    assert not (there / "huggingface" / "tokenizer.json").is_symlink()
    export_model(there, tmp_path / "back", quiet)
    assert shapes(tmp_path / "back") == shapes(model)


@pytest.mark.parametrize("action", ["import", "export"])
def test_nothing_is_written_through_links(model: Path, tmp_path: Path, action: str) -> None:
    there = tmp_path / "there"
    target = tmp_path / "target"
    outside = tmp_path / "outside"
    import_model(model, there, quiet)
    outside.write_text("precious")
    target.mkdir()
    (target / "huggingface").mkdir()
    for name in ("config.json", "huggingface/config.json"):
        (target / name).symlink_to(outside)
    with pytest.raises(ValueError, match=f"--save-dir {target}: is not empty"):
        if action == "import":
            import_model(model, target, quiet)
        else:
            export_model(there, target, quiet)
    assert outside.read_text() == "precious"


def test_config_json_may_mean_more_than_a_checkpoint_holds(model: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    import_model(model, there, quiet)
    config = read_json(model / "config.json")
    path = there / "huggingface" / "config.json"
    for change in ({"num_local_experts": 65536}, {"num_local_experts": 65536, "num_hidden_layers": 4096}):
        path.write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match="tensors of another shape"):
            export_model(there, tmp_path / "back", quiet)


def spoil_metadata(directory: Path, change: Callable[[Any], object]) -> None:
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata.state_dict_metadata["decoder.final_layernorm.weight"])
    path.write_bytes(pickle.dumps(metadata, protocol=4))


CUT = {
    "a part is gone": (lambda entry: entry.chunks.clear(), "its parts have 0 numbers of 32"),
    "a larger tensor": (lambda entry: setattr(entry, "size", torch.Size([10**15])), "have 32 numbers of 1000000"),
    "a larger part": (
        lambda entry: (
            setattr(entry, "size", torch.Size([10**15])),
            setattr(entry.chunks[0], "sizes", torch.Size([10**15])),
        ),
        r"its part at \[0\] is not in the files",
    ),
    "a part outside": (
        lambda entry: setattr(entry.chunks[0], "sizes", torch.Size([33])),
        "has a part that is outside of it",
    ),
    "other axes": (lambda entry: setattr(entry, "size", torch.Size([4, 8])), "has a part that is outside of it"),
}


@pytest.mark.parametrize("name", CUT)
def test_sizes_that_no_file_holds(model: Path, tmp_path: Path, name: str) -> None:
    """Sizes in a checkpoint's metadata are compared with its files before memory is allocated."""
    there = tmp_path / "there"
    (change, said) = CUT[name]
    import_model(model, there, quiet)
    spoil_metadata(there / "iter_0000000", change)
    with pytest.raises(ValueError, match=rf"\.metadata: decoder.final_layernorm.weight: .*{said}|{said}"):
        Reader(there / "iter_0000000")
