"""Hugging Face models and upstream's checkpoints -> checkpoints that training starts from -> Hugging Face models."""

import contextlib
import io
import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megatron_balance.checkpoint import manifest, saved_flags
from megatron_balance.checkpoint.directory import UNFINISHED, CheckpointDirectory
from megatron_balance.checkpoint.lease import NAME as LEASE
from megatron_balance.checkpoint.lease import Lease
from megatron_balance.checkpoint.lease_owner import Owner
from megatron_balance.checkpoint.manifest import Origin
from megatron_balance.checkpoint.save_directory import new_run_name, package_versions, utc_now
from megatron_balance.checkpoint.writer import COMMON
from megatron_balance.cli.arguments import parse_args
from megatron_balance.config.run_config import RunConfig
from megatron_balance.convert import safetensors_files, torch_dist
from megatron_balance.convert.architectures import Model
from megatron_balance.convert.megatron import Checkpoint
from megatron_balance.convert.pieces import Piece, Size
from megatron_balance.convert.safetensors_files import Weights
from megatron_balance.device.machine import Machine
from megatron_balance.files.reading import MIB, inside, read_object
from megatron_balance.files.writing import INCOMPLETE, staged, writing

HF_DIRECTORY = "huggingface"
"""Directory beside the checkpoints of an imported model: its config.json, its tokenizer."""

LISTED = 20
"""Tensors that an error names, at most."""

MAX_CONFIG_BYTES = MIB
"""Of a config.json; published ones have a few kilobytes."""

Say = Callable[[str], object]


def import_model(source: Path, target: Path, say: Say, without: Sequence[str] = ()) -> None:
    """Convert a Hugging Face model into a checkpoint of iteration 0 in `target`, of its weights alone.

    Args:
        without: beginnings of names of tensors that are left behind.

    Raises:
        ValueError: the model is not known, its files are not what its config.json says, or nothing begins as `without`
            says; names them.
        OSError: `target` cannot be written. Nothing is left of what was written.
    """
    model, weights = checked_model(source, without)
    config = run_config(model, (target / HF_DIRECTORY).resolve() if any(source.glob("tokenizer*")) else None)

    def make(piece: Piece) -> torch.Tensor:
        return piece.join.join([weights.read(name) for name in piece.sources])

    def dtype(piece: Piece) -> torch.dtype:
        return weights.dtypes[piece.sources[0]]

    with _fresh(target, say) as lease:
        with staged(target / HF_DIRECTORY) as beside:
            safetensors_files.carry(source, beside)
        _begin(lease, _told(model.pieces(), say), dtype, make, saved_flags.to_json(config), source)


def checked_model(source: Path, without: Sequence[str] = ()) -> tuple[Model, Weights]:
    """A Hugging Face model whose tensors are those that its config.json means; none of them is read.

    Takes the arguments of `import_model` and raises the same errors.
    """
    model, weights = _model(source), Weights(source)
    for prefix in without:
        if not any(name.startswith(prefix) for name in weights.shapes):
            raise ValueError(f"--without {prefix}: no tensor in {source} has a name that begins so")
    shapes = {name: shape for name, shape in weights.shapes.items() if not name.startswith(tuple(without))}
    _compare(shapes, _sources(itertools.chain.from_iterable(model.files())), str(source))
    return model, weights


def import_megatron(source: Path, target: Path, step: int | None, say: Say) -> None:
    """Convert the weights of a checkpoint of upstream's Megatron-LM into one of iteration 0 in `target`.

    Raises:
        ValueError: the checkpoint is damaged, or holds something else; names what.
        OSError: `target` cannot be written. Nothing is left of what was written.
    """
    checkpoint = Checkpoint(source, step)
    with _fresh(target, say) as lease:
        files = _told(checkpoint.files, say)
        _begin(lease, files, checkpoint.dtype, checkpoint.make, checkpoint.flags(), checkpoint.path)


def _model(directory: Path) -> Model:
    """The model that a directory's config.json describes; ValueError names what is wrong with it."""
    path = inside(directory, "config.json")
    content = read_object(path, MAX_CONFIG_BYTES)
    try:
        return Model(content)
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error


@contextlib.contextmanager
def _fresh(target: Path, say: Say) -> Iterator[Lease]:
    """A directory without checkpoints that nobody else writes to; as it was before, if what is done inside fails."""
    _check_empty(target, _is_left_over)
    existed = target.is_dir()
    target.mkdir(parents=True, exist_ok=True)
    lease = Lease(target, Owner.here("of convert_checkpoint.py"), f"--save-dir {target}")
    lease.acquire(say)
    lease.keep()
    for notice in CheckpointDirectory(target).recover():
        say(notice)
    before = {path.name for path in target.iterdir()}
    try:
        yield lease
        lease.release()
    except BaseException:
        lease.release()
        for path in target.iterdir():
            if path.name not in before or not existed:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        if not existed:
            target.rmdir()
        raise


def _check_empty(target: Path, may_be_there: Callable[[Path], object] = lambda path: False) -> None:
    """ValueError unless a directory is absent or empty: not even a link is there that would be written through."""
    if os.path.lexists(target) and not target.is_dir():
        raise ValueError(f"--save-dir {target}: is no directory; choose another")
    found = [path.name for path in target.iterdir() if not may_be_there(path)] if target.exists() else []
    if any(name.startswith(INCOMPLETE) for name in found):
        raise ValueError(
            f"--save-dir {target}: is not empty: {INCOMPLETE}* was left by a conversion that was killed, or is being "
            "written; remove it, or choose another"
        )
    if found:
        raise ValueError(f"--save-dir {target}: is not empty; choose another")


