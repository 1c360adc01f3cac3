"""Tokenize JSONL text into Megatron's indexed datasets: PREFIX_KEY_document.bin and .idx for every JSON key.

Every input line is a JSON object with a string under each of --json-keys. Files may be compressed with gzip, bzip2 or
xz. The output does not depend on --workers and appears only when all input has been processed; after an error or
Ctrl-C, older files are unchanged.

    python tools/preprocess_data.py --input data/sample/code.jsonl --output-prefix data/sample/code \\
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model data/sample/bpe.model --append-eod
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_balance.cli.parser import Parser
from megatron_balance.cli.upstream_flags import ACCEPTED
from megatron_balance.config.flags import add_flags, build
from megatron_balance.config.run_config import TokenizerConfig
from megatron_balance.files.writing import staged, writing
from megatron_balance.training.tokenizer import build_tokenizer
from textfiles import BadLine, UnreadableFile, existing_file, parse_line, positive_int, read_lines

BAD_LINES_SHOWN = 20

WITHOUT_EFFECT = {
    "--partitions N": "has no effect; --workers share every input file",
    "--keep-sequential-samples": "is always in effect: documents keep the order of the input",
    "--log-interval N": "has no effect; a terminal shows a progress bar",
    "--dataset-impl mmap": "is always in effect",
    **dict.fromkeys(("--keep-newlines", "--lang NAME"), "has no effect without --split-sentences, which is refused"),
    **{entry: reason for entry, reason in ACCEPTED.items() if entry.startswith("--tokenizer-")},
}
"""Flags of Megatron's tool that change nothing here, as in ACCEPTED."""

REFUSED = {
    "--split-sentences": "sentences are for BERT; a document becomes one sequence of tokens",
    **dict.fromkeys(
        ("--find-optimal-num-workers", "--workers-to-check", "--max-documents"),
        "the number of workers is not searched for; use --workers",
    ),
}
"""Flags of Megatron's tool that are refused, with the reasons."""


class PreprocessingError(Exception):
    """The settings or the whole input cannot produce a dataset; the message names the remedy."""


@dataclass(frozen=True)
class Settings:
    """Settings of tokenization. Hashable, so that each process builds the tokenizer once (`encoder`)."""

    tokenizer: TokenizerConfig
    """The tokenizer's configuration, with special tokens as a tuple."""
    keys: tuple[str, ...]
    append_eod: bool


@dataclass(frozen=True)
class Chunk:
    """Consecutive lines of one input file."""

    path: Path
    first: int
    """Number of the first line, from 1."""
    lines: list[bytes]
    size: int
    """Bytes read from the file for these lines; fewer than their text if the file is compressed."""


@dataclass
class EncodedChunk:
    """A chunk's tokens."""

    size: int
    """The chunk's size."""
    documents: dict[str, list[np.ndarray]]
    """For each key, one array [tokens] of the dataset's dtype per document that has tokens."""
    bad: list[BadLine] = dataclasses.field(default_factory=list)


class Encoder:
    """Converts lines to tokens with one tokenizer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer = load_tokenizer(settings.tokenizer)
        self.vocab_size = self.tokenizer.vocab_size
        self.dtype = DType.optimal_dtype(self.vocab_size)
        self.ending = np.array([end_of_document(self.tokenizer)] if settings.append_eod else [], dtype=np.int64)

    def encode_line(self, line: bytes) -> list[np.ndarray]:
        """Return one array [tokens] per key; raise ValueError if the line is invalid."""
        return [self.encode_text(text) for text in parse_line(line, self.settings.keys)]

    def encode_text(self, text: str) -> np.ndarray:
        """Return a text's tokens [tokens], with the end-of-document token if requested and the text is not empty."""
        try:
            tokens = np.array(self.tokenizer.tokenize(text) if text else [], dtype=np.int64)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"the tokenizer cannot take this text: {error}") from error
        outside = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if outside.size:
            raise ValueError(f"token {outside[0]} is outside the vocabulary, 0 to {self.vocab_size - 1}")
        return (np.concatenate((tokens, self.ending)) if tokens.size else tokens).astype(self.dtype)


def load_tokenizer(config: TokenizerConfig) -> Any:
    """Return megatron-core's tokenizer for these settings; raise PreprocessingError if they are invalid."""
    special = config.tokenizer_special_tokens
    try:
        return build_tokenizer(dataclasses.replace(config, tokenizer_special_tokens=special and list(special)))
    except ValueError as error:
        raise PreprocessingError(str(error)) from error


