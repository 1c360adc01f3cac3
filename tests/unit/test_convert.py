"""Hugging Face models to checkpoints and back, bit for bit, and error messages for files that are not models."""

import dataclasses
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import convert_checkpoint
from megatron_balance.app.dry_run import imagined_run
from megatron_balance.checkpoint.directory import CheckpointDirectory
from megatron_balance.checkpoint.lease import Lease, LeaseRecord, Owner
from megatron_balance.checkpoint.manifest import read as read_manifest
from megatron_balance.convert.conversion import checked_model, export_model, import_model
from megatron_balance.convert.model import Model
from megatron_balance.convert.pieces import HALVES, Piece, query_key_value
from megatron_balance.convert.safetensors_files import INDEX, SINGLE, Weights, write
from megatron_balance.convert.settings import run_config
from megatron_balance.job.launcher import STARTED, process_field
from tests import hf_models
from tests.disks import small_disk
from tests.hf_models import change, quiet, read_json, reconfigure
from tests.unit.published_models import PUBLISHED
from tests.variants import variants

PREDICTED = "num_nextn_predict_layers"

TOOL = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Callable[[str], Path]:
    """Return directories of models; each is created once, and tests only read it."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("hf")
            hf_models.save(name, made[name])
        return made[name]

    return of


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    weights = Weights(directory)
    return {name: weights.read(name) for name in weights.shapes}


@pytest.mark.parametrize("name", hf_models.CONFIGS)
def test_there_and_back(models, tmp_path, name: str) -> None:
    source = tmp_path / "source"
    there = tmp_path / "there"
    back = tmp_path / "back"
    shutil.copytree(models(name), source)
    (source / "tokenizer.json").write_text("{}")
    expected = tensors(source)
    config = read_json(source / "config.json")
    import_model(source, there, quiet)
    shutil.rmtree(source)
    export_model(there, back, quiet)
    found = tensors(back)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) and found[key].dtype == expected[key].dtype for key in expected)
    assert read_json(back / "config.json") == config | ({PREDICTED: 0} if PREDICTED in config else {})
    assert (back / "tokenizer.json").read_text() == "{}"


def test_half_precision_and_shards(tmp_path) -> None:
    hf_models.save("mixtral", tmp_path / "source", shard_bytes=50_000)
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    for path in (tmp_path / "source").glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, path)
    import_model(tmp_path / "source", tmp_path / "there", quiet)
    export_model(tmp_path / "there", tmp_path / "back", quiet, step=0)
    expected = tensors(tmp_path / "source")
    found = tensors(tmp_path / "back")
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype is torch.bfloat16 for name in expected)


@given(groups=st.integers(1, 4), each=st.integers(1, 4), channels=st.integers(1, 4), tail=st.sampled_from([(), (3,)]))
def test_joins_are_undone(groups: int, each: int, channels: int, tail: tuple[int, ...]) -> None:
    join = query_key_value(groups * each, groups, channels)
    rows = groups * (each + 2) * channels
    for one, size in ((join, (rows, *tail)), (HALVES, (rows * 2, *tail))):
        sources = ("a", "b", "c")[: 3 if one is join else 2]
        parts = [torch.randn(part) for part in Piece("key", size, (), sources, join=one).source_sizes.values()]
        whole = one.join(parts)
        assert tuple(whole.shape) == size
        assert all(torch.equal(left, right) for left, right in zip(parts, one.split(whole), strict=True))


def test_groups_of_queries_stay_with_their_keys_and_values() -> None:
    queries = torch.arange(4.0)
    keys = torch.arange(10.0, 12)
    values = torch.arange(20.0, 22)
    assert query_key_value(4, 2, 1).join([queries, keys, values]).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


NORM = "model.norm.weight"
GATE = "model.layers.1.block_sparse_moe.gate.weight"


def truncate(directory: Path) -> None:
    path = directory / SINGLE
    path.write_bytes(path.read_bytes()[:-10])


def list_another(directory: Path) -> None:
    names = [*load_file(directory / SINGLE), "model.other"]
    (directory / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE)}))


def list_elsewhere(directory: Path) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": {NORM: "../secret.safetensors"}}))


def unset(name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        config = read_json(directory / "config.json")
        del config[name]
        (directory / "config.json").write_text(json.dumps(config))

    return change


def move_weights(directory: Path) -> None:
    (directory / SINGLE).rename(directory.parent / "elsewhere")
    (directory / SINGLE).symlink_to(directory.parent / "elsewhere")


SPOILED = {
    "no weights": (lambda directory: (directory / SINGLE).unlink(), [SINGLE, "missing"]),
    "missing tensor": (lambda directory: change(directory, lambda all: all.pop(NORM)), ["1 tensors missing", NORM]),
    "extra tensor": (
        lambda directory: change(directory, lambda all: all.update(other=torch.ones(1))),
        ["1 tensors not part of such a model: other"],
    ),
    "wrong shape": (
        lambda directory: change(directory, lambda all: all.update({NORM: torch.ones(31)})),
        [NORM, "(31,) instead of (32,)"],
    ),
    "integers": (
        lambda directory: change(directory, lambda all: all.update({NORM: torch.ones(32, dtype=torch.int32)})),
        [NORM, "I32", "BF16"],
    ),
    "not a number": (
        lambda directory: change(directory, lambda all: all[GATE].view(-1)[5:6].fill_(float("nan"))),
        [GATE, "not finite"],
    ),
    "truncated": (truncate, [SINGLE, "damaged"]),
    "missing shard": (list_another, ["model.other is not in", SINGLE]),
    "elsewhere": (list_elsewhere, [INDEX, "files in the same directory"]),
    "no config": (lambda directory: (directory / "config.json").write_text("{"), ["config.json", "is not JSON"]),
    "twice": (
        lambda directory: (directory / "config.json").write_text('{"hidden_size": 1, "hidden_size": 2}'),
        ["config.json: has the key 'hidden_size' twice"],
    ),
    "no size": (unset("max_position_embeddings"), ["config.json: max_position_embeddings: is missing"]),
    "no model": (lambda directory: reconfigure(directory, model_type=["mixtral"]), ["model_type a list: not known"]),
    "many experts": (
        lambda directory: reconfigure(directory, num_local_experts=10**9),
        ["num_local_experts: 1000000000 is not an integer"],
    ),
    "many layers": (
        lambda directory: reconfigure(directory, num_hidden_layers=10**9),
        ["num_hidden_layers: 1000000000 is not an integer from 1"],
    ),
    "more of both": (
        lambda directory: reconfigure(directory, num_hidden_layers=4096, num_local_experts=65536),
        ["more than 20 tensors missing: model.layers.0.block_sparse_moe.experts.10.w1.weight"],
    ),
    "too many choices": (lambda directory: reconfigure(directory, num_experts_per_tok=9), ["--moe-router-topk 9"]),
    "a link out": (
        lambda directory: (directory / "tokenizer_x").symlink_to("/etc/passwd"),
        ["tokenizer_x", "/etc/passwd"],
    ),
    "a FIFO": (lambda directory: os.mkfifo(directory / "vocab.json"), ["vocab.json: is not a regular file"]),
    "weights elsewhere": (move_weights, [SINGLE, "outside of the directory"]),
    "a link to nothing": (lambda directory: (directory / INDEX).symlink_to("nothing"), ["nothing: cannot be read"]),
    "a large header": (
        lambda directory: (directory / SINGLE).write_bytes((1 << 40).to_bytes(8, "little") + b"{}"),
        [SINGLE, "damaged: ", "header too large"],
    ),
    "unknown": (lambda directory: reconfigure(directory, model_type="llama"), ["'llama'", "choose from deepseek_v2"]),
    "scaled": (
        lambda directory: reconfigure(directory, rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        ["rope_parameters.rope_type 'linear': only 'default' or 'yarn'"],
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_models_leave_nothing(models, tmp_path, name: str) -> None:
    spoil, said = SPOILED[name]
    source = tmp_path / "source"
    target = tmp_path / "target"
    shutil.copytree(models("mixtral"), source)
    spoil(source)
    with pytest.raises(ValueError) as refused:
        import_model(source, target, quiet)
    assert all(text in str(refused.value) for text in said), refused.value
    assert not target.exists()


def test_tensors_that_are_to_be_left_out(models, tmp_path) -> None:
    source = tmp_path / "source"
    shutil.copytree(models("mixtral"), source)
    change(source, lambda all: all.update({"model.layers.9.a": torch.ones(1), "model.layers.9.b": torch.ones(1)}))
    with pytest.raises(ValueError, match=r"--without model.layers.8.: no tensor"):
        import_model(source, tmp_path / "there", quiet, ["model.layers.9.", "model.layers.8."])
    with pytest.raises(ValueError, match=f"1 tensors missing: {NORM}"):
        import_model(source, tmp_path / "there", quiet, ["model.layers.9.", NORM])
    import_model(source, tmp_path / "there", quiet, ["model.layers.9."])
    export_model(tmp_path / "there", tmp_path / "back", quiet)
    assert tensors(tmp_path / "back").keys() == tensors(models("mixtral")).keys()


def test_ernies_multi_token_prediction_is_left_out(models, tmp_path) -> None:
    source = tmp_path / "source"
    said = list[str]()
    shutil.copytree(models("ernie4_5_moe"), source)
    change(source, lambda all: all.update({"model.mtp_linear_proj.0.weight": torch.ones(2)}))
    assert {*checked_model(source, log=said.append)[1].tensors} == {*tensors(models("ernie4_5_moe"))}
    assert said == ["1 tensors of multi-token prediction are left out: model.mtp_*\n"]


def test_layers_of_multi_token_prediction_are_left_out_with_a_notice(models, tmp_path) -> None:
    source = tmp_path / "source"
    said = list[str]()
    shutil.copytree(models("deepseek_v3"), source)
    reconfigure(source, num_nextn_predict_layers=1)
    further = {"model.layers.3.eh_proj.weight": torch.ones(2), "model.layers.3.mlp.gate.weight": torch.ones(2)}
    change(source, lambda all: all.update(further))
    import_model(source, tmp_path / "there", said.append)
    assert said[0] == "2 tensors of multi-token prediction are left out: model.layers.3.*\n"
    export_model(tmp_path / "there", tmp_path / "back", quiet)
    assert tensors(tmp_path / "back").keys() == tensors(models("deepseek_v3")).keys()
    assert read_json(tmp_path / "back" / "config.json") == read_json(source / "config.json") | {PREDICTED: 0}
    change(source, lambda all: all.update({"model.layers.4.eh_proj.weight": torch.ones(2)}))
    with pytest.raises(ValueError, match=r"not part of such a model: model.layers.4"):
        import_model(source, tmp_path / "again", quiet)


class Hostile:
    def __reduce__(self) -> tuple:
        return (pytest.fail, ("the pickle was opened",))


def test_other_pickles_in_the_directory_are_never_opened(models, tmp_path) -> None:
    source = tmp_path / "source"
    shutil.copytree(models("mixtral"), source)
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile()))
    import_model(source, tmp_path / "there", quiet)
    export_model(tmp_path / "there", tmp_path / "back", quiet)
    assert not (tmp_path / "back" / "pytorch_model.bin").exists()


def test_damaged_checkpoints_are_not_exported(models, tmp_path) -> None:
    there = tmp_path / "there"
    back = tmp_path / "back"
    import_model(models("mixtral"), there, quiet)
    for name, spoiled in ((".metadata", pickle.dumps(Hostile())), ("__1_0.distcp", b"")):
        path = there / "iter_0000000" / name
        content = path.read_bytes()
        path.write_bytes(spoiled)
        with pytest.raises(ValueError, match=name):
            export_model(there, back, quiet)
        assert not back.exists()
        path.write_bytes(content)
    (there / "huggingface" / "config.json").unlink()
    with pytest.raises(ValueError, match="--hf-dir"):
        export_model(there, back, quiet)


@pytest.mark.parametrize("kilobytes", range(8, 200, 48))
def test_a_full_disk_is_named_and_nothing_is_left(models, tmp_path, kilobytes: int) -> None:
    """The disk may become full at any point of an import or an export."""
    there = tmp_path / "there"
    import_model(models("mixtral"), there, quiet)
    with small_disk(tmp_path / "disk", kilobytes) as disk:
        for convert in (lambda target: import_model(models("mixtral"), target, quiet),
                        lambda target: export_model(there, target, quiet)):  # fmt: skip
            with pytest.raises(OSError) as refused:
                convert(disk / "target")
            assert "No space left on device" in str(refused.value) and f"'{disk}/target/" in str(refused.value)
            assert list(disk.iterdir()) == []


def test_an_import_removes_what_a_killed_one_has_left(models, tmp_path) -> None:
    left = tmp_path / "iter_0000000.saving-20247140"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half")
    said: list[str] = []
    import_model(models("mixtral"), tmp_path, said.append)
    assert said[0] == f"{left}: not finished (saving); removed" and not left.exists()
    assert CheckpointDirectory(tmp_path).iterations() == [0]


def test_a_directory_that_somebody_saves_to_is_left_alone(models, tmp_path, capsys) -> None:
    # Another process that runs is this one's parent
    parent = os.getppid()
    owner = dataclasses.replace(Owner.here("first"), process=parent, started=int(process_field(parent, STARTED)))
    holder = Lease(tmp_path, owner, "")
    holder.acquire(quiet)
    arguments = ["import", "--load-dir", str(models("mixtral")), "--save-dir", str(tmp_path)]
    assert convert_checkpoint.main(arguments) == 1
    said = f"error: --save-dir {tmp_path}: another run saves there (run first, process {parent}"
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["lease.000001"]
    holder.check()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("import --load-dir absent --save-dir there", "--load-dir absent: is no directory"),
        ("import --load-dir absent --save-dir there --hf-dir absent", "--hf-dir: does not apply to import"),
        ("import --load-dir absent --save-dir there --ckpt-step 0", "--ckpt-step: does not apply to import"),
        ("roundtrip --load-dir absent --without lm_head", "--without: does not apply to roundtrip"),
        (
            "export --load-dir absent --save-dir there",
            "--load-dir absent: has no latest_checkpointed_iteration.txt; give",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_named(capsys, words: str, said: str) -> None:
    try:
        status = convert_checkpoint.main(words.split())
    except SystemExit as error:
        status = error.code
    assert status and said in capsys.readouterr().err


def test_an_import_says_where_it_is_from(models, tmp_path) -> None:
    import_model(models("mixtral"), tmp_path / "there", quiet)
    origin = read_manifest(tmp_path / "there" / "iter_0000000").origin
    assert origin.run and origin.parent == f"{models('mixtral')}, converted"
    assert LeaseRecord.parse((tmp_path / "there" / "lease.000002").read_bytes()).released


LARGE = (
    *("Mixtral-8x22B", "Qwen3-235B-A22B", "DeepSeek-V2", "DeepSeek-V3", "Kimi-K2", "GLM-4.5", "GLM-4.5-Air"),
    *("MiniMax-M2", "ERNIE-4.5-300B-A47B", "gpt-oss-120b"),
)
"""Published models that take seconds."""


@pytest.mark.parametrize("name", variants([*PUBLISHED], {*PUBLISHED} - {*LARGE}))
def test_published_models_have_as_many_numbers_here(name: str) -> None:
    """Compare full-size parameter counts, with nothing allocated: ours, the authors' and those of `transformers`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    billions, config = PUBLISHED[name]
    with torch.device("meta"):
        # transformers does not know kimi_k2
        known = config | {"model_type": config["model_type"].replace("kimi_k2", "deepseek_v3")}
        source = AutoModelForCausalLM.from_config(AutoConfig.for_model(**known))
    # Tied tables are one tensor
    expected = sum(tensor.numel() for tensor in {*source.state_dict(keep_vars=True).values()})
    assert expected / 1e9 == pytest.approx(billions, rel=2e-3)
    model = Model(config)
    assert (
        sum(math.prod(size) for file in model.pieces() for piece in file for size in piece.source_sizes.values())
        == expected
    )
    with imagined_run(run_config(model, None), 0, 1) as run:
        (chunk,) = run.model
        found = sum(value.numel() for value in chunk.state_dict().values() if isinstance(value, torch.Tensor))
    padding = run.vocab_size - model.vocabulary
    assert found == expected + (1 if model.tied else 2) * padding * model.hidden


