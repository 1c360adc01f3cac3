"""Convert Hugging Face models and Megatron-LM's checkpoints into ours, and our checkpoints into Hugging Face models."""

import contextlib
import fnmatch
import io
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megatron_balance.checkpoint import manifest, saved_flags
from megatron_balance.checkpoint.directory import UNFINISHED, CheckpointDirectory
from megatron_balance.checkpoint.lease import NAME as LEASE
from megatron_balance.checkpoint.lease import Lease, Owner
from megatron_balance.checkpoint.manifest import Origin, new_run_name, utc_now
from megatron_balance.checkpoint.safe_pickle import COMMON
from megatron_balance.convert import safetensors_files, torch_dist
from megatron_balance.convert.config_fields import MAX_LISTED
from megatron_balance.convert.megatron import MegatronCheckpoint
from megatron_balance.convert.model import OUTPUT, TABLE, Model
from megatron_balance.convert.pieces import Piece, PieceSource, Size
from megatron_balance.convert.safetensors_files import CONFIG, Weights
from megatron_balance.convert.settings import run_config, trained_config
from megatron_balance.files.reading import MIB, inside, read_object
from megatron_balance.files.writing import staged, write_file

HF_DIRECTORY = "huggingface"
"""Directory next to the checkpoints of an imported model, with its config.json and tokenizer."""

MAX_CONFIG_BYTES = MIB
"""Limit for a config.json; published ones have a few kilobytes."""