def end_of_document(tokenizer: Any) -> int:
    """Return the tokenizer's end-of-document token; raise PreprocessingError if it has none."""
    try:
        token = tokenizer.eod
    except AttributeError:
        token = None
    if token is None or not 0 <= token < tokenizer.vocab_size:  # SentencePiece returns -1 for a model without </s>
        raise PreprocessingError(
            "--append-eod: the tokenizer has no end-of-document token; drop the flag, or use a model that has one "
            "(tools/train_tokenizer.py makes such models)"
        )
    return token


@functools.cache
def encoder(settings: Settings) -> Encoder:
    """Return this process's encoder; worker processes inherit or rebuild it."""
    return Encoder(settings)


def encode_chunk(settings: Settings, chunk: Chunk) -> EncodedChunk:
    """Tokenize a chunk. Bad lines are listed in the result and not encoded under any key."""
    encoded = EncodedChunk(chunk.size, {key: [] for key in settings.keys})
    for number, line in enumerate(chunk.lines, chunk.first):
        if not line.strip():
            continue
        try:
            documents = encoder(settings).encode_line(line)
        except ValueError as error:
            encoded.bad.append(BadLine(chunk.path, number, str(error)))
            continue
        for key, tokens in zip(settings.keys, documents, strict=True):
            if tokens.size:
                encoded.documents[key].append(tokens)
    return encoded


def read_chunks(paths: Iterable[Path]) -> Iterator[Chunk]:
    """Read the input files in order."""
    for path in paths:
        first = 1
        for lines, size in read_lines(path):
            yield Chunk(path, first, lines, size)
            first += len(lines)


def encode_chunks(settings: Settings, chunks: Iterable[Chunk], workers: int) -> Iterator[EncodedChunk]:
    """Call `encode_chunk` for each chunk, in order, in `workers` processes; with 1, in this process."""
    if workers == 1:
        yield from map(functools.partial(encode_chunk, settings), chunks)
        return
    # Ctrl-C reaches the whole process group, but only the parent acts on it
    pool = ProcessPoolExecutor(workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        pending: deque = deque()
        for chunk in chunks:
            pending.append(pool.submit(encode_chunk, settings, chunk))
            if len(pending) > 2 * workers:  # bounds memory: an executor's own map() would read all of the input
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise PreprocessingError(
            f"--workers {workers}: a worker process died, possibly from lack of memory; try fewer"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class Output:
    """The datasets being written, one per key, inside `folder`."""

    def __init__(self, folder: Path, name: str, keys: tuple[str, ...], dtype: type[np.number]) -> None:
        self.stems = {key: str(folder / f"{name}_{key}_document") for key in keys}
        self.builders = {key: IndexedDatasetBuilder(f"{stem}.bin", dtype=dtype) for key, stem in self.stems.items()}
        self.documents = dict.fromkeys(keys, 0)
        self.tokens = dict.fromkeys(keys, 0)

    def add(self, encoded: EncodedChunk) -> None:
        """Append a chunk's documents."""
        for key, documents in encoded.documents.items():
            with writing(f"{self.stems[key]}.bin"):
                for tokens in documents:
                    self.builders[key].add_document(tokens, [tokens.size])
                    self.tokens[key] += tokens.size
            self.documents[key] += len(documents)

    def finish(self) -> None:
        """Write the indices; raise PreprocessingError for a dataset without documents, which cannot be loaded."""
        for key, builder in self.builders.items():
            if not self.documents[key]:
                raise PreprocessingError(f"--input: no line has text under --json-keys {key}; check both flags")
            with writing(f"{self.stems[key]}.idx"):
                builder.finalize(f"{self.stems[key]}.idx")

    def close(self) -> None:
        """Close the data files, whether finished or not."""
        for key, builder in self.builders.items():
            with writing(f"{self.stems[key]}.bin"):
                builder.data_file.close()


class Display:
    """Progress and bad lines on stderr; the bar is shown only if stderr is a terminal."""

    def __init__(self, paths: list[Path]) -> None:
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.fields[rate]:.0f} docs/s"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        # Manual refresh avoids a second thread, which must not run when the worker processes are forked
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal, auto_refresh=False)
        self.task = self.bar.add_task("", total=sum(path.stat().st_size for path in paths), rate=0.0)
        self.started = time.monotonic()
        self.bad = 0

    def advance(self, size: int, documents: int) -> None:
        """Add `size` bytes of processed input; `documents` is the count so far."""
        self.bar.update(self.task, advance=size, rate=documents / self.seconds, refresh=True)

    def report(self, line: BadLine) -> None:
        """Print a bad line; after many, only count it."""
        self.bad += 1
        if self.bad <= BAD_LINES_SHOWN:
            self.console.out(str(line), highlight=False)

    @property
    def seconds(self) -> float:
        """Time since the start, above 0."""
        return max(time.monotonic() - self.started, 1e-9)