def peak_bytes(*words: str) -> int:
    """Return the peak memory of a run of the tool."""
    measure = "import resource as r, subprocess as s, sys; s.run(sys.argv[1:], check=True, stderr=s.DEVNULL); "
    measure += "print(r.getrusage(r.RUSAGE_CHILDREN).ru_maxrss)"
    words = (sys.executable, "-c", measure, sys.executable, "-W", "ignore", str(TOOL), *words)
    return 1024 * int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_memory_is_that_of_one_layer(models, tmp_path) -> None:
    """Converting ten times as many layers takes the same memory, which is little more than one layer's."""
    wide = {"hidden_size": 512, "intermediate_size": 4096, "vocab_size": 512}
    config = read_json(models("mixtral") / "config.json") | wide | {"dtype": "bfloat16"}
    peaks = []
    for layers in (2, 20):
        source, there, back = (tmp_path / f"{name}{layers}" for name in ("source", "there", "back"))
        source.mkdir()
        (source / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        files = Model(read_json(source / "config.json")).pieces()
        sizes = [{name: size for piece in pieces for name, size in piece.source_sizes.items()} for pieces in files]
        write(
            source, [[(name, torch.zeros(size, dtype=torch.bfloat16)) for name, size in file.items()] for file in sizes]
        )
        layer = sum(2 * math.prod(size) for size in sizes[1].values())
        importing = peak_bytes("import", "--load-dir", str(source), "--save-dir", str(there))
        shutil.rmtree(source)
        peaks.append((importing, peak_bytes("export", "--load-dir", str(there), "--save-dir", str(back))))
        shutil.rmtree(there)
        shutil.rmtree(back)
    print(f"a layer {layer}; peaks of 2 and 20 layers {peaks}")
    for few, many in zip(*peaks, strict=True):
        assert many < few + layer