DERIVED = tuple(f"*.rotary_emb.{name}" for name in ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached"))
"""Patterns of the names of tensors that follow from config.json. Old versions of transformers saved them."""

Log = Callable[[str], object]


def import_model(source: Path, target: Path, log: Log, without: Sequence[str] = ()) -> None:
    """Convert a Hugging Face model into a checkpoint of iteration 0 in `target`, with weights only.

    Args:
        log: receives progress, and notices, which end in a newline.
        without: patterns (`fnmatch`) of how the names of tensors to leave out begin.

    Raises:
        ValueError: the model is unknown, its files do not match its config.json, or no tensor matches a pattern.
        OSError: `target` cannot be written. Partial output is removed.
    """
    model, weights = checked_model(source, without, log)
    config = run_config(model, (target / HF_DIRECTORY).resolve() if any(source.glob("tokenizer*")) else None)
    with _new_directory(target, log) as lease:
        with staged(target / HF_DIRECTORY) as hf_files:
            safetensors_files.carry(source, hf_files)
        _write_checkpoint(lease, _with_progress(model.pieces(), log), weights, saved_flags.to_json(config), source)


def checked_model(source: Path, without: Sequence[str] = (), log: Log = lambda text: None) -> tuple[Model, Weights]:
    """Return a Hugging Face model and exactly its tensors, after checking that they match its config.json; arguments
    and errors are those of `import_model`."""
    weights = Weights(source)
    model = _model(source)
    if small := sum(tensor.scales is not None for tensor in weights.tensors.values()):
        log(f"{small} tensors in MXFP4 become bfloat16\n")
    for pattern in without:
        if not _leave_out(weights, [pattern]):
            raise ValueError(f"--without {pattern}: no tensor in {source} has a name that begins so")
    for name, parts in list(model.divisions(weights.shapes)):
        weights.divide(name, parts)
    if predicting := _leave_out(weights, model.prediction_layers):
        log(f"{predicting} tensors of multi-token prediction are left out: {', '.join(model.prediction_layers)}*\n")
    _leave_out(weights, DERIVED)
    if model.tied and {TABLE, OUTPUT} <= weights.tensors.keys():
        if not torch.equal(weights.read(OUTPUT), weights.read(TABLE)):
            raise ValueError(
                f"{source}: {OUTPUT} differs from {TABLE}, but config.json says tie_word_embeddings; leave it out with "
                f"--without {OUTPUT}, or set tie_word_embeddings to false"
            )
        _leave_out(weights, [OUTPUT])
    wanted = (item for pieces in model.files() for piece in pieces for item in piece.source_sizes.items())
    _compare(weights.shapes, wanted, str(source), "--without PATTERN leaves tensors out")
    for notice in model.notices():
        log(f"{notice}\n")
    return model, weights


def _leave_out(weights: Weights, patterns: Iterable[str]) -> int:
    """Leave out the tensors whose names begin as one of several patterns says; return how many there are."""
    names = {name for pattern in patterns for name in fnmatch.filter(weights.tensors, f"{pattern}*")}
    for name in names:
        del weights.tensors[name]
    return len(names)


def import_megatron(source: Path, target: Path, log: Log, step: int | None = None) -> None:
    """Convert the weights of a Megatron-LM checkpoint, by default the latest, like `import_model`."""
    checkpoint = MegatronCheckpoint(source, step)
    with _new_directory(target, log) as lease:
        files = _with_progress(checkpoint.files, log)
        _write_checkpoint(lease, files, checkpoint, checkpoint.flags(), checkpoint.path)


def _model(directory: Path) -> Model:
    """Return the model that a directory's config.json describes; raise ValueError if it is invalid."""
    path = inside(directory, CONFIG)
    content = read_object(path, MAX_CONFIG_BYTES)
    try:
        return Model(content)
    except ValueError as error:
        raise ValueError(f"{directory / CONFIG}: {error}") from error


@contextlib.contextmanager
def _new_directory(target: Path, log: Log) -> Iterator[Lease]:
    """Hold the lease of a directory without checkpoints; if the block fails, empty the directory."""
    _check_empty(target, _is_leftover)
    existed = target.is_dir()
    target.mkdir(parents=True, exist_ok=True)
    lease = Lease(target, Owner.here("of convert_checkpoint.py"), f"--save-dir {target}")
    lease.acquire(log)
    lease.keep()
    try:
        for notice in CheckpointDirectory(target).recover():
            log(notice)
        yield lease
    except BaseException:
        lease.release()
        for path in target.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not existed:
            target.rmdir()
        raise
    lease.release()


def _check_empty(target: Path, is_allowed: Callable[[Path], object] = lambda path: False) -> None:
    """Raise ValueError unless a directory is absent or empty, because output might follow an existing link."""
    if os.path.lexists(target) and not target.is_dir():
        raise ValueError(f"--save-dir {target}: is not a directory; choose another")
    if found := [path.name for path in target.glob("*") if not is_allowed(path)]:
        raise ValueError(f"--save-dir {target}: is not empty: has {found[0]}; choose another, or remove what is there")


def _is_leftover(path: Path) -> bool:
    """Return whether a file is from an import that was killed; the next import replaces it."""
    is_ours = path.name == HF_DIRECTORY or LEASE.fullmatch(path.name) or UNFINISHED.fullmatch(path.name)
    return bool(is_ours) and not path.is_symlink()


def _write_checkpoint(
    lease: Lease, files: Iterable[Sequence[Piece]], pieces: PieceSource, flags: str, source: Path
) -> None:
    """Write the checkpoint of iteration 0."""
    directory = CheckpointDirectory(lease.root)
    started = utc_now()
    path = directory.stage(0)
    torch_dist.write(path, files, pieces)
    common = io.BytesIO()
    torch.save({"checkpoint_version": 3.0, "iteration": 0, "parts": []}, common)
    write_file(path / COMMON, common.getvalue())
    write_file(path / saved_flags.FILE, flags.encode())
    origin = Origin.now(new_run_name(), started, f"{source.resolve()}, converted")
    manifest.write(path, 0, origin, {file.name: manifest.sync_and_digest(file) for file in path.iterdir()})
    lease.check()
    directory.commit(path, 0)


def export_model(source: Path, target: Path, log: Log, *, hf_dir: Path | None = None, step: int | None = None) -> None:
    """Convert the weights of a checkpoint in `source` into a Hugging Face model.

    Args:
        log: as for `import_model`.
        hf_dir: directory with the model's config.json and tokenizer; default: the one that `import_model` wrote.
        step: iteration of the checkpoint; default: the latest.

    Raises:
        ValueError: the checkpoint is damaged or belongs to another model; the message names the problem.
        OSError: `target` cannot be written. Partial output is removed.
    """
    path = CheckpointDirectory(source).chosen(step)
    hf_dir = hf_dir or source / HF_DIRECTORY
    if not (hf_dir / CONFIG).exists():
        raise ValueError(f"{hf_dir}: has no config.json; give --hf-dir DIR with the model's config.json and tokenizer")
    _check_empty(target)
    manifest.verify(path, manifest.read(path).files)
    model = _model(hf_dir)
    reader = torch_dist.Reader(path)
    weights = {name: tuple(entry.size) for name, entry in reader.weights.items() if not name.startswith("mtp.")}
    if left_out := len(reader.weights) - len(weights):
        log(f"{left_out} tensors of multi-token prediction are left out: mtp.*\n")
    tables = {"embedding.word_embeddings.weight", "output_layer.weight"}
    wanted = (
        # The checkpoint's tables may have additional rows as padding
        (piece.key, weights.get(piece.key, piece.shape) if piece.key in tables else piece.shape)
        for piece in itertools.chain.from_iterable(model.files(experts=1))
    )
    _compare(weights, wanted, str(path))
    saved = saved_flags.read(path)
    (table,) = next(model.files())
    try:
        config = trained_config(model, saved, reader.weights[table.key].properties.dtype)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    trained = Model(config)
    if (padding := weights[table.key][0] - trained.vocabulary) > 0:
        log(f"{padding} rows of {table.key} are left out as padding: vocab_size is {trained.vocabulary}\n")
    for notice in trained.notices(saved.get("moe_expert_capacity_factor")):
        log(f"{notice}\n")

    def tensors(pieces: Sequence[Piece]) -> Iterator[tuple[str, torch.Tensor]]:
        for piece in pieces:
            yield from zip(piece.sources, piece.join.split(reader.read(piece)), strict=True)

    # Without its config.json, the output does not look like a model
    with staged(target, last=CONFIG) as model_files:
        safetensors_files.carry(hf_dir, model_files)
        if config != model.content:
            safetensors_files.write_json(model_files / CONFIG, config)
        safetensors_files.write(model_files, [tensors(pieces) for pieces in _with_progress(trained.pieces(), log)])


def _compare(found: Mapping[str, Size], tensors: Iterable[tuple[str, Size]], where: str, remedy: str = "") -> None:
    """Raise ValueError unless the found tensors have exactly the names and sizes in `tensors`; iteration stops once
    more are missing than an error can list. `remedy`: what to do about tensors that are not part of the model."""
    wanted: dict[str, Size] = {}
    for name, size in tensors:
        wanted[name] = size
        if len(wanted) > len(found) + MAX_LISTED:
            break
    problems = {"missing": sorted(wanted.keys() - found.keys())}
    if len(problems["missing"]) <= MAX_LISTED:
        problems["not part of such a model"] = extra = sorted(found.keys() - wanted.keys())
        problems["of another shape"] = [
            f"{name} {found[name]} instead of {size}"
            for name, size in sorted(wanted.items())
            if name in found and found[name] != size
        ]
        remedy = remedy if extra else ""
    texts = []
    for text, names in problems.items():
        if len(names) > MAX_LISTED:
            texts.append(f"more than {MAX_LISTED} tensors {text}: {', '.join(names[:MAX_LISTED])}, ...")
        elif names:
            texts.append(f"{len(names)} tensors {text}: {', '.join(names)}")
    if texts:
        raise ValueError(f"{where}: {'; '.join([*texts, *([remedy] if remedy else [])])}")


def _with_progress(files: Sequence[Sequence[Piece]], log: Log) -> Iterator[Sequence[Piece]]:
    for number, pieces in enumerate(files):
        yield pieces
        log(f"{number + 1} of {len(files)} files")