def preprocess(settings: Settings, paths: list[Path], prefix: str, *, workers: int, skip_bad: bool) -> list[str]:
    """Write the datasets and return the lines of a summary; raise BadLine at a bad line unless `skip_bad`."""
    display = Display(paths)
    folder, name = os.path.split(prefix)
    dtype = encoder(settings).dtype
    with staged(Path(folder)) as staging, display.bar:
        output = Output(staging, name, settings.keys, dtype)
        with (
            contextlib.closing(output),
            contextlib.closing(encode_chunks(settings, read_chunks(paths), workers)) as encoded_chunks,
        ):
            for encoded in encoded_chunks:
                if encoded.bad and not skip_bad:
                    raise encoded.bad[0]
                for line in encoded.bad:
                    display.report(line)
                output.add(encoded)
                display.advance(encoded.size, max(output.documents.values()))
            output.finish()
    summary = [
        f"{prefix}_{key}_document: {output.documents[key]} documents, {output.tokens[key]} tokens "
        f"({dtype.__name__}), {display.seconds:.1f} s"
        for key in settings.keys
    ]
    return summary + ([f"{display.bad} bad lines skipped"] if display.bad else [])


def main(argv: list[str] | None = None) -> int:
    """Run the tool and return the exit status; raise SystemExit(2) for invalid flags."""
    parser = _parser()
    args = parser.parse_args(argv)
    settings = _settings(parser, args)
    for entry, reason in WITHOUT_EFFECT.items():
        if getattr(args, flag := entry.partition(" ")[0]):
            print(f"note: {flag}: {reason}", file=sys.stderr)
    try:
        skip_bad = args.on_bad_line == "skip"
        summary = preprocess(settings, args.input, args.output_prefix, workers=args.workers, skip_bad=skip_bad)
    except BadLine as error:
        message = f"{error}\nfix the line, or skip such lines with --on-bad-line skip"
        status = 1
    except (PreprocessingError, UnreadableFile, OSError) as error:
        message = str(error)
        status = 1
    except KeyboardInterrupt:
        message = "interrupted"
        status = 130
    else:
        print(*summary, sep="\n", file=sys.stderr)
        return 0
    print(f"{message}; nothing was written", file=sys.stderr)
    return status


def _settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Settings:
    """Return the checked settings; call `parser.error` if a flag is invalid."""
    keys = args.json_keys
    if len(set(keys)) < len(keys):
        parser.error(f"--json-keys {' '.join(keys)}: names a key twice; give each key once")
    if unusable := [key for key in keys if not key or "/" in key or os.sep in key]:
        parser.error(f"--json-keys {unusable[0]!r}: a key becomes part of a file name; rename the key in the input")
    if args.tokenizer_type is None:
        parser.error("--tokenizer-type: not given; choose one of the types that --help lists")
    special = args.tokenizer_special_tokens
    config = build(TokenizerConfig, vars(args), tokenizer_special_tokens=special and tuple(special))
    settings = Settings(config, tuple(keys), args.append_eod)
    try:
        encoder(settings)
    except PreprocessingError as error:
        parser.error(str(error))
    try:
        Path(os.path.dirname(args.output_prefix)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output-prefix {args.output_prefix}: no directory to write to: {error}; choose another prefix")
    return settings


class ToolParser(Parser):
    """A parser that also knows the flags of Megatron's tool."""

    def why_unknown(self, flag: str) -> str | None:
        """Return the reason why this tool does not have a flag; None if there is none to give."""
        return REFUSED.get(flag) or super().why_unknown(flag)


def _parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    data = parser.add_argument_group("input and output")
    add = data.add_argument
    add("--input", type=existing_file, nargs="+", required=True, metavar="FILE", help="JSONL files, read in this order")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to tokenize (default: text)")
    add("--output-prefix", required=True, metavar="PREFIX", help="datasets are named PREFIX_KEY_document")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--workers", type=positive_int, default=1, metavar="N", help="tokenizing processes (default: %(default)s)")
    add(
        "--on-bad-line",
        choices=["error", "skip"],
        default="error",
        help="for a line without a document: stop and write nothing (the default), or report and skip it",
    )
    add_flags(parser.add_argument_group("tokenizer"), TokenizerConfig)
    parser.add_without_effect(WITHOUT_EFFECT)
    return parser


if __name__ == "__main__":
    sys.exit(main())