def _is_left_over(path: Path) -> bool:
    """Whether an import that was killed has left it, of which the next one takes the place."""
    return not path.is_symlink() and (
        path.name == HF_DIRECTORY or LEASE.fullmatch(path.name) or UNFINISHED.fullmatch(path.name)
    )


def _begin(
    lease: Lease,
    files: Iterable[Sequence[Piece]],
    dtype: Callable[[Piece], torch.dtype],
    make: Callable[[Piece], torch.Tensor],
    flags: str,
    source: Path,
) -> None:
    """Write the checkpoint of iteration 0."""
    directory, started = CheckpointDirectory(lease.root), utc_now()
    path = directory.stage(0)
    torch_dist.write(path, files, dtype, make)
    common = io.BytesIO()
    torch.save({"checkpoint_version": 3.0, "iteration": 0, "parts": []}, common)
    for name, content in ((COMMON, common.getvalue()), (saved_flags.FILE, flags.encode())):
        with writing(path / name):
            (path / name).write_bytes(content)
    origin = Origin(
        run=new_run_name(),
        host=socket.gethostname(),
        started=started,
        saved=utc_now(),
        parent=f"{source.resolve()}, converted",
        versions=package_versions(),
    )
    manifest.write(path, 0, origin, {file.name: manifest.sync_and_digest(file) for file in path.iterdir()})
    lease.check()
    directory.commit(path, 0)


def export_model(source: Path, target: Path, files_of: Path | None, step: int | None, say: Say) -> None:
    """Convert the weights of a checkpoint in `source` into a Hugging Face model.

    Args:
        files_of: where the model's config.json and tokenizer are; default: where `import_model` put them.
        step: iteration of the checkpoint; default: the latest.

    Raises:
        ValueError: the checkpoint is not one of such a model, or damaged; names what.
        OSError: `target` cannot be written. Nothing is left of what was written.
    """
    beside = files_of or source / HF_DIRECTORY
    if not (beside / "config.json").exists():
        raise ValueError(f"{beside}: has no config.json; give --hf-dir DIR with the model's config.json and tokenizer")
    _check_empty(target)
    model, path = _model(beside), newest(source, step)
    reader = torch_dist.Reader(path)
    weights = {name: tuple(entry.size) for name, entry in reader.weights.items()}
    tables = {"embedding.word_embeddings.weight", "output_layer.weight"}
    wanted = (
        # More rows than words: padding
        (piece.key, weights.get(piece.key, piece.shape) if piece.key in tables else piece.shape)
        for piece in itertools.chain.from_iterable(model.files(experts=1))
    )
    _compare(weights, wanted, str(path))

    def tensors(pieces: Sequence[Piece]) -> Iterator[tuple[str, torch.Tensor]]:
        for piece in pieces:
            yield from zip(piece.sources, piece.join.split(reader.read(piece)), strict=True)

    # Without its config.json, nobody takes the rest for a model
    with staged(target, last="config.json") as model_files:
        safetensors_files.carry(beside, model_files)
        safetensors_files.write(model_files, [tensors(pieces) for pieces in _told(model.pieces(), say)])


def newest(source: Path, step: int | None) -> Path:
    """A checkpoint in `source`, every byte of which is what was saved.

    Raises:
        ValueError: there is none, or it is damaged; names the file.
    """
    directory = CheckpointDirectory(source)
    iteration = directory.tracked() if step is None else step
    if iteration is None or not directory.path(iteration).is_dir():
        raise ValueError(f"--load-dir {source}: holds no checkpoint of iteration {iteration}")
    path = directory.path(iteration)
    manifest.verify(path, manifest.read(path).files)
    return path


def run_config(model: Model, tokenizer: Path | None) -> RunConfig:
    """The configuration of a run of this model; what the model does not say is left to who trains it."""
    flags = [*model.flags(), "--micro-batch-size=1", "--train-iters=1", "--lr=1e-5", "--mock-data"]
    if tokenizer is None:
        flags += ["--tokenizer-type=NullTokenizer"]
    else:
        flags += ["--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={tokenizer}"]
    return parse_args(flags, Machine(1, cuda=False, transformer_engine=False, apex=False)).config


def _sources(pieces: Iterable[Piece]) -> Iterator[tuple[str, Size]]:
    return itertools.chain.from_iterable(piece.source_sizes.items() for piece in pieces)


def _compare(found: Mapping[str, Size], tensors: Iterable[tuple[str, Size]], where: str) -> None:
    """ValueError unless these are the tensors that were found, of the same sizes.

    Args:
        tensors: names and sizes; so many more than were found that an error could not name them are not counted.
    """
    wanted: dict[str, Size] = {}
    for name, size in tensors:
        wanted[name] = size
        if len(wanted) > len(found) + LISTED:
            absent = list(itertools.islice((name for name in wanted if name not in found), LISTED))
            raise ValueError(f"{where}: more than {LISTED} tensors missing: {', '.join(absent)}, ...")
    missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    other = [
        f"{name} {found[name]} instead of {wanted[name]}"
        for name in sorted(found.keys() & wanted.keys())
        if tuple(found[name]) != tuple(wanted[name])
    ]
    problems = {"missing": missing, "not part of such a model": extra, "of another shape": other}
    texts = [
        f"{len(names)} tensors {text}: {', '.join(names[:LISTED])}{', ...' if len(names) > LISTED else ''}"
        for text, names in problems.items()
        if names
    ]
    if texts:
        raise ValueError(f"{where}: {'; '.join(texts)}")


def _told(files: Sequence[Sequence[Piece]], say: Say) -> Iterator[Sequence[Piece]]:
    for number, pieces in enumerate(files):
        yield pieces
        say(f"{number + 1} of {len(files)} files")
